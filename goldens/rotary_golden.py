#!/usr/bin/env python3
"""Writes goldens/rotary: pairs of several lengths, of models whose rotary embedding depends on the length of the batch.

Each pair is a batch of its own for a model that has seen nothing else, for transformers keeps the frequencies of earlier
batches. NAME.json holds config.json, the pairs, and the weight of each log-prob in the objective; NAME.safetensors
the log-probs of all pairs and the gradient of their weighted sum, in float64 (stored as f32).

Made with torch 2.15.0 and transformers 5.23.0:  OMP_NUM_THREADS=1 python goldens/rotary_golden.py [NAME…]
"""

import copy
import json
import sys
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import AutoConfig

from model_golden import attention, model_class, scores_and_gradients, set_weights, tokens

FOLDER = Path(__file__).parent / "rotary"

# A new golden begins as NAME.json with a config and lengths of prompt, chosen and rejected: {"config": {…}, "lengths": [[…]]}.
GOLDENS = {path.stem: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def unpadded(name: str, count: int) -> list[int]:
    """Tokens without padding, of whose row torch has no gradient."""
    return [token or 1 for token in tokens(name, count)]


def main() -> None:
    for name in sys.argv[1:] or GOLDENS:
        config, lengths = GOLDENS[name]["config"], GOLDENS[name]["lengths"]
        pairs, weights, sums = [], [], {}
        for index, counts in enumerate(lengths):
            pair = [unpadded(f"{side}{index}-", count) for side, count in zip(("prompt", "chosen", "rejected"), counts)]
            # Multiples of a quarter: exact in every type.
            own = [((i + index) * 5 % 9 - 4) / 4 for i in range(sum(counts[1:]))]
            parsed = AutoConfig.for_model(**copy.deepcopy(config))
            model = model_class(config).from_config(parsed, attn_implementation=attention(config)).eval()
            out = scores_and_gradients(set_weights(model).double(), pair[0], pair[1:], own)
            for key, value in out.items():
                if key == "log_prob":
                    sums[key] = torch.cat([sums[key], value]) if key in sums else value
                elif key.startswith("gradient/"):
                    sums[key] = sums.get(key, 0) + value
            pairs.append(pair)
            weights += own
        (FOLDER / f"{name}.safetensors").write_bytes(save({k: v.float().contiguous() for k, v in sums.items()}))
        golden = {"config": config, "lengths": lengths, "pairs": pairs, "weights": weights}
        (FOLDER / f"{name}.json").write_text(json.dumps(golden) + "\n")
        print(name, round(sums["log_prob"].sum().item(), 4))


if __name__ == "__main__":
    main()
