"""Makes packing.safetensors: weights, and what bitsandbytes makes of them on the CPU.

    pip install torch packing.safetensors
    python crates/tandem-kernels/tests/data/packing.py

The file that is committed is from bitsandbytes 0.50.2 and torch 2.15.0. Of each case:
  weight                                       what is quantised (f32; bf16 where that is enough)
  codes, absmax, nested_absmax, nested_offset  quantize_4bit(quant_type="nf4", compress_statistics=True)
  out, out_bf16                                the last weights after dequantize_4bit to f32 and to bf16
  int8, scb, int8_out                          int8_vectorwise_quant, and the last weights after int8_vectorwise_dequant
"""

import pathlib

import torch
from bitsandbytes import functional as bnb
from safetensors.torch import save_file

# The mean of many scales depends on the number of threads.
torch.set_num_threads(1)
torch.manual_seed(20)

# Dequantised weights that are kept of each case.
LAST = 1024


def with_zeros(weight):
    """Blocks of zeros at the start, inside and at the end; a row of zeros."""
    flat = weight.view(-1)
    for block in (0, 7, 8, 40, flat.numel() // 64 - 1):
        flat[64 * block : 64 * block + 64] = 0
    weight[11] = 0
    return weight


CASES = {
    "tiny": torch.randn(64, 64),
    # Neither a whole block nor a whole byte.
    "odd": torch.randn(5, 77) * 0.02,
    "zero_blocks": with_zeros(torch.randn(40, 96)),
    "zeros": torch.zeros(4, 64),
    # A unit and two blocks.
    "wide": (torch.randn(96, 172) * 0.02).bfloat16(),
    # Two units, and a part of a third that ends inside a block; rows of very different sizes.
    "units": (torch.randn(33, 1000) * torch.logspace(-3, 1, 33)[:, None]).bfloat16(),
}

tensors = {}
for name, weight in CASES.items():
    w = weight.float()
    codes, state = bnb.quantize_4bit(w, quant_type="nf4", compress_statistics=True)
    # As one row: of rows that are an odd multiple of 32 long, bitsandbytes 0.50.2 reads the wrong scales on CPUs with AVX-512 (the weights
    # that come out are off by as much as they are large). Its other CPU code, and this, read the right ones.
    state.shape = torch.Size((1, w.numel()))
    case = {
        "weight": weight,
        "codes": codes.view(-1),
        "absmax": state.absmax,
        "nested_absmax": state.state2.absmax,
        "nested_offset": state.offset.view(1),
        "out": bnb.dequantize_4bit(codes, state).view(-1)[-LAST:],
    }
    state.dtype = torch.bfloat16
    case["out_bf16"] = bnb.dequantize_4bit(codes, state).view(-1)[-LAST:]
    int8, scb, _ = bnb.int8_vectorwise_quant(w)
    case |= {"int8": int8, "scb": scb, "int8_out": bnb.int8_vectorwise_dequant(int8, scb).view(-1)[-LAST:]}
    tensors |= {f"{name}.{key}": value.contiguous().clone() for key, value in case.items()}
tensors["quant_map"] = state.code.clone()
tensors["nested_quant_map"] = state.state2.code.clone()

path = pathlib.Path(__file__).with_suffix(".safetensors")
save_file(tensors, path)
print(path, path.stat().st_size, "bytes")
