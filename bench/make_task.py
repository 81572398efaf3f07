#!/usr/bin/env python3
"""Makes what all programs are timed on: a Llama folder with random weights, a tokenizer, and pairs of a shape.

    python make_task.py SIZE SHAPE FOLDER      # SIZE is S, L or M; needs torch, transformers, tokenizers

FOLDER/model is the size's. FOLDER/SHAPE.jsonl has the pairs, SHAPE-sft.jsonl their prompts and chosen answers as
demonstrations, SHAPE.json the lengths. The tokenizer knows one token per word, so that lengths in tokens are chosen here
and nothing depends on how a text happens to be split. Lengths are log-normal. Everything follows from SIZE and SHAPE.
"""

import argparse
import json
import random
from pathlib import Path

# Shapes of models in the words of config.json; pairs per step.
SIZES = {
    "S": {
        "model": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
                  "intermediate_size": 688, "vocab_size": 8192},
        "pairs_per_step": 8,
    },
    "L": {
        "model": {"hidden_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 4,
                  "intermediate_size": 1408, "vocab_size": 32000},
        "pairs_per_step": 4,
    },
    "M": {
        "model": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "num_key_value_heads": 12,
                  "intermediate_size": 2048, "vocab_size": 32000},
        "pairs_per_step": 4,
    },
}
# Mean, spread, least and most of a prompt's tokens, and of an answer's with its end.
SHAPES = {
    # The proportions of UltraFeedback: a quarter of a sequence's tokens is its prompt.
    "mixed": ((77, 0.45, 8, 300), (229, 0.28, 8, 600)),
    # Twice as long: for at most 2048 tokens.
    "mixed-2048": ((154, 0.45, 16, 600), (458, 0.28, 16, 1200)),
    "long-answers": ((40, 0.40, 8, 120), (450, 0.25, 64, 850)),
    "long-prompt": ((700, 0.12, 400, 860), (60, 0.35, 8, 150)),
}
NUM_STEPS = 12
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def write_model(folder: Path, shape: dict) -> int:
    """Weights, configuration and tokenizer, unless they are there; returns the number of parameters."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    count = folder.parent / "parameters.json"
    if count.exists():
        return json.loads(count.read_text())
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = LlamaConfig(**shape, max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=1,
                         eos_token_id=2, pad_token_id=0)
    model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(folder)
    write_tokenizer(folder, shape["vocab_size"])
    count.write_text(f"{sum(p.numel() for p in model.parameters())}\n")
    return json.loads(count.read_text())


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {word: i for i, word in enumerate(SPECIAL)}
    for i in range(len(SPECIAL), vocab_size):
        vocab[f"w{i}"] = i
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>",
        model_max_length=2048,
    ).save_pretrained(folder)


def length(rng: random.Random, mean: float, sigma: float, low: int, high: int) -> int:
    """A log-normal length with the given mean, clipped."""
    return min(high, max(low, round(mean * rng.lognormvariate(-sigma * sigma / 2, sigma))))


def write_pairs(folder: Path, shape: str, num_pairs: int, vocab_size: int) -> dict:
    rng = random.Random(20)

    def words(count: int) -> str:
        # A skewed choice, as words of a language have: a few are frequent, most are rare.
        return "".join(f" w{len(SPECIAL) + int((vocab_size - len(SPECIAL)) * rng.random() ** 3)}" for _ in range(count))

    prompt_lengths, answer_lengths = SHAPES[shape]
    prompt_tokens, answer_tokens, rows = 0, 0, []
    for _ in range(num_pairs):
        prompt = length(rng, *prompt_lengths)
        answers = [length(rng, *answer_lengths) for _ in range(2)]
        rows.append({"prompt": words(prompt)[1:], "chosen": words(answers[0] - 1), "rejected": words(answers[1] - 1)})
        prompt_tokens += prompt
        answer_tokens += sum(answers)
    demonstrations = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    for name, kept in ((f"{shape}.jsonl", rows), (f"{shape}-sft.jsonl", demonstrations)):
        (folder / name).write_text("".join(json.dumps(row) + "\n" for row in kept))
    return {"prompt_tokens": prompt_tokens / num_pairs, "answer_tokens": answer_tokens / (2 * num_pairs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("shape", choices=SHAPES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()

    size = SIZES[args.size]
    parameters = write_model(args.folder / "model", size["model"])
    lengths = write_pairs(args.folder, args.shape, NUM_STEPS * size["pairs_per_step"], size["model"]["vocab_size"])
    facts = {"pairs_per_step": size["pairs_per_step"], "max_steps": NUM_STEPS, "parameters": parameters,
             **size["model"], **lengths}
    (args.folder / f"{args.shape}.json").write_text(json.dumps(facts, indent=2) + "\n")


if __name__ == "__main__":
    main()
