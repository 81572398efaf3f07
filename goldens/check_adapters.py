#!/usr/bin/env python3
"""Checks that peft loads what Tandem writes. Each golden adapter, and one on all linear layers
of each golden model, is saved by peft, read and written again by Tandem, loaded by
peft and compared: every tensor, and the log-probs, bit for bit. Merged by Tandem and loaded by transformers, it must have the
log-probs of base and adapter, and, where the head is a matrix of its own, the tensors of peft's merge_and_unload.

    cargo build --release -p tandem-model --example adapter
    python goldens/check_adapters.py target/release/examples/adapter
"""

import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from adapter_golden import ADAPTERS, base_model, log_probs, with_adapter
from model_golden import CONFIGS, attention, model_class

# Every adapter golden, and LoRA on all linear layers of each model golden.
# peft's "all-linear" of a vision-language model means the vision tower too.
LINEAR = r".*language_model\.layers\.\d+\.(self_attn|mlp)\..*_proj"


def targets(config: dict) -> str:
    return "all-linear" if model_class(config) is AutoModelForCausalLM else LINEAR


CHECKED = ADAPTERS | {name: (name, {"target_modules": targets(config)}) for name, config in CONFIGS.items()}


def tensors(model) -> dict[str, torch.Tensor]:
    """Parameters, and those that share memory with another by every name."""
    return dict(model.named_parameters(remove_duplicate=False))


def check(name: str, binary: str, folder: str) -> str:
    model_name, options = CHECKED[name]
    auto_class = model_class(CONFIGS[model_name])
    base, theirs, ours, merged = (f"{folder}/{part}" for part in ("base", "theirs", "ours", "merged"))
    base_model(model_name).save_pretrained(base)

    def fresh():
        return auto_class.from_pretrained(base, attn_implementation=attention(CONFIGS[model_name])).eval()

    # peft saves an adapter that it has trained; its tables go along where they are targets.
    model, _, _ = with_adapter(fresh(), model_name, options, theirs)
    model.save_pretrained(theirs)
    expected, expected_tensors = log_probs(model), tensors(model)
    for what, destination in (("rewrite", ours), ("merge", merged)):
        subprocess.run([binary, what, base, theirs, destination], check=True)

    # As older versions saved them.
    old = Path(folder, "old")
    old.mkdir()
    shutil.copy(f"{theirs}/adapter_config.json", old)
    torch.save(load_file(f"{theirs}/adapter_model.safetensors"), old / "adapter_model.bin")
    subprocess.run([binary, "rewrite", base, old, f"{folder}/again"], check=True)
    weights = [Path(folder, part, "adapter_model.safetensors").read_bytes() for part in ("ours", "again")]
    assert weights[0] == weights[1], "adapter_model.bin"

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        loaded = PeftModel.from_pretrained(fresh(), ours).eval()
    wrong = [str(warning.message) for warning in said if "adapter keys" in str(warning.message)]
    assert not wrong, wrong
    found = tensors(loaded)
    assert found.keys() == expected_tensors.keys(), found.keys() ^ expected_tensors.keys()
    for key, tensor in expected_tensors.items():
        assert torch.equal(found[key], tensor), key
    assert torch.equal(log_probs(loaded), expected), (log_probs(loaded) - expected).abs().max()

    ordinary, report = auto_class.from_pretrained(merged, output_loading_info=True, attn_implementation=attention(CONFIGS[model_name]))
    assert not any(report.values()), report
    off = ((log_probs(ordinary.eval()) - expected).abs().max() / expected.abs().max()).item()
    assert off < 1e-5, off
    if base_model(model_name).config.tie_word_embeddings:
        return f"merged {off:.1e}"
    own = tensors(model.merge_and_unload())
    assert own.keys() == tensors(ordinary).keys(), own.keys() ^ tensors(ordinary).keys()
    apart = max((tensor - own[key]).abs().max().item() for key, tensor in tensors(ordinary).items())
    assert apart < 1e-6, apart
    return f"merged {off:.1e}, tensors of merge_and_unload {apart:.1e}"


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable_progress_bar()
    for name in CHECKED:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name}: equal; {check(name, sys.argv[1], folder)}", flush=True)


if __name__ == "__main__":
    main()
