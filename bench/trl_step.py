#!/usr/bin/env python3
"""Times a step of TRL on a task made by make_task.py: one process, one configuration.

    python trl_step.py FOLDER --shape SHAPE --recipe full|full-precompute|lora|…|sft --dtype f32|autocast|bf16
        --attention sdpa|… --steps N --pairs N [--device cuda --batch N --recompute block --liger --batching padding-free|packing]

Prints one JSON object a line: {"step", "loss", "grad_norm", "seconds", "cpu_seconds", "real_tokens", "all_tokens"}, and on a
GPU in the end {"note": …} with what PyTorch's allocator took.
A step is timed from the end of the one before to its own end, so that the batch, the optimiser and the log are in it;
the reference pass of a precomputed reference happens before the first step and is not. SFT trains on the chosen answers,
with the loss on these alone. Packed rows make other steps of about as many tokens.
"""

import argparse
import json
import os
import tempfile
import time
from pathlib import Path

import torch
from datasets import load_dataset
from random_model import random_model
from suite.gpu.setups import BATCHINGS
from suite.setups import RECIPES
from transformers import AutoModelForCausalLM, AutoTokenizer, BitsAndBytesConfig, PrinterCallback, TrainerCallback
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer
from trl_attention import WORDS, allowed_kernels


class StepTimer(TrainerCallback):
    """Keeps wall and processor seconds of each step; the trainer's log arrives after the step has ended."""

    def __init__(self, batches: list, batches_a_step: int = 1) -> None:
        self.batches, self.batches_a_step = batches, batches_a_step
        self.start = self.cpu_start = 0.0
        self.spent = []

    def on_train_begin(self, args, state, control, **kwargs):
        self.start, self.cpu_start = time.perf_counter(), time.process_time()

    def on_step_end(self, args, state, control, **kwargs):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now, cpu = time.perf_counter(), time.process_time()
        self.spent.append((now - self.start, cpu - self.cpu_start))
        self.start, self.cpu_start = now, cpu

    def tokens_of(self, step: int) -> tuple:
        """Of the batches of a step; the loader is a batch ahead."""
        return tuple(map(sum, zip(*self.batches[step * self.batches_a_step:(step + 1) * self.batches_a_step])))

    def on_log(self, args, state, control, logs=None, **kwargs):
        if logs and "loss" in logs:
            step = len(self.spent)
            seconds, cpu = self.spent[-1]
            real, total = self.tokens_of(step - 1)
            print(json.dumps({"step": step, "loss": logs["loss"], "grad_norm": logs["grad_norm"], "seconds": seconds,
                              "cpu_seconds": cpu, "real_tokens": real, "all_tokens": total}), flush=True)


def quantization(args):
    """NF4 with double quantisation, dequantised to the type of the products."""
    if args.adapter != "qlora":
        return None
    compute = torch.float32 if args.dtype == "f32" else torch.bfloat16
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                              bnb_4bit_compute_dtype=compute)


def adapter_config(args):
    """What the task's adapter is. The trainer makes the adapter of it, so that its reference is the base; an adapter that
    was there before would be its own reference, a copy of it."""
    if args.adapter == "full":
        return None
    from peft import LoraConfig, PeftConfig

    if not (args.folder / "adapter").exists():
        return LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    config = PeftConfig.from_pretrained(args.folder / "adapter")
    config.inference_mode = False
    return config


def start_adapter(model, folder: Path) -> None:
    """Gives the trainer's adapter the numbers that Tandem's starts from."""
    from peft import load_peft_weights, set_peft_model_state_dict

    result = set_peft_model_state_dict(model, load_peft_weights(folder, device="cpu"))
    if result.unexpected_keys:
        raise SystemExit(f"the adapter has {result.unexpected_keys}, which the model does not")


def make_trainer(args):
    model, tokenizer = args.folder / "model", AutoTokenizer.from_pretrained(args.folder / "model")
    dtype, attention = torch.bfloat16 if args.dtype == "bf16" else torch.float32, WORDS[args.attention]

    def load():
        if not any(model.glob("*.safetensors")):
            return random_model(model, dtype, attention, args.device, is_nf4=args.adapter == "qlora")
        place = {"device_map": {"": 0}} if args.device == "cuda" else {}
        return AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation=attention,
                                                    quantization_config=quantization(args), **place)

    file = f"{args.shape}-sft.jsonl" if args.recipe == "sft" else f"{args.shape}.jsonl"
    rows = load_dataset("json", data_files=str(args.folder / file), split="train",
                        cache_dir=os.environ.get("BENCH_CACHE"))
    rows = rows.select(range(args.steps * args.pairs))
    batch = args.batch
    if args.batching == "packing":
        facts = json.loads((args.folder / f"{args.shape}.json").read_text())
        share = (facts["prompt_tokens"] + facts["answer_tokens"]) / args.max_length
        batch = max(1, round(batch * share))
    common = {
        "output_dir": tempfile.mkdtemp(prefix="trl-bench-"), "per_device_train_batch_size": batch,
        "gradient_accumulation_steps": args.pairs // args.batch,
        "max_steps": args.steps, "learning_rate": 1e-4, "lr_scheduler_type": "linear", "warmup_steps": 2,
        "optim": "adamw_torch_fused" if args.device == "cuda" else "adamw_torch",
        "weight_decay": 0.0, "max_grad_norm": 1.0, "max_length": args.max_length,
        "train_sampling_strategy": "sequential", "logging_steps": 1, "save_strategy": "no", "report_to": [],
        "disable_tqdm": True, "use_cpu": args.device == "cpu", "seed": 42,
        # On a GPU autocast also where weights are bf16: adapters are f32 and would be multiplied so.
        "bf16": args.dtype == "autocast" or (args.dtype, args.device) == ("bf16", "cuda"),
        "tf32": True if args.device == "cuda" else None,
        "gradient_checkpointing": args.recompute == "block", "use_liger_kernel": args.liger,
    }
    if args.recipe == "sft":
        # TRL cuts no rows that it does not pad, and wants that said; these are short enough.
        common["max_length"] = None if args.batching == "padding-free" else args.max_length
        config = SFTConfig(**common, completion_only_loss=True, packing=args.batching == "packing",
                           padding_free=args.batching == "padding-free")
        return SFTTrainer(model=load(), args=config, train_dataset=rows, processing_class=tokenizer)
    if args.batching != "padded":
        raise ValueError(f"{args.batching}: TRL 1.16 switches padding_free off in DPO, and packs no pairs")
    config = DPOConfig(**common, beta=0.1, precompute_ref_log_probs=args.reference == "precompute",
                       precompute_ref_batch_size=args.batch)
    return DPOTrainer(
        model=load(), ref_model=load() if args.reference == "model" else None, args=config, train_dataset=rows,
        processing_class=tokenizer, peft_config=adapter_config(args),
    )


def train(args) -> list:
    """Wall and processor seconds of each step, and its tokens that are not padding."""
    args.adapter, args.reference = RECIPES[args.recipe]
    trainer = make_trainer(args)
    if args.adapter != "full" and (args.folder / "adapter").exists():
        start_adapter(trainer.model, args.folder / "adapter")
    batches = []
    collate = trainer.data_collator

    def counted(examples):
        batch = collate(examples)
        total = batch["input_ids"].numel()
        batches.append((int(batch["attention_mask"].sum()) if "attention_mask" in batch else total, total))
        return batch

    trainer.data_collator = counted
    trainer.remove_callback(PrinterCallback)
    timer = StepTimer(batches, args.pairs // args.batch)
    trainer.add_callback(timer)
    with allowed_kernels(args.attention):
        trainer.train()
    if args.device == "cuda":
        print(json.dumps({"note": {"reserved_bytes": torch.cuda.max_memory_reserved(),
                                   "allocated_bytes": torch.cuda.max_memory_allocated()}}), flush=True)
    return [(*spent, timer.tokens_of(step)[0]) for step, spent in enumerate(timer.spent)]


def parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="mixed")
    parser.add_argument("--recipe", choices=RECIPES, default="full")
    parser.add_argument("--dtype", choices=["f32", "autocast", "bf16"], default="f32")
    parser.add_argument("--attention", choices=WORDS, default="sdpa")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, required=True, help="pairs, or rows of SFT, per step")
    parser.add_argument("--batch", type=int, help="of these, how many at a time; all unless given")
    parser.add_argument("--max-length", type=int, default=1024)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--recompute", choices=["none", "block"], default="none", help="block: gradient checkpointing")
    parser.add_argument("--liger", action="store_true", help="Liger's kernels for norms, RoPE and SwiGLU, if they are installed")
    parser.add_argument("--batching", choices=BATCHINGS, default="padded", help="of SFT: rows without padding, or packed to --max-length")
    return parser


def main() -> None:
    args = parser(__doc__).parse_args()
    args.batch = args.batch or args.pairs
    torch.set_num_threads(args.threads)
    train(args)


if __name__ == "__main__":
    main()
