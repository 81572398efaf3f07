#!/usr/bin/env python3
"""Makes goldens/gguf/sentencepiece: GGUF files with a SentencePiece tokenizer, and the tokens of transformers.

Each NAME.gguf has no weights to speak of; NAME.json lists texts with what `AutoTokenizer` makes of them from that file.

    pip install torch transformers gguf     # 2.x, 5.23, 0.19
    python3 goldens/gguf_sentencepiece.py
"""

import json
import tempfile
from pathlib import Path

import gguf
import numpy as np
from transformers import AutoTokenizer

OUT = Path(__file__).parent / "gguf" / "sentencepiece"
SPACE = "\u2581"
PIECES = [SPACE + "t", "he", SPACE + "the", "in", SPACE + "a", "er", SPACE + "h", SPACE + "he", "ll", "llo", SPACE + "hello",
          "or", SPACE + "w", SPACE + "wor", "ld", SPACE + "world", SPACE * 2, SPACE * 4, "th", "the"]
TEXTS = ["hello world", "the  hello<|user|> the world<|end|>", "\u00e9 na\u00efve\nthe", " a", "    hello", "[tool]hello", "",
         "\u4f60\u597d \U0001f642", "<|user|>the<|end|>\n<|user|>hello  ", "the\tworld[tool] in"]
# Architecture, whether a space comes first, whether <s> does.
FILES = {"llama": ("llama", None, True), "gemma": ("gemma2", False, True), "phi": ("phi3", None, False)}


def write(path: Path, architecture: str, prefix, bos: bool) -> None:
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + PIECES + list(SPACE + "etaoinshrdlucmfwypvbgk.,!XN")
    count = len(tokens) - 259
    scores = [0.0] * 259 + [-float(i) for i in range(count)] + [-1000.0] * 3
    kinds = [2, 3, 3] + [6] * 256 + [1] * count + [3, 3, 4]
    tokens += ["<|user|>", "<|end|>", "[tool]"]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    writer.add_add_bos_token(bos)
    # transformers reads the sizes of the model too.
    writer.add_block_count(1)
    writer.add_embedding_length(1)
    writer.add_feed_forward_length(1)
    writer.add_head_count(1)
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((len(tokens), 1), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for name, options in FILES.items():
        path = OUT / f"{name}.gguf"
        write(path, *options)
        with tempfile.TemporaryDirectory() as folder:
            Path(folder, "model.gguf").write_bytes(path.read_bytes())
            tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")
        cases = [[text, ids := tokenizer(text).input_ids, tokenizer.decode(ids)] for text in TEXTS]
        (OUT / f"{name}.json").write_text(json.dumps(cases, indent=1) + "\n")
        print(name, sum(len(ids) for _, ids, _ in cases))


if __name__ == "__main__":
    main()
