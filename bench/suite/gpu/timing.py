"""Runs one process of one program on the GPU, times its steps and takes its peak of the GPU's memory."""

import json
import os
from dataclasses import dataclass, field
from typing import ClassVar

from .. import timing
from ..task import HERE, Task
from .nvml import NoPeak, Peak
from .setups import GpuSetup


@dataclass
class GpuTiming(timing.Timing):
    """`peak_bytes` are of host memory; the rest is of the GPU's."""

    gpu_peak_bytes: int = 0
    peak_source: str = ""
    reserved_bytes: int = 0  # of PyTorch's allocator
    allocated_bytes: int = 0
    planned_bytes: int = 0  # Tandem's arena, as planned
    arena_bytes: int = 0  # as its steps report it
    real_tokens: list = field(default_factory=list)  # of TRL's steps

    SETUP: ClassVar = GpuSetup

    def noted(self, note: dict) -> None:
        self.reserved_bytes = note.get("reserved_bytes", self.reserved_bytes)
        self.allocated_bytes = note.get("allocated_bytes", self.allocated_bytes)
        self.arena_bytes = max(self.arena_bytes, note.get("arena", 0))
        if "real_tokens" in note:
            self.real_tokens.append(note["real_tokens"])


def environment(args, is_torchtune: bool = False) -> dict:
    """The suite's, and an allocator that lets segments grow, which is PyTorch's best where lengths differ."""
    paths = [*([str(args.torchtune)] if is_torchtune else []), *filter(None, [os.environ.get("PYTHONPATH")])]
    return timing.environment(args) | {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True", "PYTHONPATH": os.pathsep.join(paths)}


def run(setup: GpuSetup, task: Task, repeat: int, args) -> GpuTiming:
    """A failure is a timing that says so."""
    found = GpuTiming(task.name, repeat, setup, load_average=os.getloadavg()[0])
    peak = Peak(args.gpu) if args.gpu else NoPeak()
    with timing.logged(found, task, args) as log:
        if setup.program == "Tandem":
            output = timing.run_folder(setup, task, args)
            watch = Plan(output, peak)
            timing.run_tandem(found, config(setup, task, output, args), output, log, args, watch)
            found.planned_bytes = watch.arena_bytes
        else:
            is_torchtune = setup.program == "torchtune"
            script = "torchtune_step.py" if is_torchtune else "trl_step.py"
            timing.run_python(found, command(script, setup, task, args), environment(args, is_torchtune), log, args, peak)
    found.gpu_peak_bytes, found.peak_source = peak.bytes, peak.source
    if setup.batching == "packing":
        # Steps of other rows: seconds a token, times the tokens of the task's step.
        found.seconds = [seconds * task.real_tokens(setup.method, step) / tokens
                         for step, (seconds, tokens) in enumerate(zip(found.seconds, found.real_tokens))]
    return found


class Plan:
    """Looks at memory, and keeps what the run's plan.json says as soon as it is there."""

    def __init__(self, output, peak) -> None:
        self.file, self.peak, self.arena_bytes = output / "plan.json", peak, 0

    def __call__(self, pid: int) -> None:
        self.peak(pid)
        if not self.arena_bytes and self.file.exists():
            try:
                self.arena_bytes = json.loads(self.file.read_text())["arena_bytes"]
            except ValueError:
                pass  # half written; the next look finds it whole


def config(setup: GpuSetup, task: Task, output, args) -> list:
    """Tandem's run.toml, and what is changed of it."""
    compute = [f'devices = "{args.device}"', 'dtype = "bf16"', f'checkpointing = "{setup.recompute}"']
    compute += [f"threads = {args.threads}"] if args.device == "cpu" else []
    return [timing.write_config(setup, task, output, args, "\n".join(compute), setup.batch), *args.sets]


def command(script: str, setup: GpuSetup, task: Task, args) -> list:
    """TRL's or torchtune's."""
    return [HERE / script, *words(setup.recipe, task, args), "--dtype", setup.dtype, "--attention", setup.attention,
            "--recompute", setup.recompute, "--batch", str(setup.batch), "--batching", setup.batching,
            *(["--liger"] if setup.is_liger else [])]


def words(recipe: str, task: Task, args) -> list:
    """Arguments of all of TRL's processes of a task."""
    return [str(task.folder), "--shape", task.shape, "--recipe", recipe, "--steps", str(task.steps), "--threads", str(args.threads),
            "--pairs", str(task.facts["pairs_per_step"]), "--max-length", str(task.facts["max_length"]), "--device", args.device]
