"""Finds each program's best settings for a task: a few steps of each, and the fastest is measured. Both programs get this."""

import json
import statistics
import time
from argparse import Namespace
from dataclasses import dataclass, field

from ..task import HERE, Task
from ..timing import run_python
from . import plan, timing
from .setups import TORCHTUNE, GpuSetup

STEPS = 3
# Of settings that are as fast as the fastest but for so much, the one that takes least memory is taken.
AS_FAST = 0.02


@dataclass
class Tries(timing.GpuTiming):
    """Results of a process of `trl_try.py`, by setting."""

    found: dict = field(default_factory=dict)

    def noted(self, note: dict) -> None:
        if "try" in note:
            self.found[note["try"]] = note


def ready(known, task: Task, recipe: str, args) -> bool:
    """Tries what was not tried yet; false where time was out before all was."""
    shared = family(known, task, recipe, args)
    tried = known.tried(task.name, shared)
    short = Task(task.size, task.shape, task.folder, STEPS, task.pairs)
    for program, look in (("TRL", try_trl), ("Tandem", try_tandem), ("torchtune", try_torchtune)):
        is_wanted = args.only in program and args.given.get(program) is None
        if is_wanted and program not in tried:
            if not look(tried, short, shared, args):
                return False
            tried.setdefault(program, "done")
    return True


def family(known, task: Task, recipe: str, args) -> str:
    """The recipe whose tries count: a precomputed reference changes little of a step."""
    whole = recipe.removesuffix("-precompute")
    return whole if whole in args.recipes_of_all or known.has_tried(task.name, whole) else recipe


def try_trl(tried: dict, task: Task, recipe: str, args) -> bool:
    """Searches in one process, which spares most of its time: that of starting. A search that takes longer than `args.search` ends with
    the best so far."""
    found = Tries(task.name, 0, None)
    of_before = {result["try"]: result for result in tried.values() if "try" in result}
    file = args.work / "known.json"
    file.write_text(json.dumps(of_before))
    command = [HERE / "trl_try.py", *timing.words(recipe, task, args), "--known", file, "--attentions", *args.attentions,
               *(["--has-liger"] if args.has_liger else [])]
    left = args.search - tried.get("TRL's search", {}).get("spent", 0.0)
    limited, start = args_with(args, patience=min(args.time_left, left)), time.monotonic()
    with (args.work / "tries.log").open("w") as log:
        run_python(found, command, timing.environment(args), log, limited)
    spent = args.search - left + time.monotonic() - start
    tried |= {GpuSetup.of_text("TRL", recipe, text).name: result | {"try": text} for text, result in found.found.items()}
    tried["TRL's search"] = {"spent": spent}
    if found.is_late and args.time_left < left:
        return False
    if found.error:
        tried["TRL's search"] |= {"error": f"ended after {spent:.0f} s" if found.is_late else found.error}
    return True


def args_with(args, **changes) -> Namespace:
    return Namespace(**vars(args) | changes)


def try_one(tried: dict, setup: GpuSetup, task: Task, args) -> bool:
    """Adds how one set-up ended; false if the time was up before."""
    found = timing.run(setup, task, 0, args)
    if found.is_late:
        return False
    took = {"error": found.error} if found.error else {"seconds": statistics.mean(found.seconds[1:])}
    tried[setup.name] = took | {"bytes": found.gpu_peak_bytes or found.peak_bytes, "try": setup.text}
    return True


def try_tandem(tried: dict, task: Task, recipe: str, args) -> bool:
    """Set-ups that the plan ranks highest."""
    for setup in plan.promising(recipe, task, args)[:args.tries]:
        if setup.name in tried:
            continue
        if not try_one(tried, setup, task, args):
            return False
    return True


def try_torchtune(tried: dict, task: Task, recipe: str, args) -> bool:
    """As many pairs at a time as run: rows are padded and logits whole, so that more are never slower but where they do not fit."""
    if recipe != "lora":
        return True
    if not args.torchtune:
        tried["torchtune lora"] = {"error": "no --torchtune"}
        return True
    pairs = task.facts["pairs_per_step"]
    for setup in [GpuSetup("torchtune", recipe, "bf16", "sdpa", batch=batch) for batch in TORCHTUNE if pairs % batch == 0]:
        if setup.name in tried:
            continue
        if not try_one(tried, setup, task, args):
            return False
        if "error" not in tried[setup.name]:
            break
    return True


def best(known, task: Task, recipe: str, args) -> list:
    """The set-ups to measure: of each program the best of each type of weights, and TRL's best without any of its options. TRL's fastest
    comes first, then Tandem's."""
    tried = known.tried(task.name, family(known, task, recipe, args))
    chosen = {}
    for program in ("TRL", "Tandem", "torchtune"):
        if args.given.get(program) is not None:
            chosen[program] = [GpuSetup.of_text(program, recipe, text) for text in args.given[program]]
            continue
        seconds = {GpuSetup.of_text(program, recipe, result["try"]): result for name, result in tried.items()
                   if name.startswith(program) and "seconds" in result}
        kinds = [[setup for setup in seconds if setup.dtype == dtype] for dtype in {setup.dtype for setup in seconds}]
        found = sorted(filter(None, (thriftiest(kind, seconds) for kind in kinds)), key=lambda setup: seconds[setup]["seconds"])
        plain = [setup for setup in seconds if setup.is_plain and found and setup.dtype == found[0].dtype]
        chosen[program] = list(dict.fromkeys([*found, *filter(None, [thriftiest(plain, seconds) if program == "TRL" else None])]))
    ordered = chosen["TRL"][:1] + chosen["Tandem"] + chosen["torchtune"] + chosen["TRL"][1:]
    return [setup for setup in ordered if args.only in setup.program]


def thriftiest(setups: list, tried: dict) -> GpuSetup | None:
    """Of those as fast as the fastest, the one that takes least memory."""
    fastest = min((tried[setup]["seconds"] for setup in setups), default=None)
    near = [setup for setup in setups if tried[setup]["seconds"] <= (1 + AS_FAST) * fastest]
    return min(near, key=lambda setup: tried[setup]["bytes"], default=None)
