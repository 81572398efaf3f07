#!/usr/bin/env python3
"""Writes goldens/models: logits, log-probs and the gradient of every parameter of tiny models, from transformers.

Reads the config of each NAME.json there, which is all that a new one needs. Per architecture and option, NAME.json holds
config.json, the tokens of a prompt with two answers,
the weight of each log-prob in the objective, and how far torch's own bf16 (autocast) is from float64; NAME.safetensors holds what transformers makes of them in float64
(stored as f32). Weights come from formula.py.

Made with torch 2.15.0 and transformers 5.23.0:  OMP_NUM_THREADS=1 python goldens/model_golden.py [NAME…]
"""

import copy
import json
import os
import sys
from pathlib import Path

import torch
from safetensors.torch import save
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from formula import fnv1a32, weight

FOLDER = Path(__file__).parent / "models"
VOCAB, PROMPT, CHOSEN, REJECTED = 64, 9, 7, 5

# A new golden begins as NAME.json with a config alone: {"config": {…}}.
CONFIGS = {path.stem: json.loads(path.read_text())["config"] for path in sorted(FOLDER.glob("*.json"))}


def tokens(name: str, count: int) -> list[int]:
    return [fnv1a32(f"{name}{i}") % VOCAB for i in range(count)]


# How names begin in memory, and in folders, where transformers 5 renames: by model_type.
IN_FOLDERS = {
    "gpt_neox": {"lm_head": "embed_out"},
    "gemma3": {"model.language_model": "language_model.model", "lm_head": "language_model.lm_head"},
    "mistral3": {"model.language_model": "language_model.model", "lm_head": "language_model.lm_head"},
    "qwen2_5_vl": {"model.language_model": "model"},
}


def stored_parameters(model):
    """Parameters by the names they have in a folder; of a vision-language model, those of the text model."""
    for name, parameter in model.named_parameters():
        if any(word in name for word in ("vision_tower", "multi_modal_projector", "visual")):
            continue
        for memory, folder in IN_FOLDERS.get(model.config.model_type, {}).items():
            if name.startswith(f"{memory}."):
                name = folder + name.removeprefix(memory)
                break
        yield name, parameter


def model_class(config: dict):
    """Auto class of a config."""
    sees = config["architectures"][0].endswith("ForConditionalGeneration")
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def set_weights(model):
    """Sets every parameter to the formula's values, and returns the model."""
    with torch.no_grad():
        for key, parameter in stored_parameters(model):
            parameter.copy_(torch.from_numpy(weight(key, tuple(parameter.shape))))
    return model


def attention(config: dict) -> str:
    """Implementation of attention: sdpa leaves out the soft cap of scores."""
    return "eager" if config["model_type"] in ("gemma2", "gemma3_text", "gemma3") else "sdpa"


def padding(model, lengths: list[int]) -> int:
    """Tokens that both sequences of a pair have in a batch, where the rotation depends on the longest of them."""
    parameters = getattr(model.config, "rope_parameters", None) or {}
    kinds = [table.get("rope_type") for table in (parameters, *parameters.values()) if isinstance(table, dict)]
    return max(lengths) if {"dynamic", "longrope"} & {*kinds} else 0


def scores_and_gradients(model, prompt, answers, weights) -> dict:
    """Logits and log-probs of the answers, and the gradients of the weighted sum of log-probs."""
    model.zero_grad()
    log_probs, out = [], {}
    length = padding(model, [len(prompt + answer) for answer in answers])
    for side, answer in zip(("chosen", "rejected"), answers):
        ids = torch.tensor([prompt + answer])
        # No token sees those after it.
        padded = torch.nn.functional.pad(ids, (0, max(length - ids.shape[1], 0)))
        logits = model(padded).logits[0, : ids.shape[1]]
        out[f"logits/{side}"] = logits.detach().double()
        table = logits.double().log_softmax(-1)
        log_probs += [table[t - 1, ids[0, t]] for t in range(len(prompt), len(prompt + answer))]
    log_probs = torch.stack(log_probs)
    (log_probs * torch.tensor(weights, dtype=torch.float64)).sum().backward()
    out["log_prob"] = log_probs.detach()
    return out | {f"gradient/{key}": value.grad.double() for key, value in stored_parameters(model)}


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    prompt, chosen, rejected = tokens("prompt", PROMPT), tokens("chosen", CHOSEN), tokens("rejected", REJECTED)
    # Multiples of a quarter, some of them zero: exact in every type.
    weights = [(i * 5 % 9 - 4) / 4 for i in range(CHOSEN + REJECTED)]
    for name in sys.argv[1:] or CONFIGS:
        config = CONFIGS[name]
        parsed = AutoConfig.for_model(**copy.deepcopy(config))
        model = model_class(config).from_config(parsed, attn_implementation=attention(config)).eval()
        model = set_weights(model).double()
        out = scores_and_gradients(model, prompt, [chosen, rejected], weights)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            half = scores_and_gradients(model.float(), prompt, [chosen, rejected], weights)
        errors = {key: float((half[key] - out[key]).abs().max() / out[key].abs().max()) for key in out}
        autocast = {
            "log_prob": errors["log_prob"],
            "gradient": max(error for key, error in errors.items() if key.startswith("gradient/")),
        }
        (FOLDER / f"{name}.safetensors").write_bytes(save({k: v.float().contiguous() for k, v in out.items()}))
        golden = {"config": config, "prompt": prompt, "chosen": chosen, "rejected": rejected, "weights": weights}
        golden["autocast"] = {key: float(f"{error:.2g}") for key, error in autocast.items()}
        (FOLDER / f"{name}.json").write_text(json.dumps(golden) + "\n")
        print(name, round(out["log_prob"].sum().item(), 4), golden["autocast"])
        if name == "llama-tied":
            write_policies(model.float())


class Hostile:
    """Pickle that runs code when Python loads it."""

    def __reduce__(self):
        return os.system, ("echo this would have run",)


def write_policies(model) -> None:
    """policy.pt as the original DPO code saves it, and one that asks for more than tensors."""
    torch.save({"step_idx": 20000, "state": model.state_dict(), "metrics": {"loss": 0.5}}, FOLDER / "policy.pt")
    torch.save({"state": {"x": torch.zeros(1)}, "metrics": Hostile()}, FOLDER / "hostile.pt")


if __name__ == "__main__":
    main()
