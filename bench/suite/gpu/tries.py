"""Finds each program's best settings for a task: a few steps of each, and the fastest is measured. Both programs get this."""

import dataclasses
import statistics
from dataclasses import dataclass, field

from ..task import HERE, Task
from ..timing import run_python
from . import plan, timing
from .setups import GpuSetup, of_tandem, of_trl

STEPS = 3
# Of settings that are as fast as the fastest but for so much, the one that takes least memory is taken.
AS_FAST = 0.02


@dataclass
class Tries(timing.GpuTiming):
    """Results of a process of `trl_try.py`, by setting."""

    found: dict = field(default_factory=dict)

    def noted(self, note: dict) -> None:
        if "try" in note:
            self.found[note.pop("try")] = note


def ready(known, task: Task, recipe: str, args) -> bool:
    """Tries what was not tried yet; false where time was out before all was."""
    tried = known.tried(task.name, family(recipe, args))
    short = Task(task.size, task.shape, task.folder, STEPS, task.pairs)
    for program, look in (("TRL", try_trl), ("Tandem", try_tandem)):
        is_wanted = args.only in program and args.given[program] is None
        if is_wanted and program not in tried:
            if not look(tried, short, family(recipe, args), args):
                return False
            tried[program] = "done"
    return True


def family(recipe: str, args) -> str:
    """The recipe whose tries count: a precomputed reference changes little of a step."""
    whole = recipe.removesuffix("-precompute")
    return whole if whole in args.recipes_of_all else recipe


def try_trl(tried: dict, task: Task, recipe: str, args) -> bool:
    """In one process, which spares most of its time: that of starting."""
    wanted = {setup.tried: setup for setup in of_trl(recipe, task.facts["pairs_per_step"], args.has_liger)}
    left = [setting for setting, setup in wanted.items() if setup.name not in tried]
    found = Tries(task.name, 0, wanted[left[0]] if left else None)
    command = [HERE / "trl_try.py", *timing.words(recipe, task, args)]
    command += [word for setting in left for word in ("--try", setting)]
    if left:
        with (args.work / "tries.log").open("w") as log:
            run_python(found, command, timing.environment(args), log, args)
    tried |= {wanted[setting].name: result for setting, result in found.found.items()}
    if found.error and not found.is_late:
        tried["TRL's tries"] = {"error": found.error}
    return not found.is_late


def try_tandem(tried: dict, task: Task, recipe: str, args) -> bool:
    """Set-ups that the plan ranks highest."""
    for setup in plan.promising(recipe, task, args)[:args.tries]:
        if setup.name in tried:
            continue
        found = timing.run(setup, task, 0, args)
        if found.is_late:
            return False
        took = {"error": found.error} if found.error else {"seconds": statistics.mean(found.seconds[1:])}
        tried[setup.name] = took | {"bytes": found.gpu_peak_bytes or found.peak_bytes}
    return True


def best(known, task: Task, recipe: str, args) -> list:
    """The set-ups to measure: of each program the best of each type of weights."""
    shared = family(recipe, args)
    tried = known.tried(task.name, shared)
    all_of = {"TRL": of_trl(shared, task.facts["pairs_per_step"], True), "Tandem": of_tandem(shared)}
    chosen = []
    for program in ("TRL", "Tandem"):
        if args.given[program] is not None:
            chosen += [GpuSetup.of_text(program, recipe, text) for text in args.given[program]]
            continue
        by_dtype = {}
        for setup in all_of[program]:
            if "seconds" in tried.get(setup.name, {}):
                by_dtype.setdefault(setup.dtype, []).append(setup)
        for setups in by_dtype.values():
            fastest = min(tried[setup.name]["seconds"] for setup in setups)
            near = [setup for setup in setups if tried[setup.name]["seconds"] <= (1 + AS_FAST) * fastest]
            chosen.append(min(near, key=lambda setup: tried[setup.name]["bytes"]))
    return [dataclasses.replace(setup, recipe=recipe) for setup in chosen if args.only in setup.program]
