#!/usr/bin/env python3
"""Runs TRL's trainers of preferences beside plain DPO on the small model: writes goldens/small/offline.json.

CPO, SimPO and ORPO (trl.experimental), DPOTrainer's losses over the whole batch, LD-DPO and WPO, and KTO. Each run stores
the log of every step, the norms of the final weights, and `overrides`: what a configuration of Tandem says instead.
`dpop` has values and derivatives of DPO-positive, which TRL lacks: the paper's equation 3 in float64 with autograd.

Made with torch 2.15.0, transformers 5.24.0 and trl 1.16.0:  OMP_NUM_THREADS=1 python goldens/offline_golden.py
"""

import json
import os
import tempfile

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import transformers
import trl
from train_golden import DPO, FOLDER, QUIET, finish, model, rows
from transformers import AutoTokenizer
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

STEPS = {"max_steps": 4}


def of(loss: str, *more: str) -> list:
    return [f"objective.loss={loss}", *(f"objective.{line}" for line in more)]


# (name, changes, overrides). Rows are of plain text: these trainers take no reference.
CPO_RUNS = [
    ("cpo", {}, of("{ cpo = 1, sft = 1 }")),
    ("cpo_smoothed", {"label_smoothing": 0.1, "cpo_alpha": 0.5}, of("{ cpo = 1, sft = 0.5 }", "label_smoothing=0.1")),
    ("cpo_hinge", {"loss_type": "hinge"}, of("{ hinge = 1, sft = 1 }", "reference_free=true")),
    ("simpo", {"loss_type": "simpo", "cpo_alpha": 0.0, "beta": 2.0, "simpo_gamma": 1.0},
     of("simpo", "simpo_gamma=1.0", "beta=2.0")),
    ("simpo_sft", {"loss_type": "simpo"}, of("{ simpo = 1, sft = 1 }")),
]
ORPO_RUNS = [("orpo", {}, of("{ orpo = 1, sft = 1 }") + ["data.loss_on=all"])]
# The reference has perturbed weights.
DPO_RUNS = [
    ("aot", {"loss_type": ["aot"]}, of("aot")),
    ("aot_smoothed", {"loss_type": ["aot"], "label_smoothing": 0.1}, of("aot", "label_smoothing=0.1")),
    ("aot_unpaired", {"loss_type": ["aot_unpaired"]}, of("aot_unpaired")),
    ("aot_mix", {"loss_type": ["aot_unpaired", "sigmoid", "sft"], "loss_weights": [1.0, 0.5, 0.25]},
     of("{ aot_unpaired = 1, sigmoid = 0.5, sft = 0.25 }")),
    ("ld", {"ld_alpha": 0.5}, of("sigmoid", "ld_alpha=0.5")),
    ("ld_mix", {"ld_alpha": 0.0, "loss_type": ["ipo", "sft"], "loss_weights": [1.0, 0.5]},
     of("{ ipo = 1, sft = 0.5 }", "ld_alpha=0.0")),
    ("wpo", {"use_weighting": True}, of("sigmoid", "use_weighting=true")),
    ("wpo_mix", {"use_weighting": True, "loss_type": ["ipo", "apo_zero"], "loss_weights": [0.01, 1.0]},
     of("{ ipo = 0.01, apo_zero = 1 }", "use_weighting=true")),
]
KTO_RUNS = [
    ("kto", {}, of("kto")),
    ("kto_weighted", {"desirable_weight": 1.5, "undesirable_weight": 0.5},
     of("kto", "desirable_weight=1.5", "undesirable_weight=0.5")),
    ("apo_zero_unpaired", {"loss_type": "apo_zero_unpaired"}, of("apo_zero_unpaired")),
]


def tokenizer(bos: bool = True):
    made = AutoTokenizer.from_pretrained(FOLDER / "model")
    if not bos:
        # CPO's and ORPO's trainers put it before every prompt, though the tokenizer does not.
        made.bos_token = None
    return made


def train(trainer_class, config_class, changes: dict, overrides: list, **more) -> dict:
    changes = STEPS | changes
    with tempfile.TemporaryDirectory() as output:
        policy = model()
        trainer = trainer_class(
            model=policy, args=config_class(output_dir=output, gradient_checkpointing=False, **(QUIET | DPO | changes)),
            **more["trainer"])
        return finish(trainer, policy, changes, overrides=overrides, **more["facts"])


def without_reference(trainer_class, config_class, changes: dict, overrides: list) -> dict:
    return train(trainer_class, config_class, changes, overrides,
                 trainer={"train_dataset": rows("pref_plain"), "processing_class": tokenizer(bos=False)},
                 facts={"method": "dpo", "data": "pref_plain", "reference": "none"})


def with_reference(trainer_class, config_class, method: str, data: str, changes: dict, overrides: list) -> dict:
    return train(trainer_class, config_class, changes, overrides,
                 trainer={"train_dataset": rows(data), "ref_model": model(reference=True), "processing_class": tokenizer()},
                 facts={"method": method, "data": data, "reference": "other"})


def dpop() -> dict:
    policy = torch.tensor([-40.0, -31.0, -52.0, -50.0, -12.5, -90.0, -33.0, -33.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-42.0, -30.0, -49.5, -52.0, -12.5, -91.0, -33.5, -30.0], dtype=torch.float64)
    ratio = (policy - reference).reshape(-1, 2)
    out = {"policy": policy.tolist(), "reference": reference.tolist(), "cases": []}
    for beta, weight in [(0.3, 50.0), (0.1, 5.0)]:
        x = beta * (ratio[:, 0] - ratio[:, 1] - weight * torch.clamp(-ratio[:, 0], min=0))
        loss = -torch.nn.functional.logsigmoid(x).mean()
        (gradient,) = torch.autograd.grad(loss, policy, retain_graph=True)
        out["cases"].append({"beta": beta, "lambda": weight, "loss": loss.item(), "gradient": gradient.tolist()})
    return out


def write_unpaired() -> None:
    """Writes labelled completions: two thirds are desirable."""
    lines = [json.loads(line) for line in (FOLDER / "pref_plain.jsonl").read_text().splitlines()[:40]]
    picked = [(row, i % 3 != 1) for i, row in enumerate(lines)]
    out = [json.dumps({"prompt": row["prompt"], "completion": row["chosen" if label else "rejected"], "label": label},
                      ensure_ascii=False) for row, label in picked]
    (FOLDER / "unpaired.jsonl").write_text("\n".join(out) + "\n")


def main() -> None:
    torch.set_num_threads(1)
    write_unpaired()
    runs = {name: without_reference(CPOTrainer, CPOConfig, *rest) for name, *rest in CPO_RUNS}
    runs |= {name: without_reference(ORPOTrainer, ORPOConfig, *rest) for name, *rest in ORPO_RUNS}
    runs |= {name: with_reference(DPOTrainer, DPOConfig, "dpo", "pref_conv", *rest) for name, *rest in DPO_RUNS}
    runs |= {name: with_reference(KTOTrainer, KTOConfig, "kto", "unpaired", *rest) for name, *rest in KTO_RUNS}
    result = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
        "defaults": DPO, "dpop": dpop(),
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in runs.items())
    (FOLDER / "offline.json").write_text(json.dumps(result)[:-1] + ', "runs": {\n' + lines + "\n}}\n")


if __name__ == "__main__":
    main()
