#!/usr/bin/env python3
"""Runs TRL on the small model and data, and writes what it computed to goldens/small/train.json.

Versions used: torch 2.15.0, transformers 5.23.0, trl 1.16.0; CPU, f32 unless the run says otherwise, eager attention.
Each run stores the arguments that differ from the defaults below, the log of every step, and per tensor the norm of
the final weights and of their distance from the initial ones.
"""

import json
import tempfile
from pathlib import Path

import torch
import transformers
import trl
from datasets import load_dataset
from formula import fill
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

FOLDER = Path(__file__).parent / "small"
SHARED = {
    "per_device_train_batch_size": 8, "gradient_accumulation_steps": 1, "max_steps": 20, "learning_rate": 1e-3,
    "lr_scheduler_type": "linear", "warmup_steps": 4, "optim": "adamw_torch", "weight_decay": 0.0,
    "max_grad_norm": 1.0, "train_sampling_strategy": "sequential", "seed": 42, "max_length": 1024,
}
DPO = SHARED | {"beta": 0.1}
QUIET = {
    "logging_steps": 1, "logging_first_step": True, "save_strategy": "no", "report_to": [], "disable_tqdm": True,
    "use_cpu": True, "activation_checkpointing": False, "bf16": False,
}
TIMING = ("train_runtime", "eval_runtime", "samples_per_second", "steps_per_second", "total_flos", "train_loss")

# (name, data, reference, changes); reference "same" starts from the policy's weights, "other" from perturbed ones.
DPO_RUNS = [
    ("full_8x1", "pref_conv", "same", {}),
    ("full_4x2", "pref_conv", "same", {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 2}),
    ("full_2x4", "pref_conv", "same", {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
    ("plain", "pref_plain", "same", {"max_steps": 8}),
    ("other_reference", "pref_conv", "other", {"max_steps": 8}),
    ("precompute", "pref_conv", "other", {"max_steps": 8, "precompute_ref_log_probs": True}),
    ("ipo", "pref_conv", "same", {"max_steps": 8, "loss_type": ["ipo"]}),
    ("hinge", "pref_conv", "same", {"max_steps": 8, "loss_type": ["hinge"]}),
    ("robust", "pref_conv", "other", {"max_steps": 8, "loss_type": ["robust"], "label_smoothing": 0.1}),
    ("rmsprop", "pref_conv", "same", {"max_steps": 8, "optim": "rmsprop", "learning_rate": 1e-4}),
    ("weight_decay", "pref_conv", "same", {"max_steps": 8, "weight_decay": 0.1}),
    ("cosine", "pref_conv", "same", {"max_steps": 8, "lr_scheduler_type": "cosine"}),
    ("constant", "pref_conv", "same", {"max_steps": 8, "lr_scheduler_type": "constant_with_warmup"}),
    ("truncated", "pref_conv", "same", {"max_steps": 8, "max_length": 48}),
    ("shuffled", "pref_conv", "same", {"max_steps": 12, "train_sampling_strategy": "random"}),
    ("autocast", "pref_conv", "same", {"max_steps": 20, "bf16": True}),
]
SFT_RUNS = [
    ("sft_completion", "sft_completion", {"max_steps": 8}),
    ("sft_completion_2x4", "sft_completion",
     {"max_steps": 8, "per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
    ("sft_messages", "sft_messages", {"max_steps": 8}),
]
# The committed template, with the marks that tell TRL which tokens an assistant wrote: all after its header.
MARKED_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|{{ m['role'] }}|>\n{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}<|end|>\n{% endgeneration %}{% else %}{{ m['content'] }}<|end|>\n{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def model(reference: bool = False):
    config = AutoConfig.from_pretrained(FOLDER / "model")
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    fill(made, reference)
    return made


def rows(name: str):
    return load_dataset("json", data_files=str(FOLDER / f"{name}.jsonl"), split="train")


def norms(module, initial: dict) -> dict:
    result = {}
    for name, parameter in module.named_parameters():
        final = parameter.detach().double()
        result[name] = {"shape": list(final.shape), "norm": final.norm().item(), "sum": final.sum().item(),
                        "step": (final - initial[name]).norm().item()}
    return result


def snapshot(module) -> dict:
    return {name: parameter.detach().double().clone() for name, parameter in module.named_parameters()}


def numbers(log: dict) -> dict:
    return {key: value for key, value in log.items() if not any(mark in key for mark in TIMING)}


def finish(trainer, policy, changes: dict, **facts) -> dict:
    initial = snapshot(policy)
    trainer.train()
    steps = [numbers(log) for log in trainer.state.log_history if "loss" in log]
    return {**facts, "args": changes, "steps": steps, "final": norms(policy, initial)}


def dpo_run(name: str, data: str, reference: str, changes: dict) -> dict:
    with tempfile.TemporaryDirectory() as output:
        policy = model()
        trainer = DPOTrainer(
            model=policy, ref_model=model(reference == "other"), train_dataset=rows(data),
            args=DPOConfig(output_dir=output, **(QUIET | DPO | changes)),
            processing_class=AutoTokenizer.from_pretrained(FOLDER / "model"))
        return finish(trainer, policy, changes, method="dpo", data=data, reference=reference)


def sft_run(name: str, data: str, changes: dict) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    if data == "sft_messages":
        tokenizer.chat_template = MARKED_TEMPLATE
    with tempfile.TemporaryDirectory() as output:
        policy = model()
        trainer = SFTTrainer(
            model=policy, train_dataset=rows(data), processing_class=tokenizer,
            args=SFTConfig(output_dir=output, assistant_only_loss=data == "sft_messages", packing=False,
                           **(QUIET | SHARED | changes)))
        first = trainer.data_collator([trainer.train_dataset[i] for i in range(2)])
        run = finish(trainer, policy, changes, method="sft", data=data, reference="none")
        tokens = [[t for t, m in zip(*row, strict=True) if m] for row in
                  zip(first["input_ids"].tolist(), first["attention_mask"].tolist(), strict=True)]
        scored = [[int(t != -100) for t, m in zip(*row, strict=True) if m] for row in
                  zip(first["labels"].tolist(), first["attention_mask"].tolist(), strict=True)]
        return run | {"first_rows": {"tokens": tokens, "scored": scored}}


def evaluation() -> dict:
    """Thirteen rows, one at a time: the mean over rows, which no batch size may change."""
    with tempfile.TemporaryDirectory() as output:
        trainer = DPOTrainer(
            model=model(), ref_model=model(reference=True), train_dataset=rows("pref_conv"),
            eval_dataset=rows("pref_conv").select(range(13)),
            args=DPOConfig(output_dir=output, per_device_eval_batch_size=1, **(QUIET | DPO)),
            processing_class=AutoTokenizer.from_pretrained(FOLDER / "model"))
        return {"data": "pref_conv", "rows": 13, "reference": "other", "metrics": numbers(trainer.evaluate())}


def main() -> None:
    torch.set_num_threads(1)
    result = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
        "defaults": DPO,
        "runs": {name: dpo_run(name, *rest) for name, *rest in DPO_RUNS}
        | {name: sft_run(name, *rest) for name, *rest in SFT_RUNS},
        "evaluation": evaluation(),
    }
    # A line per run, so that a difference between two versions can be read.
    runs = ",\n".join(f"{json.dumps(name)}: {json.dumps(run)}" for name, run in result.pop("runs").items())
    (FOLDER / "train.json").write_text(json.dumps(result)[:-1] + ', "runs": {\n' + runs + "\n}}\n")


if __name__ == "__main__":
    main()
