#!/usr/bin/env python3
"""Runs TRL's BCOTrainer on the small model and labelled completions: writes goldens/small/bco.json.

TRL 1.16 has no such trainer any more. Its BOS token before every prompt is left out, as in offline_golden.py.

Made with torch 2.15.0, transformers 5.24.0 and trl 1.8.0:  OMP_NUM_THREADS=1 python goldens/bco_golden.py
"""

import json
import os
import tempfile

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import transformers
import trl
from train_golden import DPO, FOLDER, QUIET, finish, model, rows
from transformers import AutoTokenizer
from trl.experimental.bco import BCOConfig, BCOTrainer


def train(changes: dict) -> dict:
    changes = {"max_steps": 4} | changes
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    tokenizer.bos_token = None
    quiet = {key: value for key, value in QUIET.items() if key != "activation_checkpointing"}
    with tempfile.TemporaryDirectory() as output:
        policy = model()
        trainer = BCOTrainer(
            model=policy, ref_model=model(reference=True), train_dataset=rows("unpaired"), processing_class=tokenizer,
            args=BCOConfig(output_dir=output, gradient_checkpointing=False, **(quiet | DPO | changes)))
        return finish(trainer, policy, changes, overrides=["objective.loss=bco"], method="kto", data="unpaired",
                      reference="other")


def main() -> None:
    torch.set_num_threads(1)
    result = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
        "defaults": DPO, "runs": {"bco": train({}), "bco_steep": train({"beta": 0.5})},
    }
    (FOLDER / "bco.json").write_text(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
