"""Losses, gradients and metrics of TRL's GRPOTrainer, from given log-probabilities.

    python goldens/grpo_losses_golden.py goldens/grpo/losses.json

TRL's own `_compute_loss` runs on numbers in place of a model's: log-probabilities under the policy, the sampling
weights and the reference, entropies, advantages and masks. Tested with trl 1.16.0 and torch 2.13.
"""

import json
import sys
from collections import defaultdict
from types import SimpleNamespace

import torch
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.utils import nanstd

GROUP = 3
LENGTHS = [4, 2, 5, 1, 3, 5]
REWARDS = [1.0, 0.25, -0.5, 2.0, None, 2.5]
MAX_NEW_TOKENS = 5

DEFAULTS = {
    "loss": "dapo",
    "importance_sampling": "token",
    "epsilon": 0.2,
    "epsilon_high": 0.2,
    "delta": None,
    "sapo_temperatures": [1.0, 1.05],
    "vespo": [[2.0, 3.0], [3.0, 2.0]],
    "corrects_kl": True,
    "off_policy_mask_threshold": None,
    "beta": 0.0,
    "on_policy": False,
    "mask_truncated": False,
}

CASES = [
    *({"loss": loss} for loss in ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "vespo", "luspo"]),
    *({"loss": loss, "importance_sampling": "sequence", "beta": 0.1} for loss in ["grpo", "dapo", "luspo", "sapo"]),
    *({"loss": loss, "beta": 0.04} for loss in ["grpo", "dapo", "cispo", "vespo"]),
    {"beta": 0.3, "corrects_kl": False},
    {"beta": 0.3, "corrects_kl": False, "importance_sampling": "sequence"},
    {"on_policy": True, "beta": 0.1},
    {"on_policy": True, "loss": "vespo"},
    {"epsilon": 0.1, "epsilon_high": 0.4, "delta": 1.3},
    {"loss": "cispo", "epsilon_high": 1.1},
    {"off_policy_mask_threshold": 0.05, "beta": 0.05},
    {"mask_truncated": True, "loss": "grpo", "beta": 0.1},
    {"mask_truncated": True, "loss": "dapo"},
    {"mask_truncated": True, "loss": "dr_grpo", "importance_sampling": "sequence"},
]

SCALES = ["group", "batch", "none"]


class OneProcess:
    """Accelerate's gathering over a single process."""

    num_processes = 1
    sync_gradients = True

    def gather(self, tensor):
        return tensor

    def reduce(self, tensor, reduction):
        return tensor


def rewards():
    return torch.tensor([float("nan") if reward is None else reward for reward in REWARDS], dtype=torch.float64)


def advantages(scale):
    """As in TRL's `_generate_and_score_completions`."""
    values = rewards()
    groups = values.view(-1, GROUP)
    mean = torch.nanmean(groups, dim=1).repeat_interleave(GROUP)
    of_groups = nanstd(groups, dim=1).repeat_interleave(GROUP)
    std = nanstd(values).expand_as(values) if scale == "batch" else of_groups
    compared = values - mean
    if scale != "none":
        compared = compared / (std + 1e-4)
    return torch.nan_to_num(compared, nan=0.0)


def padded(values, fill=0.0):
    rows = torch.full((len(LENGTHS), max(LENGTHS)), fill, dtype=torch.float64)
    for row, length in enumerate(LENGTHS):
        rows[row, :length] = values[row, :length]
    return rows


def case(options, numbers):
    options = {**DEFAULTS, **options}
    policy = padded(numbers["policy"]).requires_grad_()
    mask = padded(torch.ones_like(numbers["policy"]))
    ended = [length < MAX_NEW_TOKENS for length in LENGTHS]
    if options["mask_truncated"]:
        mask = mask * torch.tensor(ended, dtype=torch.float64).unsqueeze(1)
    trainer = SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        importance_sampling_level=options["importance_sampling"],
        beta=options["beta"],
        loss_type=options["loss"],
        epsilon_low=options["epsilon"],
        epsilon_high=options["epsilon_high"],
        off_policy_mask_threshold=options["off_policy_mask_threshold"],
        max_completion_length=MAX_NEW_TOKENS,
        current_gradient_accumulation_steps=1,
        use_vllm=False,
        vllm_importance_sampling_correction=False,
        _entropy_bonus_enabled=False,
        accelerator=OneProcess(),
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(
            use_bias_correction_kl=options["corrects_kl"],
            delta=options["delta"],
            sapo_temperature_pos=options["sapo_temperatures"][0],
            sapo_temperature_neg=options["sapo_temperatures"][1],
            vespo_k_pos=options["vespo"][0][0],
            vespo_lambda_pos=options["vespo"][0][1],
            vespo_k_neg=options["vespo"][1][0],
            vespo_lambda_neg=options["vespo"][1][1],
            steps_per_generation=1,
        ),
        _metrics={"train": defaultdict(list)},
        _get_per_token_logps_and_entropies=lambda *_, **__: (policy, padded(numbers["entropy"]), None),
        get_off_policy_mask=GRPOTrainer.get_off_policy_mask,
        get_gamma_weights=GRPOTrainer.get_gamma_weights,
    )
    inputs = {
        "prompt_ids": torch.zeros(len(LENGTHS), 1, dtype=torch.long),
        "prompt_mask": torch.ones(len(LENGTHS), 1, dtype=torch.long),
        "completion_ids": torch.zeros(len(LENGTHS), max(LENGTHS), dtype=torch.long),
        "completion_mask": mask,
        "advantages": advantages("group"),
        "num_items_in_batch": mask.sum(),
        "ref_per_token_logps": padded(numbers["reference"]),
    }
    if not options["on_policy"]:
        inputs["old_per_token_logps"] = padded(numbers["sampled"])
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    gradient = [row[:length] for row, length in zip(policy.grad.tolist(), LENGTHS)]
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    return {"options": options, "loss": loss.item(), "gradient": gradient, "metrics": metrics}


def main():
    torch.manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))
    # Numbers of f32, as a head gives them.
    policy = -torch.rand(shape) * 3 - 0.05
    numbers = {
        "policy": policy,
        "sampled": policy + 0.25 * torch.randn(shape),
        "reference": policy + 0.3 * torch.randn(shape),
        "entropy": torch.rand(shape) * 2,
    }
    cut = {name: [row[:length].tolist() for row, length in zip(values, LENGTHS)] for name, values in numbers.items()}
    result = {
        "group": GROUP,
        "rewards": REWARDS,
        "max_new_tokens": MAX_NEW_TOKENS,
        "numbers": cut,
        "advantages": {scale: advantages(scale).tolist() for scale in SCALES},
        "cases": [case(options, {name: values.double() for name, values in numbers.items()}) for options in CASES],
    }
    with open(sys.argv[1], "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
