#!/usr/bin/env python3
"""Checks that transformers and peft load the reward models that Tandem trains, and score as it does: a full run and one with an
adapter, each of a few steps from a language model. The scores of transformers over the training pairs must have the mean, the
extremes and the accuracy that `tandem eval` tells of what the run wrote (of an adapter: the run's last evaluation).

    cargo build --release -p tandem-cli
    python goldens/check_rewards.py target/release/tandem
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from formula import fill
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer

SMALL = Path(__file__).parent / "small"
TOML = """method = "reward"
model = "model"
output = "{name}"
[data]
train = "{data}"
eval = "{data}"
cache = "cache"
{adapter}
[train]
batch_size = 8
steps = 6
learning_rate = 1e-3
warmup_steps = 0
[compute]
devices = "cpu"
dtype = "f32"
"""


def base(folder: Path) -> None:
    """The small language model, tokenizer and all."""
    AutoTokenizer.from_pretrained(SMALL / "model").save_pretrained(folder)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(SMALL / "model"))
    fill(model)
    model.save_pretrained(folder)


def scores(model, tokenizer) -> torch.Tensor:
    """Rewards of the training pairs `[2, pairs]`."""
    rows = [json.loads(line) for line in (SMALL / "pref_conv.jsonl").read_text().splitlines()]
    out = []
    for side in ("chosen", "rejected"):
        texts = [tokenizer.apply_chat_template(row["prompt"] + row[side], tokenize=False) for row in rows]
        batch = tokenizer(texts, add_special_tokens=False, padding=True, padding_side="right", return_tensors="pt")
        with torch.no_grad():
            out.append(model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, 0])
    return torch.stack(out).double()


def check(name: str, found: torch.Tensor, told: dict) -> None:
    chosen, rejected = found
    ours = {
        "mean_reward": found.mean(), "min_reward": found.min(), "max_reward": found.max(),
        "margin": (chosen - rejected).mean(), "accuracy": (chosen > rejected).double().mean(),
    }
    for key, value in ours.items():
        assert abs(value.item() - told[key]) < 1e-5, (name, key, value.item(), told[key])
    print(f"{name}: {found.numel()} scores as told")


def main() -> None:
    tandem = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        base(folder / "model")
        tokenizer = AutoTokenizer.from_pretrained(SMALL / "model")

        def run(name: str, adapter: str) -> dict:
            """The run's last evaluation."""
            toml = TOML.format(name=name, data=SMALL / "pref_conv.jsonl", adapter=adapter)
            (folder / f"{name}.toml").write_text(toml)
            subprocess.run([tandem, "train", f"{name}.toml"], cwd=folder, check=True, capture_output=True)
            lines = (folder / name / "metrics.jsonl").read_text().splitlines()
            return [line for line in map(json.loads, lines) if line["split"] == "eval"][-1]

        told = run("full", "")
        model, report = AutoModelForSequenceClassification.from_pretrained(
            folder / "full/final", output_loading_info=True)
        assert not any(report.values()), report
        assert type(model).__name__ == "LlamaForSequenceClassification" and model.config.num_labels == 1
        found = scores(model.eval(), tokenizer)
        check("full", found, told)
        evaluated = subprocess.run(
            [tandem, "eval", "full.toml", "--set", "model=full/final", "--set", "output=other"],
            cwd=folder, check=True, capture_output=True, text=True)
        check("full, by eval", found, json.loads(evaluated.stdout))

        told = run("lora", "[adapter]\nrank = 4\n")
        model = AutoModelForSequenceClassification.from_pretrained(folder / "model", num_labels=1)
        model = PeftModel.from_pretrained(model, folder / "lora/final")
        stored = load_file(folder / "lora/final/adapter_model.safetensors")
        head = model.base_model.model.score.modules_to_save["default"].weight
        assert torch.equal(head, stored["base_model.model.score.weight"]), "the head that was trained"
        check("lora", scores(model.eval(), tokenizer), told)


if __name__ == "__main__":
    main()
