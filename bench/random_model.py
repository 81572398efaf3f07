"""Models of random weights, drawn where they are used: a model of eight billion parameters takes a second on a GPU, and no disk.

The distribution is that of `from_config`: matrices and tables normal with the config's deviation, norms 1.
"""

import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM


def random_model(folder, dtype: torch.dtype, attention: str, device: str, is_nf4: bool = False, seed: int = 0) -> nn.Module:
    """Model with random weights, from the config.json in `folder`. With `is_nf4` every linear layer but the head is made in NF4 with
    double quantisation, one after another."""
    torch.manual_seed(seed)
    config = AutoConfig.from_pretrained(folder)
    if not is_nf4:
        with torch.device(device):
            return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attention)
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and module is not model.get_output_embeddings():
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, in_nf4(module, dtype, config.initializer_range, device))
    for module in list(model.modules()):
        materialise(module, config, device)
    model.tie_weights()
    # What peft and the trainers look at.
    model.is_loaded_in_4bit = True
    return model


def in_nf4(linear: nn.Linear, dtype: torch.dtype, deviation: float, device: str) -> nn.Module:
    """A layer of that shape."""
    import bitsandbytes as bnb

    layer = bnb.nn.Linear4bit(linear.in_features, linear.out_features, bias=False, compute_dtype=dtype,
                              compress_statistics=True, quant_type="nf4", device="meta")
    weight = torch.empty(linear.out_features, linear.in_features, dtype=dtype, device=device).normal_(0.0, deviation)
    layer.weight = bnb.nn.Params4bit(weight, requires_grad=False, compress_statistics=True, quant_type="nf4",
                                     module=layer).to(device)
    return layer


def materialise(module: nn.Module, config, device: str) -> None:
    """Gives a module's own parameters and buffers memory and numbers, if they have none yet."""
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter.is_meta:
            values = torch.empty_like(parameter, device=device)
            is_matrix = values.dim() > 1
            values = values.normal_(0.0, config.initializer_range) if is_matrix else values.fill_(1.0)
            setattr(module, name, nn.Parameter(values))
    if any(buffer.is_meta for buffer in module.buffers(recurse=False)):
        # The tables of RoPE follow from the config alone.
        with torch.device(device):
            fresh = type(module)(config)
        for name, buffer in fresh.named_buffers(recurse=False):
            module.register_buffer(name, buffer, persistent=False)
