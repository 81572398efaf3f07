#!/usr/bin/env python3
"""Writes learning rates of transformers' schedules to goldens/optimizers/schedules.json, weights that optimisers have
moved over 50 steps to goldens/optimizers/updates.json, and moving averages of weights to
goldens/optimizers/averages.json. Matrices that Muon has moved, in bf16 as PyTorch has it and in f32, go to
goldens/optimizers/muon.json, those of transformers' Adafactor, with the constants of optim="adafactor", to
goldens/optimizers/adafactor.json.

Versions used: torch 2.15.0, transformers 5.24.0, lion-pytorch 0.2.5, schedulefree
1.4.1; CPU, f32. Gradients and weights are a formula of
step and element, which the test has too. Optimisers take one tensor at a time (foreach=False): their order of
operations is that of their documentation.
"""

import json
import math
from pathlib import Path

import torch
import torch.optim._muon as torch_muon
import transformers
from lion_pytorch import Lion
from schedulefree import AdamWScheduleFree
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import Adafactor, get_scheduler

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


ELEMENTS = 37
STEPS = 50
KEPT = (1, 2, 10, 50)
RATE = 0.01
# (name, class, options)
OPTIMIZERS = [
    ("adamw", torch.optim.AdamW, {"weight_decay": 0.1, "foreach": False}),
    ("adamw", torch.optim.AdamW, {"betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.0, "foreach": False}),
    ("rmsprop", torch.optim.RMSprop, {"alpha": 0.99, "weight_decay": 0.1, "foreach": False}),
    ("lion", Lion, {"betas": [0.9, 0.99], "weight_decay": 0.1}),
    ("lion", Lion, {"betas": [0.95, 0.98], "weight_decay": 0.0}),
    ("sgd", torch.optim.SGD, {"weight_decay": 0.1, "foreach": False}),
    ("sgd", torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1, "foreach": False}),
    ("sgd", torch.optim.SGD, {"momentum": 0.9, "dampening": 0.2, "weight_decay": 0.0, "foreach": False}),
    ("sgd", torch.optim.SGD, {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "foreach": False}),
    ("schedule_free_adamw", AdamWScheduleFree, {"weight_decay": 0.1, "warmup_steps": 7, "foreach": False}),
    ("schedule_free_adamw", AdamWScheduleFree,
     {"betas": [0.6, 0.95], "eps": 1e-6, "weight_decay": 0.0, "foreach": False}),
]


def numbers(step: int, scale: float, count: int = ELEMENTS) -> torch.Tensor:
    """Multiples of 2**-15 in [-1, 1), exact in f32, times a power of two."""
    bits = [(step * 7919 + i * 104729 + 12345) * 2654435761 % 2**32 >> 16 for i in range(count)]
    return torch.tensor([(b - 32768) / 32768 * scale for b in bits], dtype=torch.float32)


def updates() -> list:
    runs = []
    for name, kind, options in OPTIMIZERS:
        weights = torch.nn.Parameter(numbers(0, 2.0))
        optimizer = kind([weights], lr=RATE, **options)
        kept, averages = {}, {}
        is_free = name == "schedule_free_adamw"
        if is_free:
            optimizer.train()
        for step in range(1, STEPS + 1):
            # The rate moves, as under a schedule; without one it has a warm-up of its own.
            for group in optimizer.param_groups:
                group["lr"] = RATE if is_free else RATE * (1 - step / 100)
            weights.grad = numbers(step, 0.5)
            optimizer.step()
            if step in KEPT:
                trained = weights.detach().clone()
                kept[step] = trained.view(torch.int32).tolist()
                if is_free:
                    optimizer.eval()
                    averages[step] = weights.detach().view(torch.int32).tolist()
                    # Not by train(), which rounds once more.
                    optimizer.param_groups[0]["train_mode"] = True
                    weights.data.copy_(trained)
        options = {key: value for key, value in options.items() if key != "foreach"}
        runs.append({"name": name, "options": options, "weights": kept, **({"averages": averages} if is_free else {})})
    return runs


MATRICES = [
    ((6, 10), {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "adjust_lr_fn": "original"}),
    ((10, 6), {"momentum": 0.95, "nesterov": True, "weight_decay": 0.1, "adjust_lr_fn": "original"}),
    ((8, 8), {"momentum": 0.9, "nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}),
    ((3, 17), {"momentum": 0.4, "nesterov": True, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw"}),
]


def orthogonalized(direction, coefficients, steps, eps):
    """The iteration of torch.optim.Muon without its rounding to bf16."""
    a, b, c = coefficients
    x = direction / direction.norm().clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def muon() -> list:
    runs = []
    torchs_own = torch_muon._zeropower_via_newtonschulz
    for (rows, cols), options in MATRICES:
        run = {"shape": [rows, cols], "options": options}
        for kind, orthogonalize in [("bf16", torchs_own), ("f32", orthogonalized)]:
            torch_muon._zeropower_via_newtonschulz = orthogonalize
            weights = torch.nn.Parameter(numbers(0, 0.5, rows * cols).view(rows, cols))
            optimizer = torch.optim.Muon([weights], lr=RATE, **options)
            run[kind] = {}
            for step in range(1, STEPS + 1):
                optimizer.param_groups[0]["lr"] = RATE * (1 - step / 100)
                weights.grad = numbers(step, 0.5, rows * cols).view(rows, cols)
                optimizer.step()
                if step in KEPT:
                    run[kind][step] = weights.detach().reshape(-1).view(torch.int32).tolist()
        runs.append(run)
    torch_muon._zeropower_via_newtonschulz = torchs_own
    return runs


def adafactor() -> list:
    runs = []
    for shape, weight_decay in [((6, 10), 0.1), ((10, 6), 0.0), ((1, 9), 0.0), ((23,), 0.1)]:
        count = math.prod(shape)
        weights = torch.nn.Parameter(numbers(0, 2.0, count).view(shape))
        optimizer = Adafactor([weights], lr=RATE, scale_parameter=False, relative_step=False,
                              weight_decay=weight_decay)
        kept = {}
        for step in range(1, STEPS + 1):
            optimizer.param_groups[0]["lr"] = RATE * (1 - step / 100)
            weights.grad = numbers(step, 0.5, count).view(shape)
            optimizer.step()
            if step in KEPT:
                kept[step] = weights.detach().reshape(-1).view(torch.int32).tolist()
        runs.append({"shape": list(shape), "weight_decay": weight_decay, "weights": kept})
    return runs


def averages() -> list:
    """Averages of weights that are new at every step."""
    runs = []
    for decay in [0.0, 0.6, 0.9, 0.999]:
        model = torch.nn.Linear(ELEMENTS, 1, bias=False)
        model.weight.data = numbers(0, 2.0).view(1, -1)
        averaged = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(decay))
        kept = {}
        for step in range(1, STEPS + 1):
            model.weight.data = numbers(step, 2.0).view(1, -1)
            averaged.update_parameters(model)
            if step in KEPT:
                kept[step] = averaged.module.weight.detach().view(-1).view(torch.int32).tolist()
        runs.append({"decay": decay, "weights": kept})
    return runs


def write(name: str, runs: list) -> None:
    FOLDER.mkdir(exist_ok=True)
    about = {"torch": torch.__version__, "transformers": transformers.__version__}
    lines = ",\n".join(json.dumps(run) for run in runs)
    (FOLDER / name).write_text(f'{{"about": {json.dumps(about)}, "runs": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    write("schedules.json", schedules())
    write("updates.json", updates())
    write("averages.json", averages())
    write("muon.json", muon())
    write("adafactor.json", adafactor())
