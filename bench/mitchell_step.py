#!/usr/bin/env python3
"""Times a step of Mitchell's trainer on a task made by make_task.py: one process, one configuration.

    git clone https://github.com/eric-mitchell/direct-preference-optimization
    python mitchell_step.py direct-preference-optimization FOLDER --shape SHAPE --recipe full|sft --dtype f32|bf16
        --steps N --pairs N

Prints one JSON object a line: {"step", "loss", "seconds", "cpu_seconds"}. Its `BasicTrainer` runs as it is in its folder,
in today's torch. From outside: libraries that only other trainers and its logging need are empty modules; its pairs are
the task's, in their order; batches go to the processor; Adam with the other programs' schedule instead of its own, so that
losses can be compared. Its loss of SFT is the sum over an answer's tokens, not the mean over all.
"""

import argparse
import json
import sys
import time
import types
from collections import OrderedDict
from pathlib import Path

import datasets  # noqa: F401  before its modules do, see import_trainers
import torch
from transformers import AutoModelForCausalLM

WARMUP = 2  # steps of the learning rate


def import_trainers(folder: Path):
    missing = {}
    for name, attributes in (("tensor_parallel", {}), ("wandb", {}), ("omegaconf", {"DictConfig": dict}),
                             ("bs4", {"BeautifulSoup": None, "NavigableString": None})):
        module = types.ModuleType(name)
        vars(module).update(attributes)
        missing[name] = module
    # Only while its files are imported: other libraries look for some of these and would take them for the real ones.
    sys.path.insert(0, str(folder.resolve()))
    sys.modules |= missing
    import preference_datasets
    import trainers

    for name in missing:
        del sys.modules[name]
    return trainers, preference_datasets


def settings(args) -> types.SimpleNamespace:
    """The keys of its configuration file that the trainer reads."""
    return types.SimpleNamespace(
        model=types.SimpleNamespace(name_or_path=str(args.folder / "model"), tokenizer_name_or_path=None),
        loss=types.SimpleNamespace(name="sft" if args.recipe == "sft" else "dpo", beta=0.1, label_smoothing=0,
                                   reference_free=False),
        datasets=["task"], local_dirs=[str(args.folder)], max_length=1024, max_prompt_length=1000, n_epochs=1,
        n_examples=args.steps * args.pairs, batch_size=args.pairs, n_eval_examples=args.pairs,
        eval_batch_size=args.pairs, optimizer="Adam", lr=1e-4, warmup_steps=0, eval_every=1 << 30,
        do_first_eval=False, sample_during_eval=False, gradient_accumulation_steps=1, max_grad_norm=1.0,
        minimum_log_interval_secs=0.0, wandb=types.SimpleNamespace(enabled=False), debug=True, trainer="BasicTrainer",
    )


def task_data(args) -> dict:
    """The pairs in the form of its datasets: by prompt."""
    data = OrderedDict()
    with (args.folder / f"{args.shape}.jsonl").open() as file:
        for line in file:
            row = json.loads(line)
            if row["prompt"] in data:
                raise SystemExit("two pairs have the same prompt, which would change their order")
            data[row["prompt"]] = {"responses": [row["chosen"], row["rejected"]], "pairs": [(0, 1)],
                                   "sft_target": row["chosen"]}
    return data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("mitchell", type=Path, help="the folder of its repository")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="mixed")
    parser.add_argument("--recipe", choices=["full", "sft"], default="full")
    parser.add_argument("--dtype", choices=["f32", "bf16"], default="f32")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--pairs", type=int, required=True, help="pairs, or rows of SFT, per step")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    out, sys.stdout = sys.stdout, sys.stderr  # where it prints
    trainers, preference_datasets = import_trainers(args.mitchell)
    preference_datasets.get_dataset = lambda *_, **__: task_data(args)
    batches, move = trainers.get_batch_iterator, trainers.slice_and_move_batch_for_device
    trainers.get_batch_iterator = lambda **options: batches(**options | {"shuffle": False})
    trainers.slice_and_move_batch_for_device = lambda batch, rank, size, _: move(batch, rank, size, "cpu")
    scheduler = torch.optim.lr_scheduler.LambdaLR

    def schedule(step: int) -> float:
        return step / WARMUP if step < WARMUP else (args.steps - step) / max(args.steps - WARMUP, 1)

    torch.optim.lr_scheduler.LambdaLR = lambda optimizer, lr_lambda: scheduler(optimizer, lr_lambda=schedule)

    class Timed(trainers.BasicTrainer):
        def get_batch_metrics(self, *arguments, **options):
            loss, metrics = super().get_batch_metrics(*arguments, **options)
            self.loss = loss.item()
            return loss, metrics

        def train(self):
            self.train_iterator = self.timed(self.train_iterator)
            super().train()

        def timed(self, iterator):
            """The trainer asks for the next batch when it has done all with the one before."""
            start, cpu_start = time.perf_counter(), time.process_time()
            for step, batch in enumerate(iterator, 1):
                yield batch
                now, cpu = time.perf_counter(), time.process_time()
                print(json.dumps({"step": step, "loss": self.loss, "seconds": now - start,
                                  "cpu_seconds": cpu - cpu_start}), file=out, flush=True)
                start, cpu_start = now, cpu

    dtype = torch.float32 if args.dtype == "f32" else torch.bfloat16

    def load():
        return AutoModelForCausalLM.from_pretrained(args.folder / "model", dtype=dtype)

    config = settings(args)
    trainer = Timed(load(), config, 42, str(args.folder), reference_model=None if args.recipe == "sft" else load())
    trainer.train()


if __name__ == "__main__":
    main()
