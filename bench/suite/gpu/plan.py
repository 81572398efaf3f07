"""Plans of set-ups by `tandem plan`, for a GPU that need not be present."""

import json
import subprocess
from dataclasses import dataclass

from ..check import beside_plan
from ..task import Task
from . import timing
from .setups import GpuSetup, of_tandem

# More tokens than any step has: the whole step in one micro-batch.
WHOLE = 1 << 20


@dataclass(frozen=True)
class Planned:
    """Plan of a set-up that fits."""

    setup: GpuSetup
    seconds: float
    bytes: int


def of(setup: GpuSetup, task: Task, args) -> Planned | None:
    """Plan of a set-up; `None` if it does not fit."""
    command = [args.tandem, "plan", *timing.config(setup, task, args.work / "plan", args), "--json", "--devices", args.plan_for]
    plan = json.loads(subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout)
    return Planned(setup, plan["estimate"]["step_seconds"], plan["needed_bytes"]) if plan["fits"] else None


def promising(recipe: str, task: Task, args) -> list:
    """Set-ups that fit, and that no other set-up beats in both planned time and memory; the fastest first."""
    plans = [plan for setup in of_tandem(recipe) if (plan := of(setup, task, args))]
    kept = []
    for plan in sorted(plans, key=lambda plan: (plan.seconds, plan.bytes)):
        if not kept or plan.bytes < kept[-1].bytes:
            kept.append(plan)
    return [plan.setup for plan in kept]


def check(task: Task, recipes: list, args) -> list:
    """The count of useful operations beside that of the plan, of one pair a step: of more the head computes logits twice."""
    one, lines = Task(task.size, task.shape, task.folder, 1, 1), []
    for recipe in recipes:
        setup = GpuSetup("Tandem", recipe, "bf16", batch=WHOLE)
        words = timing.config(setup, one, args.work / "plan", args)
        lines.append(beside_plan(one, setup, [*words, "--devices", args.plan_for], args))
    return lines
