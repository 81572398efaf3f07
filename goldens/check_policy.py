#!/usr/bin/env python3
"""Checks that torch and transformers load the policy.pt that Tandem writes. In each model folder named, policy.pt must load
with weights_only, mapped and not, fill a model of the folder's config strictly, and give the logits of the folder's own
weights, bit for bit.

    python goldens/check_policy.py FOLDER...
"""

import sys
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging


def check(folder: str) -> str:
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    file = str(Path(folder, "policy.pt"))
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    assert list(loaded) == ["step_idx", "state", "metrics"] and loaded["step_idx"] == 0 and loaded["metrics"] == {}
    mapped = torch.load(file, map_location="cpu", weights_only=True, mmap=True)["state"]
    state = loaded["state"]
    assert all(torch.equal(state[name], mapped[name]) for name in state)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float32).eval()
    # transformers 5 names GPT-NeoX's head in memory as every family's; 4 has the name of the files.
    if "embed_out.weight" in state and "embed_out.weight" not in model.state_dict():
        state["lm_head.weight"] = state.pop("embed_out.weight")
    model.load_state_dict(state)
    tokens = torch.arange(3, 19)[None] % model.config.vocab_size
    with torch.no_grad():
        assert torch.equal(model(tokens).logits, expected(tokens).logits), f"{folder}: other logits"
    return f"{model.config.model_type}: {len(state)} tensors"


if __name__ == "__main__":
    logging.set_verbosity_error()
    for folder in sys.argv[1:]:
        print(check(folder))
