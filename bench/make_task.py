#!/usr/bin/env python3
"""Makes what both programs are timed on: a Llama folder with random weights, a tokenizer and preference pairs.

    python make_task.py SIZE FOLDER        # SIZE is S or L; needs torch, transformers, tokenizers

The tokenizer knows one token per word, so that lengths in tokens are chosen here and nothing depends on how a text
happens to be split. Lengths are log-normal with the proportions of UltraFeedback: a quarter of a sequence's tokens
is its prompt. Everything follows from SIZE: the same size is the same task on every machine.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# Shapes in the words of config.json; pairs per step.
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
}
NUM_STEPS = 12
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>"]


def write_tokenizer(folder: Path, vocab_size: int) -> None:
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


def write_pairs(path: Path, num_pairs: int, vocab_size: int) -> dict:
    rng = random.Random(20)

    def words(count: int) -> str:
        # A skewed choice, as words of a language have: a few are frequent, most are rare.
        return "".join(f" w{len(SPECIAL) + int((vocab_size - len(SPECIAL)) * rng.random() ** 3)}" for _ in range(count))

    real, prompts, rows = 0, 0, []
    for _ in range(num_pairs):
        prompt = length(rng, 77, 0.45, 8, 300)
        answers = [length(rng, 229, 0.28, 8, 600) for _ in range(2)]
        rows.append({"prompt": words(prompt)[1:], "chosen": words(answers[0] - 1), "rejected": words(answers[1] - 1)})
        real += 2 * prompt + sum(answers)
        prompts += 2 * prompt
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"tokens_per_sequence": real / (2 * num_pairs), "prompt_share": prompts / real}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=SIZES)
    parser.add_argument("folder", type=Path)
    args = parser.parse_args()

    size = SIZES[args.size]
    model_folder = args.folder / "model"
    model_folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(0)
    config = LlamaConfig(**size["model"], max_position_embeddings=2048, tie_word_embeddings=False, bos_token_id=1,
                         eos_token_id=2, pad_token_id=0)
    model = LlamaForCausalLM(config).to(torch.float32)
    model.save_pretrained(model_folder)
    write_tokenizer(model_folder, size["model"]["vocab_size"])
    lengths = write_pairs(args.folder / "pairs.jsonl", NUM_STEPS * size["pairs_per_step"], size["model"]["vocab_size"])
    task = {"size": args.size, "pairs_per_step": size["pairs_per_step"], "max_steps": NUM_STEPS,
            "parameters": sum(p.numel() for p in model.parameters()), **size["model"], **lengths}
    (args.folder / "task.json").write_text(json.dumps(task, indent=2) + "\n")
    print(json.dumps(task))


if __name__ == "__main__":
    main()
