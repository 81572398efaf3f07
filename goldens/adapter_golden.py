#!/usr/bin/env python3
"""Writes goldens/adapters: log-probs of tiny models with adapters, from transformers and peft.

NAME.json holds the model (of models/), adapter_config.json as peft wrote it, its tensors as peft wrote them (name, shape, and
the name that formula.py makes the values from: a copy of another tensor has that one's), and the log-probs of both answers
in float64.

Made with torch 2.15.0, transformers 5.23.0 and peft 0.21.2:  OMP_NUM_THREADS=1 python goldens/adapter_golden.py
"""

import copy
import json
import tempfile
import warnings
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from transformers import AutoConfig

from formula import weight
from model_golden import CHOSEN, CONFIGS, PROMPT, REJECTED, attention, model_class, set_weights, tokens

FOLDER = Path(__file__).parent / "adapters"
PREFIX = "base_model.model."

ADAPTERS = {
    "llama-lora": ("llama", {"target_modules": ["q_proj", "v_proj", "up_proj", "down_proj"]}),
    "llama-dora": ("llama", {"target_modules": "all-linear", "use_dora": True}),
    "llama-tables": ("llama", {"target_modules": ["o_proj", "embed_tokens", "lm_head"], "use_rslora": True}),
    "llama-pattern": ("llama", {"target_modules": r".*\.(k_proj|gate_proj)", "modules_to_save": ["embed_tokens", "model.norm"]}),
    "qwen2-rslora": ("qwen2-window", {"target_modules": "all-linear", "use_rslora": True}),
    "gpt2-lora": ("gpt2", {"target_modules": ["c_attn", "c_proj", "c_fc"], "modules_to_save": ["ln_f"]}),
    "gpt2-dora": ("gpt2", {"target_modules": ["c_attn", "mlp.c_proj"], "use_dora": True}),
    "gpt2-table": ("gpt2", {"target_modules": ["c_attn", "wte"]}),
    "gpt2-whole": ("gpt2", {"target_modules": ["c_attn"], "modules_to_save": ["mlp.c_fc", "wpe"]}),
    "neox-lora": ("gpt-neox", {"target_modules": "all-linear"}),
    "neox-dora": ("gpt-neox", {"target_modules": ["query_key_value", "dense"], "use_dora": True}),
    "neox-head": ("gpt-neox", {"target_modules": ["query_key_value", "lm_head"], "modules_to_save": ["dense_h_to_4h"]}),
    "phi-lora": ("phi", {"target_modules": "all-linear", "modules_to_save": ["lm_head", "input_layernorm"]}),
    "tied-table": ("llama-tied", {"target_modules": ["q_proj", "embed_tokens"]}),
    "tied-head": ("llama-tied", {"target_modules": ["q_proj", "lm_head"]}),
    "tied-whole": ("llama-tied", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"],
                                  "ensure_weight_tying": True}),
    "gemma-table": ("gemma", {"target_modules": ["k_proj", "embed_tokens"]}),
    "qwen3-dora": ("qwen3", {"target_modules": ["k_proj", "v_proj"], "use_dora": True}),
}


def base_model(name: str):
    """A golden model with the weights of the formula."""
    config = AutoConfig.for_model(**copy.deepcopy(CONFIGS[name]))
    auto_class = model_class(CONFIGS[name])
    return set_weights(auto_class.from_config(config, attn_implementation=attention(CONFIGS[name])).eval())


def source(name: str, names, model: str) -> str:
    """The tensor whose values an adapter's tensor has: its own, unless it is a copy."""
    if ".base_layer." in name:
        own = name.removeprefix(PREFIX).replace(".base_layer", "")
        tied = CONFIGS[model].get("tie_word_embeddings")
        own = own.replace("lm_head", "model.embed_tokens") if tied else own
        return own.replace("lm_head", "embed_out") if model == "gpt-neox" else own
    table = f"{PREFIX}model.embed_tokens.weight"
    return table if name == f"{PREFIX}lm_head.weight" and "tied" in model and table in names else name


def with_adapter(model, model_name: str, options: dict, folder: str):
    """The model with an adapter of the formula's weights, what they are made from, and its config as peft writes it."""
    model = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=40, **options))
    model.save_pretrained(folder)
    stored = load_file(f"{folder}/adapter_model.safetensors")
    sources = {name: source(name, stored, model_name) for name in sorted(stored)}
    values = {name: torch.from_numpy(weight(sources[name], tuple(stored[name].shape))) for name in sources}
    set_peft_model_state_dict(model, values)
    config = json.loads(Path(folder, "adapter_config.json").read_text())
    config["base_model_name_or_path"] = "../base"
    if isinstance(config["target_modules"], list):
        config["target_modules"].sort()
    return model.eval(), {name: [sources[name], list(stored[name].shape)] for name in sources}, config


def log_probs(model) -> torch.Tensor:
    prompt, answers = tokens("prompt", PROMPT), (tokens("chosen", CHOSEN), tokens("rejected", REJECTED))
    found = []
    for answer in answers:
        ids = torch.tensor([prompt + answer])
        with torch.no_grad():
            table = model(input_ids=ids).logits[0].double().log_softmax(-1)
        found += [table[t - 1, ids[0, t]] for t in range(PROMPT, len(prompt + answer))]
    return torch.stack(found)


def main() -> None:
    warnings.simplefilter("ignore")
    FOLDER.mkdir(exist_ok=True)
    for name, (model_name, options) in ADAPTERS.items():
        plain = log_probs(base_model(model_name).double())
        with tempfile.TemporaryDirectory() as folder:
            model, tensors, config = with_adapter(base_model(model_name), model_name, options, folder)
        found = log_probs(model.double())
        merged = log_probs(model.merge_and_unload())
        golden = {"model": model_name, "adapter_config": config, "tensors": tensors, "log_prob": found.tolist()}
        (FOLDER / f"{name}.json").write_text(json.dumps(golden) + "\n")
        print(f"{name}: {found.sum():.4f}, base {plain.sum():.4f}, peft's merge is off by {(merged - found).abs().max():.1e}")


if __name__ == "__main__":
    main()
