#!/usr/bin/env python3
"""Makes the small inputs under goldens/small: tokenizer, data and model config. Deterministic, no download."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

FOLDER = Path(__file__).parent / "small"
SPECIAL = ["<pad>", "<s>", "</s>", "<unk>", "<|user|>", "<|assistant|>", "<|system|>", "<|end|>"]
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)
WORDS = (
    "river stone lamp garden north window paper honest quiet copper bridge winter seven orchard signal harbour "
    "letter margin velvet engine mirror cotton thunder island captain ladder candle forest silver basket the a of "
    "and to in is was that it for on are as with they at be this from have or by one had not but what some we can "
    "out other were all there when up use your how said each she which their time will way about many then them"
).split()


def sentence(rng: random.Random, low: int, high: int) -> str:
    words = [rng.choice(WORDS) for _ in range(rng.randint(low, high))]
    if rng.random() < 0.15:
        words[rng.randrange(len(words))] = rng.choice(["don't", "café", "3.14", "(see", "naïve", "x²", "e-mail"])
    return " ".join(words).capitalize() + rng.choice([".", ".", "!", "?"])


def text(rng: random.Random, low: int, high: int) -> str:
    return " ".join(sentence(rng, 3, 9) for _ in range(rng.randint(low, high)))


def write_rows(name: str, rows: list) -> None:
    (FOLDER / name).write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def turn(role: str, content: str) -> dict:
    return {"role": role, "content": content}


def main() -> None:
    rng = random.Random(7)
    FOLDER.mkdir(exist_ok=True)
    conversational, plain, completions, conversations = [], [], [], []
    for i in range(64):
        prompt = [turn("user", text(rng, 1, 3))]
        if i % 4 == 0:
            prompt.insert(0, turn("system", sentence(rng, 3, 6)))
        if i % 8 == 3:
            prompt += [turn("assistant", text(rng, 1, 2)), turn("user", sentence(rng, 3, 8))]
        chosen, rejected = text(rng, 1, 4), text(rng, 1, 4)
        if i % 5 == 2:
            # Answers that begin alike: the shared prefix is longer than the prompt.
            rejected = " ".join(chosen.split()[:3]) + " " + rejected
        conversational.append(
            {"prompt": prompt, "chosen": [turn("assistant", chosen)], "rejected": [turn("assistant", rejected)]})
    for _ in range(64):
        plain.append({"prompt": text(rng, 1, 3), "chosen": " " + text(rng, 1, 4), "rejected": " " + text(rng, 1, 4)})
    for i in range(32):
        completions.append({"prompt": text(rng, 1, 2), "completion": " " + text(rng, 1, 3)})
        talk = []
        for _ in range(1 + i % 3):
            talk += [turn("user", text(rng, 1, 2)), turn("assistant", text(rng, 1, 2))]
        conversations.append({"messages": talk})
    write_rows("pref_conv.jsonl", conversational)
    write_rows("pref_plain.jsonl", plain)
    write_rows("sft_completion.jsonl", completions)
    write_rows("sft_messages.jsonl", conversations)

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    corpus = [json.dumps(row, ensure_ascii=False) for row in plain + completions]
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=SPECIAL, show_progress=False,
                                  initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.train_from_iterator(corpus, trainer)
    model = FOLDER / "model"
    model.mkdir(exist_ok=True)
    tokenizer.save(str(model / "tokenizer.json"), pretty=False)
    write = lambda name, value: (model / name).write_text(json.dumps(value, indent=2) + "\n")
    write("tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>",
        "unk_token": "<unk>", "clean_up_tokenization_spaces": False, "model_max_length": 1024,
        "padding_side": "left"})
    (model / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    write("config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 112,
        "vocab_size": tokenizer.get_vocab_size(), "max_position_embeddings": 1024, "rms_norm_eps": 1e-05,
        "hidden_act": "silu", "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "bos_token_id": 1,
        "eos_token_id": 2, "pad_token_id": 0, "dtype": "float32"})


if __name__ == "__main__":
    main()
