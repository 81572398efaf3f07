#!/usr/bin/env python3
"""Makes quants.gguf and quants.f32: tensors of random bytes of every type, and their values.

Needs numpy and PyPI's gguf (0.19 made the committed files):

    python3 crates/tandem-gguf/tests/data/make.py
"""
import pathlib

import gguf
import numpy as np

FOLDER = pathlib.Path(__file__).parent
TYPES = "F32 F16 BF16 Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K".split()
# Offsets of the f16 scales in a block, which random bytes must not make infinite.
SCALES = {"F16": [0], "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0], "Q2_K": [80, 82],
          "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}

rng = np.random.default_rng(25)
writer = gguf.GGUFWriter(FOLDER / "quants.gguf", "llama")
values = []
for name in TYPES:
    kind = gguf.GGMLQuantizationType[name]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    rows, blocks = 2, 2 if block > 1 else 24
    if name in ("F32", "BF16"):
        floats = rng.standard_normal((rows, blocks)).astype(np.float32)
        data = floats.view(np.uint8) if name == "F32" else gguf.quants.quantize(floats, kind)
    else:
        data = rng.integers(0, 256, (rows, blocks, size), dtype=np.uint8)
        for at in SCALES[name]:
            scale = rng.standard_normal((rows, blocks)).astype(np.float16)
            data[:, :, at:at + 2] = scale.view(np.uint8).reshape(rows, blocks, 2)
        data = data.reshape(rows, -1)
    stored = data.view(np.float32) if name == "F32" else data.view(np.float16) if name == "F16" else data
    values.append(gguf.quants.dequantize(stored, kind).astype(np.float32).ravel())
    if name == "F32" or name == "F16":
        writer.add_tensor(name, stored)
    else:
        writer.add_tensor(name, data, raw_dtype=kind)
writer.write_header_to_file()
writer.write_kv_data_to_file()
writer.write_tensors_to_file()
writer.close()
np.concatenate(values).astype("<f4").tofile(FOLDER / "quants.f32")
