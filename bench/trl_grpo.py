#!/usr/bin/env python3
"""Times steps of TRL's GRPOTrainer: one process, one configuration.

    python trl_grpo.py MODEL PROMPTS.jsonl --prompts N --answers K --tokens T --steps N --micro-batch M --threads N

Prints a JSON object a step: {"step", "seconds", "tokens"}: from the end of the step before, with generation, rewards and
update. The reward is the share of even token ids, which costs nothing.
"""

import argparse
import json
import tempfile
import time

import torch
from datasets import load_dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepTimer(TrainerCallback):
    def __init__(self, tokens: list) -> None:
        self.tokens, self.start = tokens, 0.0

    def on_train_begin(self, args, state, control, **kwargs):
        self.start = time.perf_counter()

    def on_step_end(self, args, state, control, **kwargs):
        now = time.perf_counter()
        print(json.dumps({"step": state.global_step, "seconds": now - self.start, "tokens": sum(self.tokens)}), flush=True)
        self.tokens.clear()
        self.start = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("rows")
    for name in ("prompts", "answers", "tokens", "steps", "micro-batch", "threads"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    tokens = []

    def reward(completion_ids, **_):
        tokens.extend(map(len, completion_ids))
        return [sum(token % 2 == 0 for token in ids) / len(ids) for ids in completion_ids]

    answers = args.prompts * args.answers
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output, per_device_train_batch_size=args.micro_batch,
            gradient_accumulation_steps=answers // args.micro_batch, num_generations=args.answers,
            max_completion_length=args.tokens, max_steps=args.steps, beta=0.0, loss_type="dapo", temperature=1.0,
            top_k=0, learning_rate=1e-5, gradient_checkpointing=False, bf16=False, use_cpu=True, report_to=[],
            save_strategy="no", logging_steps=1, disable_tqdm=True, shuffle_dataset=False)
        model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32, attn_implementation="sdpa")
        tokenizer = AutoTokenizer.from_pretrained(args.model, padding_side="left")
        trainer = GRPOTrainer(model=model, reward_funcs=reward, args=config, processing_class=tokenizer,
                              train_dataset=load_dataset("json", data_files=args.rows, split="train"),
                              callbacks=[StepTimer(tokens)])
        trainer.remove_callback(PrinterCallback)
        trainer.train()


if __name__ == "__main__":
    main()
