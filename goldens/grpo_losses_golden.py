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
    "top_entropy": None,
    "correction": None,
}


def correction(mode, least=None, most=3.0):
    return {"mode": mode, "min": least, "max": most}


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
    *({"top_entropy": top, "beta": 0.1} for top in [0.0, 0.2, 0.5]),
    {"top_entropy": 0.4, "loss": "grpo", "importance_sampling": "sequence"},
    {"top_entropy": 0.3, "mask_truncated": True, "loss": "cispo"},
    *({"correction": correction(mode, 0.9, 1.1), "beta": 0.1}
      for mode in ["token_truncate", "token_mask", "sequence_truncate", "sequence_mask"]),
    {"correction": correction("sequence_mask"), "on_policy": True, "loss": "grpo"},
    {"correction": correction("sequence_truncate", 0.95, None), "importance_sampling": "sequence", "loss": "luspo"},
    {"correction": correction("token_mask", None, 1.05), "loss": "vespo"},
    {"correction": correction("token_truncate", 0.5, 2.0), "loss": "vespo", "on_policy": True},
    {"correction": correction("sequence_mask", 0.5, 2.0), "mask_truncated": True, "off_policy_mask_threshold": 0.05},
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

    def pad_across_processes(self, tensor, dim, pad_index):
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


def normalized_advantages(scores, weights):
    """As in TRL's `_generate_and_score_completions` with "normalize_then_sum"; `scores` by answer and judge."""
    scores = torch.tensor(
        [[float("nan") if score is None else score for score in answer] for answer in scores], dtype=torch.float64)
    grouped = scores.view(-1, GROUP, len(weights))
    compared = (grouped - torch.nanmean(grouped, dim=1, keepdim=True)) / (nanstd(grouped, dim=1, keepdim=True) + 1e-4)
    sums = (compared.view(-1, len(weights)) * torch.tensor(weights, dtype=torch.float64)).nansum(dim=1)
    sums[torch.isnan(scores).all(dim=1)] = float("nan")
    return torch.nan_to_num((sums - torch.nanmean(sums)) / (nanstd(sums) + 1e-4), nan=0.0)


def weights_of_server(correction, old, served, mask):
    """As in TRL's `_generate_and_score_completions`."""
    gap = torch.nan_to_num((old - served) * mask, nan=0.0)
    if correction["mode"].startswith("sequence"):
        gap = gap.sum(dim=-1, keepdim=True)
    ratio = gap.exp()
    least, most = correction["min"], correction["max"]
    if correction["mode"].endswith("truncate"):
        return ratio.clamp(min=least, max=most)
    outside = (ratio < (least or 0.0)) | (ratio > (most or float("inf")))
    return ratio.masked_fill(outside, 0.0)


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
        top_entropy_quantile=1.0 if options["top_entropy"] is None else options["top_entropy"],
        importance_sampling_level=options["importance_sampling"],
        beta=options["beta"],
        loss_type=options["loss"],
        epsilon_low=options["epsilon"],
        epsilon_high=options["epsilon_high"],
        off_policy_mask_threshold=options["off_policy_mask_threshold"],
        max_completion_length=MAX_NEW_TOKENS,
        current_gradient_accumulation_steps=1,
        use_vllm=options["correction"] is not None,
        vllm_importance_sampling_correction=options["correction"] is not None,
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
    trainer.get_high_entropy_mask = lambda *arguments: GRPOTrainer.get_high_entropy_mask(trainer, *arguments)
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
    if options["correction"] is not None:
        old = inputs.get("old_per_token_logps", policy.detach())
        served = padded(numbers["served"])
        ratio = weights_of_server(options["correction"], old, served, mask)
        inputs |= {"importance_sampling_ratio": ratio, "sampling_per_token_logps": served}
    loss = GRPOTrainer._compute_loss(trainer, None, inputs)
    loss.backward()
    gradient = [row[:length] for row, length in zip(policy.grad.tolist(), LENGTHS)]
    metrics = {name: values[0] for name, values in trainer._metrics["train"].items()}
    if options["correction"] is not None:
        flat = ratio.flatten() if ratio.shape[1] == 1 else ratio[mask.bool()]
        kinds = {"min": flat.min(), "mean": flat.mean(), "max": flat.max()}
        metrics |= {f"sampling/importance_sampling_ratio/{kind}": value.item() for kind, value in kinds.items()}
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
    numbers["served"] = numbers["sampled"] + 0.1 * torch.randn(shape)
    # A server that gave no log-probability.
    numbers["served"][2, 1] = float("nan")
    scores = [[1.0, 0.5], [0.25, 0.5], [-0.5, -1.0], [2.0, None], [None, None], [2.5, 3.0]]
    cut = {name: [[None if number != number else number for number in row[:length].tolist()] for row, length in zip(values, LENGTHS)] for name, values in numbers.items()}
    result = {
        "group": GROUP,
        "rewards": REWARDS,
        "max_new_tokens": MAX_NEW_TOKENS,
        "numbers": cut,
        "advantages": {scale: advantages(scale).tolist() for scale in SCALES},
        "judges": {"scores": scores, "weights": [1.0, 0.5], "advantages": normalized_advantages(scores, [1.0, 0.5]).tolist()},
        "cases": [case(options, {name: values.double() for name, values in numbers.items()}) for options in CASES],
    }
    with open(sys.argv[1], "w") as file:
        json.dump(result, file, indent=1)
        file.write("\n")


if __name__ == "__main__":
    main()
