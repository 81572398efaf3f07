"""Weights from a formula, the same bits here and in formula.rs, so that goldens need no weights in the repository.

Element i of the tensor called NAME is

    h    = fnv1a32(NAME)                                   32-bit, over the UTF-8 bytes
    x    = mix(h + i * 0x9E3779B9 mod 2^32)                the finaliser of MurmurHash3
    unit = (x >> 8) * 2^-23 - 1                            in [-1, 1), exact in f32
    w    = centre + spread * unit                          in f32, each operation rounded once

centre and spread follow from the name: norm weights 1 and 0.1, DoRA's magnitudes 0.5 and 0.1, biases 0 and 0.05,
everything else 0 and 0.15.
"""

import numpy as np


def fnv1a32(text: str) -> int:
    hash_ = 0x811C9DC5
    for byte in text.encode():
        hash_ = (hash_ ^ byte) * 0x01000193 % 2**32
    return hash_


def unit(name: str, count: int) -> np.ndarray:
    """`count` f32 values in [-1, 1)."""
    with np.errstate(over="ignore"):
        x = np.uint32(fnv1a32(name)) + np.arange(count, dtype=np.uint32) * np.uint32(0x9E3779B9)
        x ^= x >> np.uint32(16)
        x *= np.uint32(0x85EBCA6B)
        x ^= x >> np.uint32(13)
        x *= np.uint32(0xC2B2AE35)
        x ^= x >> np.uint32(16)
    return (x >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-23) - np.float32(1)


def scale(name: str) -> tuple[float, float]:
    """(centre, spread) of a tensor."""
    if name.endswith(".bias"):
        return 0.0, 0.05
    if name.endswith(".lora_magnitude_vector"):
        return 0.5, 0.1
    parent = name.split(".")[-2]
    if "norm" in parent or parent.startswith("ln_"):
        return 1.0, 0.1
    return 0.0, 0.15


def weight(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """The tensor called `name`, row-major."""
    centre, spread = scale(name)
    values = np.float32(centre) + np.float32(spread) * unit(name, int(np.prod(shape)))
    return values.astype(np.float32).reshape(shape)


def perturbed(name: str, shape: tuple[int, ...], amount: float = 0.02) -> np.ndarray:
    """The same tensor moved a little: a reference model that is not the policy."""
    noise = unit(name + "#reference", int(np.prod(shape))).reshape(shape)
    return (weight(name, shape) + np.float32(amount) * noise).astype(np.float32)


def fill(model, reference: bool = False) -> None:
    """Overwrites every parameter of a torch module."""
    import torch

    make = perturbed if reference else weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.from_numpy(make(name, tuple(parameter.shape))))
