#!/usr/bin/env python3
"""Runs TRL on the same weights and rows as dpo.toml or sft.toml, and prints its losses and gradient norms beside Tandem's.

    tandem train dpo.toml
    python beside_trl.py dpo runs/dpo [STEPS]
    tandem train sft.toml
    python beside_trl.py sft runs/sft [STEPS]

The weights are dequantised by transformers from the same GGUF. Made with torch 2.15, transformers 5.23 and trl 1.16.
"""

import json
import sys
import tempfile
import time
from pathlib import Path

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

HERE = Path(__file__).parent


def main() -> None:
    method, run, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 4
    tokenizer = AutoTokenizer.from_pretrained(HERE, gguf_file="smollm2.gguf")
    read = AutoModelForCausalLM.from_pretrained(HERE, gguf_file="smollm2.gguf", dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(read.state_dict())
    rows = Dataset.from_list([json.loads(line) for line in (HERE / "pairs.jsonl").read_text().splitlines()])
    if method == "sft":
        rows = rows.rename_column("chosen", "completion").remove_columns("rejected")
    kinds = {"dpo": (DPOConfig, DPOTrainer, {"beta": 0.1}), "sft": (SFTConfig, SFTTrainer, {})}
    make_config, make_trainer, options = kinds[method]
    with tempfile.TemporaryDirectory() as output:
        # The trainer reads the reference from the policy's folder.
        plain.save_pretrained(f"{output}/model")
        policy = AutoModelForCausalLM.from_pretrained(f"{output}/model", dtype=torch.float32)
        arguments = make_config(
            output_dir=output, max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-5,
            lr_scheduler_type="constant", weight_decay=0.0, optim="adamw_torch", max_length=256, seed=42,
            logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True, use_cpu=True, bf16=False,
            gradient_checkpointing=False, **options)
        trainer = make_trainer(model=policy, args=arguments, train_dataset=rows, processing_class=tokenizer)
        began = time.time()
        trainer.train()
        seconds = (time.time() - began) / steps
        theirs = [log for log in trainer.state.log_history if "loss" in log]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    ours = [line for line in lines if line.get("split") == "train"]
    print("step  loss: TRL, Tandem  gradient norm: TRL, Tandem")
    for step, (their, our) in enumerate(zip(theirs, ours), 1):
        print(f"{step:4}  {their['loss']:.4f} {our['loss']:.4f}  {their['grad_norm']:.4f} {our['grad_norm']:.4f}")
    print(f"TRL: {seconds:.2f} s a step")


if __name__ == "__main__":
    main()
