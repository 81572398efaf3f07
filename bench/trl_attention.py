"""Attention of TRL's models by name: transformers' own, and two that torch brings along.

| name | transformers' word | needs |
|---|---|---|
| `sdpa`, `eager` | the same | |
| `cudnn` | `sdpa` | cuDNN takes the shape and the mask: torch is allowed no other kernel |
| `varlen` | `tandem_varlen` | torch 2.10: FlashAttention-2's kernel, which torch is built with, over rows without their padding |
| `fa2`, `fa3`, `fa4` | `flash_attention_2`, … | the package flash-attn, flash-attn-3 or flash-attn-4, or the Hub's kernels and a network |
| `flex` | `flex_attention` | a C compiler |
"""

from contextlib import nullcontext

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import flash_attention_mask

VARLEN = "tandem_varlen"
WORDS = {"sdpa": "sdpa", "eager": "eager", "cudnn": "sdpa", "varlen": VARLEN, "fa2": "flash_attention_2", "fa3": "flash_attention_3",
         "fa4": "flash_attention_4", "flex": "flex_attention"}


def allowed_kernels(name: str):
    """Context in which models compute."""
    return sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if name == "cudnn" else nullcontext()


class Rows:
    """Where the rows of a batch lie. Each layer asks with the same mask, and looking at it waits for the GPU."""

    mask = None
    indices = boundaries = longest = None

    @classmethod
    def of(cls, mask: torch.Tensor) -> tuple:
        """Indices of the tokens that are no padding, in the batch laid flat; boundaries of rows among them; tokens of the longest row."""
        if cls.mask is not mask:
            lengths = mask.sum(1, dtype=torch.int32)
            cls.mask, cls.indices = mask, mask.flatten().nonzero().flatten()
            cls.boundaries = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0))
            cls.longest = int(lengths.max())
        return cls.indices, cls.boundaries, cls.longest


def varlen_attention(module, query, key, value, attention_mask, scaling=None, dropout=0.0, **kwargs) -> tuple:
    """Causal attention of [batch, heads, tokens, size]; gives [batch, tokens, heads, size]. The mask is [batch, tokens], or `None` where
    there is no padding. Rows that lie one after another come with `cu_seq_lens_q` and `max_length_q`."""
    if dropout:
        raise ValueError("varlen attention has no dropout")
    batch, heads, tokens, size = query.shape
    flat = [part.transpose(1, 2).reshape(batch * tokens, -1, size) for part in (query, key, value)]
    if flat[0].dtype == torch.float32 and torch.is_autocast_enabled(query.device.type):
        flat = [part.to(torch.get_autocast_dtype(query.device.type)) for part in flat]
    if attention_mask is not None:
        indices, boundaries, longest = Rows.of(attention_mask)
        out = on_rows(*(part[indices] for part in flat), boundaries, longest, scaling)
        out = out.new_zeros(batch * tokens, heads, size).index_copy(0, indices, out)
    else:
        boundaries, longest = kwargs.get("cu_seq_lens_q"), kwargs.get("max_length_q")
        if boundaries is None:
            boundaries, longest = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device), tokens
        out = on_rows(*flat, boundaries, longest, scaling)
    return out.view(batch, tokens, heads, size), None


def on_rows(query, key, value, boundaries, longest: int, scale) -> torch.Tensor:
    """Of [tokens, heads, size]; on a processor, whose torch has no such kernel, one row after another."""
    if query.is_cuda:
        from torch.nn.attention.varlen import varlen_attn

        return varlen_attn(query, key, value, boundaries, boundaries, longest, longest, scale=scale, window_size=(-1, 0))
    parts = []
    for start, end in zip(boundaries[:-1].tolist(), boundaries[1:].tolist()):
        row = [part[start:end].transpose(0, 1)[None] for part in (query, key, value)]
        out = torch.nn.functional.scaled_dot_product_attention(*row, is_causal=True, scale=scale, enable_gqa=True)
        parts.append(out[0].transpose(0, 1))
    return torch.cat(parts)


AttentionInterface.register(VARLEN, varlen_attention)
AttentionMaskInterface.register(VARLEN, flash_attention_mask)
