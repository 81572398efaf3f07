"""Models and pairs that the scripts which run Tandem alone share: random, and made in a moment."""

import json
import random
import subprocess
import sys
from pathlib import Path

SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]

# hidden, intermediate, blocks, heads, key/value heads, vocabulary
MODELS = {"small": (512, 1408, 8, 8, 4, 8192), "large": (1024, 2816, 12, 16, 8, 16384)}


def write_model(folder: Path, sizes: tuple, words: int = 8192, **changes) -> None:
    """A folder without weights; `words` is how many ids the tokenizer knows, `changes` are of config.json."""
    hidden, intermediate, blocks, heads, kv_heads, vocab = sizes
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": intermediate, "num_hidden_layers": blocks, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": vocab, "max_position_embeddings": 2048, "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
    } | changes))
    # One token a word, so that lengths in tokens are chosen here.
    vocabulary = {word: i for i, word in enumerate(SPECIAL)} | {f"w{i}": i for i in range(len(SPECIAL), words)}
    special = [{"id": i, "content": word, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
                "special": True} for i, word in enumerate(SPECIAL)]
    (folder / "tokenizer.json").write_text(json.dumps({
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }))
    (folder / "tokenizer_config.json").write_text(json.dumps({
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "pad_token": "<pad>",
    }))


def write_pairs(path: Path, num_pairs: int) -> None:
    rng = random.Random(4)

    def words(low: int, high: int) -> str:
        return " ".join(f"w{rng.randrange(len(SPECIAL), 8192)}" for _ in range(rng.randint(low, high)))

    rows = [{"prompt": words(20, 150), "chosen": " " + words(60, 300), "rejected": " " + words(60, 300)}
            for _ in range(num_pairs)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_config(work: Path, model: str, threads: int, steps: int, micro_batch_tokens: int) -> tuple:
    """Writes a config of DPO from random weights, four pairs of `work` per step; returns the run's folder and the file."""
    output, config = work / "run", work / "run.toml"
    config.write_text(f"""method = "dpo"
model = "{work}/{model}"
weights = "random"
output = "{output}"
[data]
train = "{work}/pairs.jsonl"
cache = "{work}/cache"
max_length = 512
[train]
batch_size = 4
micro_batch_tokens = {micro_batch_tokens}
steps = {steps}
learning_rate = 1e-4
[compute]
dtype = "f32"
threads = {max(1, threads)}
""")
    return output, config


def tandem(program, *words, refused: bool = False) -> str:
    """Output of the program, which must succeed, or refuse its input."""
    done = subprocess.run([str(word) for word in (program, *words)], capture_output=True, text=True, check=False)
    if done.returncode != (2 if refused else 0):
        sys.exit(f"tandem {' '.join(map(str, words))}: ended with {done.returncode}: {done.stderr[-3000:]}")
    return done.stdout
