"""Task that the programs are timed on: made once per size and shape, the same on every machine."""

import json
import subprocess
from dataclasses import astuple, dataclass
from functools import cache, cached_property
from pathlib import Path

from .flops import Llama, Load, load_of_pair, load_of_row, useful
from .setups import Setup

HERE = Path(__file__).resolve().parent.parent
END = "</s>"


class Work:
    """Facts of a task that the tables need: `size`, `shape`, `steps`, `facts`, and what each step has to do."""

    @property
    def name(self) -> str:
        return f"{self.size} {self.shape}"

    def flops(self, setup: Setup, step: int) -> float:
        return useful(Llama.of(self.facts), self.load(setup.method, step), setup.adapter, setup.reference)

    def products(self) -> list[tuple[int, int, int]]:
        """Rows, inputs and outputs of the products of a step of DPO, of typical size."""
        llama, load = Llama.of(self.facts), self.load("dpo", 0)
        return [(load.tokens, *product) for product in llama.products()] + [(load.scored, llama.hidden, llama.vocab)]

    def describe(self) -> str:
        facts = self.facts
        return (f"Hidden {facts['hidden_size']}, {facts['num_hidden_layers']} layers, vocabulary {facts['vocab_size']}, "
                f"{facts['parameters'] / 1e6:.1f} M parameters; {facts['pairs_per_step']} pairs a step, prompts of "
                f"{facts['prompt_tokens']:.0f} tokens, answers of {facts['answer_tokens']:.0f}")


@dataclass(frozen=True)
class Task(Work):
    """A size of model on a shape of data. The folder holds model, adapter and each shape's pairs."""

    size: str
    shape: str
    folder: Path
    steps: int  # of a process
    pairs: int | None = None  # a step, where not the size's own

    @cached_property
    def facts(self) -> dict:
        facts = json.loads((self.folder / f"{self.shape}.json").read_text())
        return facts | ({"pairs_per_step": self.pairs} if self.pairs else {})

    @cached_property
    def rows(self) -> list:
        """Prompt, chosen and rejected of each pair, in tokens: one a word, and the end."""
        text = (self.folder / f"{self.shape}.jsonl").read_text()
        rows = (json.loads(line) for line in text.splitlines())
        return [(row["prompt"].split(), row["chosen"].split() + [END], row["rejected"].split() + [END]) for row in rows]

    def file(self, method: str) -> Path:
        return self.folder / (f"{self.shape}.jsonl" if method == "dpo" else f"{self.shape}-sft.jsonl")

    def batch(self, step: int) -> list:
        size = self.facts["pairs_per_step"]
        return self.rows[step * size:(step + 1) * size]

    @cache
    def load(self, method: str, step: int) -> Load:
        """Load of step `step`."""
        batch = self.batch(step)
        loads = ([load_of_pair(*row) for row in batch] if method == "dpo"
                 else [load_of_row(prompt, chosen) for prompt, chosen, _ in batch])
        return sum(loads, Load(0, 0, 0, 0))

    def real_tokens(self, method: str, step: int) -> int:
        """Tokens that are not padding, a prompt once per answer."""
        if method == "sft":
            return sum(len(prompt) + len(chosen) for prompt, chosen, _ in self.batch(step))
        return sum(2 * len(prompt) + len(chosen) + len(rejected) for prompt, chosen, rejected in self.batch(step))

    def to_json(self) -> dict:
        """Facts for `Measured`."""
        steps = [{method: [*astuple(self.load(method, step)), self.real_tokens(method, step)] for method in ("dpo", "sft")}
                 for step in range(self.steps)]
        return {"size": self.size, "shape": self.shape, "steps": self.steps, "facts": self.facts, "loads": steps}


@dataclass(frozen=True)
class Measured(Work):
    """A task that was measured, from the record: its files need not be here."""

    size: str
    shape: str
    steps: int
    facts: dict
    loads: list

    def load(self, method: str, step: int) -> Load:
        return Load(*self.loads[step][method][:-1])

    def real_tokens(self, method: str, step: int) -> int:
        return self.loads[step][method][-1]


def make(size: str, shape: str, adapters: bool, python: str, work: Path, steps: int,
         pairs: int | None) -> Task:
    """The task, from its files if they are there."""
    folder = work / size
    run = {"check": True, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    if not (folder / f"{shape}.json").exists():
        subprocess.run([python, HERE / "make_task.py", size, shape, folder], **run)
    if adapters and not (folder / "adapter/adapter_config.json").exists():
        subprocess.run([python, HERE / "make_adapter.py", folder], **run)
    return Task(size, shape, folder, steps, pairs)
