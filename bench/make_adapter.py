#!/usr/bin/env python3
"""Makes the adapter that both programs start from: LoRA on every linear layer of a task's model, in PEFT's files.

    python make_adapter.py TASK        # a folder of make_task.py; writes TASK/adapter; needs torch, transformers, peft

A is random, B zero: the first step's loss is that of the base.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

RANK = 16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", type=Path)
    args = parser.parse_args()

    torch.manual_seed(1)
    config = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear", task_type="CAUSAL_LM")
    model = AutoModelForCausalLM.from_pretrained(args.task / "model", dtype=torch.float32)
    get_peft_model(model, config).save_pretrained(args.task / "adapter")


if __name__ == "__main__":
    main()
