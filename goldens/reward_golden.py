#!/usr/bin/env python3
"""Reward models: writes goldens/rewards from transformers, and goldens/small/reward.json from TRL's RewardTrainer.

Per architecture, rewards/NAME.json holds config.json and the tokens of a prompt with two answers; NAME.safetensors the
scores of both, the loss of the pair with a margin and centring, and the gradient of every parameter, all computed in float64
and stored as f32. Weights come from formula.py. reward.json holds the log of every step of TRL's runs on the small model.

Made with torch 2.11.0, transformers 5.17.0 and trl 1.16.0:  OMP_NUM_THREADS=1 python goldens/reward_golden.py
"""

import copy
import json
import tempfile
from pathlib import Path

import torch
import transformers
import trl
from formula import fill
from model_golden import CHOSEN, CONFIGS, PROMPT, REJECTED, set_weights, stored_parameters, tokens
from safetensors.torch import save
from train_golden import FOLDER as SMALL
from train_golden import QUIET, SHARED, finish, rows
from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer
from trl import RewardConfig, RewardTrainer

FOLDER = Path(__file__).parent / "rewards"
MARGIN, CENTRING = 0.25, 0.125
# The token that texts are padded with; where an answer ends with it, the score is taken before. (9 begins an answer, too:
# only GPT-2, whose table has no padding_idx, gives it a gradient there.)
PADS = {"llama": 63, "gpt2": 9, "gpt-neox": 63, "phi": 63, "qwen3": 63, "gemma": 63}
CLASSES = {
    "llama": "Llama", "gpt2": "GPT2", "gpt-neox": "GPTNeoX", "phi": "Phi", "qwen3": "Qwen3", "gemma": "Gemma",
}
# (name, data, changes)
RUNS = [
    ("reward", "pref_conv", {}),
    ("reward_margin", "pref_margin", {
        "center_rewards_coefficient": 0.05, "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    ("reward_filtered", "pref_conv", {"max_length": 48, "max_steps": 4}),
]


def model_golden(name: str, pad: int) -> None:
    config = CONFIGS[name] | {
        "architectures": [CLASSES[name] + "ForSequenceClassification"], "id2label": {"0": "LABEL_0"},
        "label2id": {"LABEL_0": 0}, "pad_token_id": pad}
    parsed = AutoConfig.for_model(**copy.deepcopy(config))
    model = AutoModelForSequenceClassification.from_config(parsed, attn_implementation="sdpa").eval()
    model = set_weights(model).double()
    prompt, chosen, rejected = tokens("prompt", PROMPT), tokens("chosen", CHOSEN), tokens("rejected", REJECTED)
    scores = torch.stack([model(torch.tensor([prompt + answer])).logits[0, 0] for answer in (chosen, rejected)])
    loss = -torch.nn.functional.logsigmoid(scores[0] - scores[1] - MARGIN) + CENTRING * (scores[0] + scores[1]) ** 2
    loss.backward()
    out = {"scores": scores.detach(), "loss": loss.detach().reshape(1)}
    out |= {f"gradient/{key}": value.grad for key, value in stored_parameters(model)}
    (FOLDER / f"{name}.safetensors").write_bytes(save({k: v.float().contiguous() for k, v in out.items()}))
    golden = {"config": config, "prompt": prompt, "chosen": chosen, "rejected": rejected}
    (FOLDER / f"{name}.json").write_text(json.dumps(golden) + "\n")
    print(name, scores.tolist(), loss.item())


def write_margins() -> None:
    """Writes preferences with the margin by which the chosen completion should lead."""
    lines = (SMALL / "pref_plain.jsonl").read_text().splitlines()[:24]
    out = [json.dumps(json.loads(line) | {"margin": (i % 5) / 4}) for i, line in enumerate(lines)]
    (SMALL / "pref_margin.jsonl").write_text("\n".join(out) + "\n")


def train(data: str, changes: dict) -> dict:
    config = AutoConfig.from_pretrained(SMALL / "model", num_labels=1)
    model = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    fill(model)
    quiet = {key: value for key, value in QUIET.items() if key != "activation_checkpointing"}
    arguments = quiet | SHARED | {"max_steps": 8} | changes
    with tempfile.TemporaryDirectory() as output:
        trainer = RewardTrainer(
            model=model, train_dataset=rows(data), args=RewardConfig(output_dir=output, **arguments),
            processing_class=AutoTokenizer.from_pretrained(SMALL / "model"))
        return finish(trainer, model, {"max_steps": 8} | changes, method="reward", data=data, reference="none")


def main() -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    for name, pad in PADS.items():
        model_golden(name, pad)
    write_margins()
    result = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
        "defaults": SHARED,
    }
    runs = ",\n".join(f"{json.dumps(name)}: {json.dumps(train(*rest))}" for name, *rest in RUNS)
    (SMALL / "reward.json").write_text(json.dumps(result)[:-1] + ', "runs": {\n' + runs + "\n}}\n")


if __name__ == "__main__":
    main()
