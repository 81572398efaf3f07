"""Task that both programs are timed on: a model with random weights, and pairs of a shape. Only text is written."""

import json
import subprocess

from make_task import NUM_STEPS, write_pairs
from small_runs import write_model

from ..task import Task

# Of Llama 3: hidden, intermediate, blocks, heads, key/value heads, vocabulary; whether the head is the table; pairs a step.
SIZES = {
    "tiny": ((64, 176, 2, 4, 2, 1024), True, 2),
    "1B": ((2048, 8192, 16, 32, 8, 128256), True, 32),
    "8B": ((4096, 14336, 32, 32, 8, 128256), False, 16),
}
# The most tokens of a sequence.
MAX_LENGTH = {"mixed": 1024, "mixed-2048": 2048}


def make(size: str, shape: str, args) -> Task:
    """The task, from its files if they are there; with `args.same_weights` both programs read weights that Tandem has written."""
    folder, pairs = args.work / (f"{size}-stored" if args.same_weights else size), args.pairs
    sizes, is_tied, own_pairs = SIZES[size]
    hidden, intermediate, blocks, heads, kv_heads, vocab = sizes
    config = folder / ("config" if args.same_weights else "model")
    if not config.exists():
        write_model(config, sizes, words=vocab, tie_word_embeddings=is_tied, pad_token_id=0,
                    max_position_embeddings=4096, rope_theta=500000.0)
    if args.same_weights and not (folder / "model").exists():
        subprocess.run([args.tandem, "init", config, folder / "model"], check=True, stdout=subprocess.DEVNULL)
    facts = {"hidden_size": hidden, "num_hidden_layers": blocks, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
             "intermediate_size": intermediate, "vocab_size": vocab, "pairs_per_step": own_pairs, "max_steps": NUM_STEPS,
             "parameters": parameters(sizes, is_tied), "max_length": MAX_LENGTH[shape],
             "weights": "stored" if args.same_weights else "random"}
    # Longer prompts and answers are fewer a step: the tokens are about as many.
    facts["pairs_per_step"] = max(1, own_pairs * 1024 // facts["max_length"])
    lengths = write_pairs(folder, shape, NUM_STEPS * (pairs or facts["pairs_per_step"]), vocab)
    (folder / f"{shape}.json").write_text(json.dumps(facts | lengths, indent=2) + "\n")
    return Task(size, shape, folder, args.steps, pairs)


def parameters(sizes: tuple, is_tied: bool) -> int:
    hidden, intermediate, blocks, heads, kv_heads, vocab = sizes
    kv_width = hidden // heads * kv_heads
    block = 2 * hidden * hidden + 2 * hidden * kv_width + 3 * hidden * intermediate + 2 * hidden
    return (1 if is_tied else 2) * vocab * hidden + blocks * block + hidden
