#!/usr/bin/env python3
"""Times steps of torchtune's LoRA DPO recipe for one device on a task of `bench/gpu`: its own loop, over a random model and the task's pairs.

    python torchtune_step.py FOLDER --shape SHAPE --recipe lora --pairs N --batch N [--recompute block] --device cuda

Prints what trl_step.py prints. What the recipe has no choice in: padded batches, attention that is causal and needs no mask, whole logits,
no clipping of gradients. Adapters are of rank 16 on every linear layer but the head; weights are bf16, as are adapters.
"""

import argparse
import importlib.util
import json
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import torch
import torchtune
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler
from torchtune import training
from torchtune.data import CROSS_ENTROPY_IGNORE_IDX, padded_collate_dpo
from torchtune.models.llama3 import lora_llama3
from torchtune.modules import TransformerSelfAttentionLayer
from torchtune.modules.peft import get_adapter_params, set_trainable_params
from torchtune.rlhf.loss import DPOLoss
from trl_step import parser


def recipe_class():
    """The recipe of the wheel, which is a program and no module."""
    file = Path(torchtune.__file__).parent.parent / "recipes/lora_dpo_single_device.py"
    spec = importlib.util.spec_from_file_location("lora_dpo_single_device", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.LoRADPORecipeSingleDevice


class StepTimer:
    """Takes the recipe's log, which it writes when a step has ended."""

    def __init__(self, tokens: list) -> None:
        self.tokens, self.start, self.cpu_start = tokens, time.perf_counter(), time.process_time()

    def log_dict(self, values: dict, step: int) -> None:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now, cpu = time.perf_counter(), time.process_time()
        print(json.dumps({"step": step, "loss": values["loss"], "seconds": now - self.start, "cpu_seconds": cpu - self.cpu_start,
                          "real_tokens": self.tokens[step - 1]}), flush=True)
        self.start, self.cpu_start = now, cpu


def model_of(args):
    """With random weights, as `from_config` draws them."""
    config = json.loads((args.folder / "model/config.json").read_text())
    device = torch.device(args.device)
    with training.set_default_dtype(torch.bfloat16), device:
        model = lora_llama3(
            ["q_proj", "k_proj", "v_proj", "output_proj"], apply_lora_to_mlp=True, vocab_size=config["vocab_size"],
            num_layers=config["num_hidden_layers"], num_heads=config["num_attention_heads"], num_kv_heads=config["num_key_value_heads"],
            embed_dim=config["hidden_size"], max_seq_len=args.max_length, intermediate_dim=config["intermediate_size"],
            norm_eps=config.get("rms_norm_eps", 1e-6), rope_base=500_000, lora_rank=16, lora_alpha=32)
        torch.manual_seed(0)
        with torch.no_grad():
            for name, weight in model.named_parameters():
                if weight.dim() > 1 and "lora" not in name:
                    weight.normal_(0.0, 0.02)
    set_trainable_params(model, get_adapter_params(model))
    if args.recompute == "block":
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    return model


def rows_of(args) -> list:
    """Pairs in tokens, as the task's tokenizer makes them: one a word, and the end."""
    vocabulary = json.loads((args.folder / "model/tokenizer.json").read_text())["model"]["vocab"]
    end = vocabulary["</s>"]

    def ids(text: str) -> list:
        return [vocabulary[word] for word in text.split()]

    rows = []
    lines = (args.folder / f"{args.shape}.jsonl").read_text().splitlines()[:args.steps * args.pairs]
    for pair in map(json.loads, lines):
        prompt, row = ids(pair["prompt"]), {}
        for kind in ("chosen", "rejected"):
            answer = ids(pair[kind]) + [end]
            whole = (prompt + answer)[:args.max_length]
            labels = ([CROSS_ENTROPY_IGNORE_IDX] * len(prompt) + answer)[:args.max_length]
            row |= {f"{kind}_input_ids": whole, f"{kind}_labels": labels}
        rows.append(row)
    return rows


def timed(args):
    base = recipe_class()

    class Timed(base):
        """The recipe with what its set-up would have read from files."""

        def __init__(self) -> None:
            rows = rows_of(args)
            self._device, self._model, self._loss_fn = torch.device(args.device), model_of(args), DPOLoss(beta=0.1)
            trained = [weight for weight in self._model.parameters() if weight.requires_grad]
            self._optimizer = torch.optim.AdamW(trained, lr=1e-4, weight_decay=0.0, fused=args.device == "cuda")
            self._lr_scheduler, self._model_compile, self._log_peak_memory_stats = None, False, False
            self._gradient_accumulation_steps, self._log_every_n_steps = args.pairs // args.batch, 1
            self.epochs_run, self.total_epochs, self.global_step = 0, 1, 0
            self._steps_per_epoch = self.max_steps_per_epoch = args.steps
            self._sampler = DistributedSampler(rows, num_replicas=1, rank=0, shuffle=False)
            self._dataloader = DataLoader(rows, sampler=self._sampler, batch_size=args.batch, collate_fn=padded_collate_dpo)
            self.activations_handling_ctx = nullcontext()
            lengths = [len(row["chosen_input_ids"]) + len(row["rejected_input_ids"]) for row in rows]
            self._metric_logger = StepTimer([sum(lengths[i:i + args.pairs]) for i in range(0, len(rows), args.pairs)])

        def save_checkpoint(self, epoch: int) -> None:
            pass

    return Timed()


def main() -> None:
    options: argparse.ArgumentParser = parser(__doc__)
    args = options.parse_args()
    if args.recipe != "lora" or args.dtype != "bf16":
        sys.exit(f"{args.recipe} in {args.dtype}: only lora in bf16 here")
    args.batch = args.batch or args.pairs
    torch.set_num_threads(args.threads)
    timed(args).train()
    if args.device == "cuda":
        print(json.dumps({"note": {"reserved_bytes": torch.cuda.max_memory_reserved(),
                                   "allocated_bytes": torch.cuda.max_memory_allocated()}}), flush=True)


if __name__ == "__main__":
    main()
