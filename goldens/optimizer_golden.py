#!/usr/bin/env python3
"""Writes learning rates of transformers' schedules to goldens/optimizers/schedules.json.

Versions used: torch 2.15.0, transformers 5.24.0; CPU.
"""

import json
from pathlib import Path

import torch
import transformers
from transformers import get_scheduler

FOLDER = Path(__file__).parent / "optimizers"

# (name, options, warm-up steps, steps); each is followed a little beyond its end.
SCHEDULES = [
    ("linear", {}, 4, 20),
    ("linear", {}, 0, 5),
    ("linear", {}, 7, 5),
    ("cosine", {}, 4, 20),
    ("cosine_with_min_lr", {"min_lr_rate": 0.1}, 3, 20),
    ("cosine_with_min_lr", {"min_lr_rate": 0.0}, 0, 7),
    ("cosine_with_restarts", {"num_cycles": 1}, 2, 20),
    ("cosine_with_restarts", {"num_cycles": 3}, 3, 23),
    ("polynomial", {"lr_end": 1e-7, "power": 1.0}, 4, 20),
    ("polynomial", {"lr_end": 2e-5, "power": 2.5}, 0, 20),
    ("inverse_sqrt", {}, 4, 20),
    ("inverse_sqrt", {}, 0, 20),
    ("inverse_sqrt", {"timescale": 9}, 2, 20),
    ("warmup_stable_decay", {"num_decay_steps": 6, "decay_type": "cosine", "min_lr_ratio": 0.0}, 4, 20),
    ("warmup_stable_decay", {"num_decay_steps": 6, "decay_type": "linear", "min_lr_ratio": 0.1}, 4, 20),
    ("warmup_stable_decay", {"num_decay_steps": 20, "decay_type": "1-sqrt", "min_lr_ratio": 0.05}, 0, 20),
    # The fall begins within the warm-up, and is seen from its end on.
    ("warmup_stable_decay", {"num_decay_steps": 9, "decay_type": "linear", "min_lr_ratio": 0.0}, 5, 10),
    ("constant_with_warmup", {}, 4, 9),
]


def schedules() -> list:
    runs = []
    for name, options, warmup, steps in SCHEDULES:
        rate = 1e-4
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
        scheduler = get_scheduler(name, optimizer, warmup, steps, scheduler_specific_kwargs=options)
        rates = []
        for _ in range(steps + 3):
            rates.append(scheduler.get_last_lr()[0])
            optimizer.step()
            scheduler.step()
        runs.append({"name": name, "options": options, "learning_rate": rate, "warmup_steps": warmup,
                     "steps": steps, "rates": rates})
    return runs


def write(name: str, runs: list) -> None:
    FOLDER.mkdir(exist_ok=True)
    about = {"torch": torch.__version__, "transformers": transformers.__version__}
    lines = ",\n".join(json.dumps(run) for run in runs)
    (FOLDER / name).write_text(f'{{"about": {json.dumps(about)}, "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    write("schedules.json", schedules())
