#!/usr/bin/env python3
"""Makes goldens/gguf/families: golden models of goldens/models as GGUF files, by llama.cpp's own converter.

NAME.gguf has the weights of the formula in f32, under llama.cpp's names and in its order, and a tokenizer of a few bytes.

    pip install torch transformers numpy gguf
    python3 goldens/gguf_families.py LLAMA_CPP     # a checkout, or vendor/llama.cpp of llama-cpp-python's source archive

Made with llama.cpp of llama-cpp-python 0.3.36 and transformers 5.23.0.
"""

import copy
import json
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
LLAMA_CPP = Path(sys.argv[1])
sys.path[:0] = [str(LLAMA_CPP / "gguf-py"), str(LLAMA_CPP)]

import gguf
from conversion import get_model_class
from conversion.base import ModelBase
from transformers import AutoConfig

from model_golden import CONFIGS, model_class, set_weights

OUT = HERE / "gguf" / "families"
# Goldens, and what differs from their configs: what llama.cpp fixes for an architecture, or has no key for.
MODELS = {
    "llama": {},
    "gemma2": {"query_pre_attn_scalar": 6, "layer_types": None},
    "gemma3": {"query_pre_attn_scalar": 6, "layer_types": None, "sliding_window_pattern": None, "num_hidden_layers": 7},
    "phi3-long": {},
    "phi3-short": {},
    "olmo2": {},
    "olmo3": {},
    "smollm3": {"layer_types": None, "no_rope_layers": None, "use_sliding_window": None, "sliding_window": None, "no_rope_layer_interval": None},
    "granite": {},
    "glm4": {},
    "ernie4-5": {},
    "seed-oss": {},
    "exaone4": {"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e8, "factor": 16.0, "low_freq_factor": 1.0,
                                     "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}},
    "starcoder2": {"sliding_window": None},
    "arcee": {},
    "cohere2": {"rotary_pct": 1.0, "layer_types": None},
    "hunyuan": {"rope_parameters": {"rope_type": "default", "rope_theta": 50000.0}},
    "ministral3": {},
    "phi": {"intermediate_size": 64},
}


def set_vocab(self):
    tokens = ["<unk>", "<s>", "</s>"] + [chr(33 + i) for i in range(61)]
    self.gguf_writer.add_tokenizer_model("gpt2")
    self.gguf_writer.add_tokenizer_pre("gpt-2")
    self.gguf_writer.add_token_list(tokens)
    self.gguf_writer.add_token_types([3, 3, 3] + [1] * 61)
    self.gguf_writer.add_token_merges([])
    self.gguf_writer.add_bos_token_id(1)
    self.gguf_writer.add_eos_token_id(2)


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for name, changes in MODELS.items():
        config = {key: value for key, value in (copy.deepcopy(CONFIGS[name]) | changes).items() if value is not None}
        with tempfile.TemporaryDirectory() as folder:
            parsed = AutoConfig.for_model(**copy.deepcopy(config))
            model = set_weights(model_class(config).from_config(parsed))
            model.save_pretrained(folder)
            saved = json.loads(Path(folder, "config.json").read_text()) | changes
            Path(folder, "config.json").write_text(json.dumps(saved))
            # Gemma 3's converter counts tokens there.
            Path(folder, "tokenizer.json").write_text(json.dumps({"model": {"vocab": {str(i): i for i in range(64)}}, "added_tokens": []}))
            try:
                converter = get_model_class(config["architectures"][0])
                converter.set_vocab = set_vocab
                converter(Path(folder), gguf.LlamaFileType.ALL_F32, OUT / f"{name}.gguf", eager=True).write()
            except Exception as error:
                print(name, "FAILED", repr(error)[:300])
                continue
        reader = gguf.GGUFReader(OUT / f"{name}.gguf")
        for field in reader.fields.values():
            if not field.name.startswith(("tokenizer", "GGUF", "general")):
                print(name, field.name.split(".", 1)[1], field.contents(), flush=True)
        (OUT / f"{name}.json").write_text(json.dumps(config) + "\n")
        print(name, sorted({t.name.split(".", 2)[-1] if t.name.startswith("blk") else t.name for t in reader.tensors}))


if __name__ == "__main__":
    main()
