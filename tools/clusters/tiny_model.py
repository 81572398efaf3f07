"""Writes what a tiny run needs into a folder: source/ (config and tokenizer of a Llama) and preferences.jsonl."""

import json
import pathlib
import sys

folder = pathlib.Path(sys.argv[1])
SPECIAL = ["<pad>", "<s>", "</s>"]


def byte_characters():
    """Characters of GPT-2's byte-level alphabet, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = iter(range(256, 512))
    return [chr(byte if byte in printable else next(others)) for byte in range(256)]


def write(name, value):
    (folder / "source" / name).write_text(json.dumps(value))


(folder / "source").mkdir()
level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
kinds = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
vocabulary = {token: place for place, token in enumerate(SPECIAL + byte_characters())}
write(
    "tokenizer.json",
    {
        "version": "1.0",
        "added_tokens": [{"id": place, "content": token, **kinds} for place, token in enumerate(SPECIAL)],
        "pre_tokenizer": level,
        "decoder": level,
        "model": {"type": "BPE", "vocab": vocabulary, "merges": []},
    },
)
write(
    "tokenizer_config.json",
    {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **{f"{name}_token": token for name, token in zip(["pad", "bos", "eos"], SPECIAL)},
    },
)
write(
    "config.json",
    {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 272,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
)
rows = (
    {
        "prompt": f"Count to {row}:",
        "chosen": " " + "one " * (1 + row % 5) + "and then stop",
        "rejected": " " + "two " * (1 + row % 3) + "never stop",
    }
    for row in range(24)
)
(folder / "preferences.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
