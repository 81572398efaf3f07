#!/usr/bin/env python3
"""Makes goldens/quantised: tiny models quantised and saved by transformers with bitsandbytes, and what they answer.

Each folder is as `save_pretrained` leaves it, with `expected.safetensors` beside: tokens, the logits after each of them of
a plain model in f64 with the dequantised weights, and for nf4 those of the quantised model itself in f32. (bitsandbytes'
int8 rounds activations too, which is another computation.) Deterministic, no download.

torch 2.15, transformers 5.23, bitsandbytes 0.50.2, on the CPU. Every length is a multiple of 64: that version reads rows of
odd multiples of 32 wrongly. nf4 is made of f32 weights, else bitsandbytes rounds what it dequantises to bf16.
"""

import copy
import tempfile
from pathlib import Path

import torch
from bitsandbytes import functional, nn
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, LlamaConfig
from transformers.pytorch_utils import Conv1D

FOLDER = Path(__file__).parent / "quantised"
NF4 = dict(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True)
TOKENS = [1, 17, 42, 5, 63, 9, 30, 11, 2, 58, 23, 8]


def llama(width):
    return LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=width, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=32, tie_word_embeddings=False, initializer_range=0.15, eos_token_id=2)


def gpt2():
    return GPT2Config(
        vocab_size=64, n_embd=64, n_layer=1, n_head=4, n_inner=128, n_positions=32, initializer_range=0.15,
        bos_token_id=1, eos_token_id=2)


def dequantised(module):
    """The weight of a quantised module, f32 [out, in]."""
    if isinstance(module, nn.Linear4bit):
        return functional.dequantize_4bit(module.weight.data, module.weight.quant_state).float()
    codes, scale = module.weight.data, module.weight.SCB if module.weight.SCB is not None else module.state.SCB
    return codes.float() * scale.float().view(-1, 1) * (1.0 / 127.0)


def plain(model, config):
    """The same model in f64, of ordinary modules with the dequantised weights."""
    config = copy.deepcopy(config)
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    state = {}
    for name, module in model.named_modules():
        own = twin.get_submodule(name) if name else twin
        for key, value in module.named_parameters(recurse=False):
            if key == "weight" and isinstance(module, (nn.Linear4bit, nn.Linear8bitLt)):
                value = dequantised(module)
                if isinstance(own, Conv1D):
                    value = value.T
            state[f"{name}.{key}"] = value.detach().double()
    missing, left = twin.load_state_dict(state, strict=False)
    assert not left and all(k == "lm_head.weight" for k in missing), (missing, left)
    twin.tie_weights()
    return twin.eval()


def make(name, config, dtype, **quantisation):
    torch.manual_seed(3)
    with tempfile.TemporaryDirectory() as full:
        model = AutoModelForCausalLM.from_config(config)
        for key, value in model.named_parameters():
            if value.dim() == 1:
                value.data += 0.1 * torch.randn_like(value)
        model.to(dtype).save_pretrained(full)
        quantised = BitsAndBytesConfig(**quantisation, bnb_4bit_compute_dtype=torch.float32)
        model = AutoModelForCausalLM.from_pretrained(
            full, quantization_config=quantised, dtype=dtype, device_map="cpu").eval()
    folder = FOLDER / name
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    ids = torch.tensor([TOKENS])
    expected = {"tokens": ids[0], "dequantised": plain(model, config)(ids).logits[0].float()}
    if quantised.load_in_4bit:
        expected["quantised"] = model(ids).logits[0].float()
        gap = (expected["quantised"] - expected["dequantised"]).abs().max() / expected["dequantised"].abs().max()
        print(f"{name}: bitsandbytes in f32 is within {gap:.1e} of f64")
    save_file({k: v.detach().contiguous() for k, v in expected.items()}, folder / "expected.safetensors")
    print(name, sum(file.stat().st_size for file in folder.iterdir()), "bytes")


make("llama-nf4", llama(320), torch.float32, **NF4)
make("llama-int8", llama(64), torch.bfloat16, load_in_8bit=True)
make("gpt2-nf4", gpt2(), torch.float32, **NF4)
