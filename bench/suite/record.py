"""Measurements, in one JSON file: an interrupted run continues from it, and tables are written from it."""

import hashlib
import json
import os
import platform
import shlex
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from .rates import Rates
from .setups import Setup
from .timing import Timing

# Options that change what a number means: a run goes on only with the same.
SAME = ["steps", "warmup", "threads", "pairs", "micro_batch_tokens"]


@dataclass
class Record:
    """All of a run."""

    about: dict
    tasks: dict = field(default_factory=dict)
    timings: list = field(default_factory=list)
    rates: list = field(default_factory=list)

    TIMING: ClassVar = Timing
    RATES: ClassVar = Rates
    SAME: ClassVar = SAME

    @classmethod
    def start(cls, args, root: Path) -> "Record":
        return cls({
            "machine": cls.machine(args), "commit": commit(root), "tandem": digest(args.tandem), "versions": versions(args.python),
            "torch_environment": args.torch_environment, "commands": [],
            "options": {name: getattr(args, name) for name in cls.SAME},
        })

    @staticmethod
    def machine(args) -> str:
        """Key of numbers that may be compared: one machine."""
        return machine()

    @classmethod
    def read(cls, file: Path) -> "Record":
        value = json.loads(file.read_text())
        return cls(value["about"], value["tasks"], [cls.TIMING.from_json(timing) for timing in value["timings"]],
                   [cls.RATES.from_json(rates) for rates in value["rates"]])

    def add_command(self, program: str, words: list) -> None:
        """That this is being measured with."""
        command = shlex.join([program, *without_places(words)])
        if command not in self.about["commands"]:
            self.about["commands"].append(command)

    def must_continue(self, args, file: Path) -> None:
        """Ends the program if numbers of this run would not belong to those that are there."""
        for name, before in self.about["options"].items():
            if getattr(args, name) != before:
                sys.exit(f"{file} was measured with {name} = {before}, not {getattr(args, name)}: give the same or another --out-dir")
        if self.about["tandem"] != digest(args.tandem):
            sys.exit(f"{file} was measured with another build of Tandem than {args.tandem}: start afresh, without --resume")
        if self.about["machine"] != self.machine(args):
            sys.exit(f"{file} was measured on another machine ({self.about['machine']}): start afresh, without --resume")

    def forget(self, cores: float, warmup: int) -> None:
        """Forgets failures; and processes that used fewer cores, with the rates of products of their repeats."""
        disturbed = {(t.task, t.repeat) for t in self.timings if not t.error and t.cores(warmup) < cores}
        self.timings = [t for t in self.timings if not t.error and t.cores(warmup) >= cores]
        self.rates = [r for r in self.rates if (r.task, r.repeat) not in disturbed]

    def write(self, file: Path) -> None:
        """Whole or not at all."""
        text = json.dumps({"about": self.about}, indent=1)[:-2]  # the rest: one task, one process a line
        tasks = ",\n".join(f'  "{name}": {json.dumps(value)}' for name, value in self.tasks.items())
        text += f',\n "tasks": {{\n{tasks}\n }}'
        for name, items in (("timings", self.timings), ("rates", self.rates)):
            lines = ",\n".join("  " + json.dumps(item.to_json()) for item in items)
            text += f',\n "{name}": [\n{lines}\n ]'
        part = file.with_suffix(".part")
        part.write_text(text + "\n}\n")
        part.replace(file)

    def timing(self, task: str, repeat: int, setup: Setup) -> Timing | None:
        return next((t for t in self.timings if (t.task, t.repeat, t.setup) == (task, repeat, setup)), None)

    def of(self, task: str, setup: Setup) -> list:
        """Timings of a set-up that did not fail."""
        return [t for t in self.timings if t.task == task and t.setup == setup and not t.error]

    def rate(self, task: str, repeat: int, type_: str) -> Rates | None:
        return next((r for r in self.rates if (r.task, r.repeat, r.type) == (task, repeat, type_)), None)

    def setups(self, task: str) -> list:
        """In the order in which they were first run."""
        return list(dict.fromkeys(t.setup for t in self.timings if t.task == task))


def without_places(words: list) -> list:
    """The command for others: without where things lie on this machine, and without what changes no number."""
    kept, words = [], list(words)
    names = {"--python": "VENV/bin/python", "--mitchell": "direct-preference-optimization", "--out-dir": "DIR"}
    while words:
        word = words.pop(0)
        if word in ("--tandem", "--torchtune", "--ops-bench", "--work", "--minutes", "--retry-below"):
            words.pop(0)
        elif word in names:
            kept += [word, names[word]]
            words.pop(0)
        elif word not in ("--resume", "--overwrite"):
            kept.append(word)
    return kept


def commit(root: Path) -> str:
    """Of the repository, or of the copy of it that `tools/gpu/pack` made."""
    if (root / "commit").is_file():
        return (root / "commit").read_text().strip()
    return subprocess.run(["git", "-C", root, "describe", "--always", "--dirty"], stdout=subprocess.PIPE,
                          stderr=subprocess.DEVNULL, text=True).stdout.strip()


def machine() -> str:
    model, flags = "unknown processor", Path("/proc/cpuinfo").read_text()
    for line in flags.splitlines():
        if line.startswith("model name"):
            model = line.split(":", 1)[1].strip()
            break
    features = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {flag}" in flags]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return f"{model} ({', '.join(features)}), {os.cpu_count()} cores, {memory:.0f} GiB, Linux {platform.release()}"


def digest(file: Path) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16]


def versions(python: str) -> str:
    code = ("from importlib.metadata import version, PackageNotFoundError\n"
            "for name in ('torch', 'transformers', 'trl', 'peft', 'bitsandbytes', 'liger-kernel', 'flash-attn', 'flash-attn-4'):\n"
            "    try: print(name, version(name))\n"
            "    except PackageNotFoundError: pass\n")
    lines = subprocess.run([python, "-c", code], stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    return ", ".join(lines)
