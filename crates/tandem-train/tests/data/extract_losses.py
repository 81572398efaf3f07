"""Cuts tests/data/losses.json out of a folder of goldens (TRL 1.16.0 and the original DPO code, f32 on CPU).

    python extract_losses.py GOLDENS > losses.json

Per model: log-probabilities of eight pairs under policy and reference, token counts, and for every configuration whose loss
is one here, TRL's loss and reward metrics on those pairs.
"""
import json
import sys
from pathlib import Path

LOSSES = ["sigmoid", "sigmoid_norm", "robust", "hinge", "ipo", "exo_pair", "nca_pair", "bco_pair", "sppo_hard",
          "apo_zero", "apo_down", "discopop", "sft"]
OPTIONS = {"loss_type", "loss_weights", "beta", "label_smoothing", "discopop_tau"}
METRICS = ["rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen", "logps/rejected"]


def sides(scores):
    chosen, rejected = scores["sum_logps_chosen"], scores["sum_logps_rejected"]
    return [x for pair in zip(chosen, rejected) for x in pair]


def main(folder):
    forward = json.loads((folder / "forward.json").read_text())
    losses = json.loads((folder / "losses.json").read_text())["losses"]
    mitchell = json.loads((folder / "mitchell.json").read_text())
    out = {"trl": {}, "mitchell": {}}
    for model, data in [("llama-small", "plain"), ("phi2-tiny", "conv")]:
        scores = forward[model][data]
        counts = [scores["policy"][f"n_completion_tokens_{side}"] for side in ("chosen", "rejected")]
        cases = []
        for name, case in losses[model][data].items():
            config = case["config"]
            types = config.get("loss_type", ["sigmoid"])
            if "IGNORED" in name or case["loss"] is None or not set(config) <= OPTIONS or not set(types) <= set(LOSSES):
                continue
            cases.append({
                "name": name,
                "terms": dict(zip(types, config.get("loss_weights", [1.0] * len(types)), strict=True)),
                "beta": config.get("beta", 0.1),
                "label_smoothing": config.get("label_smoothing", 0.0),
                "discopop_tau": config.get("discopop_tau", 0.05),
                "loss": case["loss"],
                "metrics": {key: case["metrics"][key] for key in METRICS},
            })
        out["trl"][f"{model}/{data}"] = {
            "policy": sides(scores["policy"]),
            "reference": sides(scores["ref"]),
            "tokens": [n for pair in zip(*counts) for n in pair],
            "cases": cases,
        }
    pairs = mitchell["logps"]
    out["mitchell"] = {
        "policy": [x for pair in zip(pairs["policy_chosen"], pairs["policy_rejected"]) for x in pair],
        "reference": [x for pair in zip(pairs["ref_chosen"], pairs["ref_rejected"]) for x in pair],
        "cases": [
            {"name": name, "beta": beta, "label_smoothing": smoothing, "reference_free": name == "reference_free",
             "loss": mitchell[name]["loss"], "per_pair": mitchell[name]["per_pair"]}
            for name, beta, smoothing in [("dpo_beta0.1", 0.1, 0.0), ("dpo_beta0.5", 0.5, 0.0), ("cdpo_ls0.1", 0.1, 0.1),
                                          ("cdpo_ls0.3", 0.1, 0.3), ("reference_free", 0.1, 0.0)]
        ],
    }
    json.dump(out, sys.stdout, indent=1)
    print()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
