#!/usr/bin/env python3
"""Runs TRL's GKDTrainer on given completions with the small model, and writes goldens/small/distill.json.

The teacher has another width, depth and number of heads, or is the perturbed small model. Rows are tokenised and padded
by SFTTrainer, as Tandem's `method = "sft"` is compared with it. GKDTrainer samples at its temperature and does not give
it to its loss, so runs at a temperature bind it there. Each run stores the log of every step, the norms of the final
weights, and `overrides`: what a configuration of Tandem says instead.

Made with torch 2.15.0, transformers 5.24.0 and trl 1.16.0:  OMP_NUM_THREADS=1 python goldens/distill_golden.py
"""

import functools
import json
import os
import tempfile

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import transformers
import trl
from formula import fill
from train_golden import FOLDER, QUIET, SHARED, finish, model, rows
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
from trl import SFTConfig, SFTTrainer
from trl.experimental.gkd import GKDConfig, GKDTrainer

TEACHER = {"hidden_size": 96, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 3,
           "intermediate_size": 160}

# (name, teacher, beta, temperature, changes)
RUNS = [
    ("forward_kl", "teacher", 0.0, 1.0, {}),
    ("jsd_0.1", "teacher", 0.1, 1.0, {}),
    ("jsd_0.5", "teacher", 0.5, 1.0, {}),
    ("jsd_0.5_2x4", "teacher", 0.5, 1.0, {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4}),
    ("reverse_kl", "teacher", 1.0, 1.0, {}),
    ("forward_kl_cool", "teacher", 0.0, 0.9, {}),
    ("jsd_0.5_hot", "teacher", 0.5, 2.0, {}),
    ("reverse_kl_hot", "teacher", 1.0, 2.0, {}),
    ("jsd_0.9_same_size", "other", 0.9, 1.0, {}),
]


class Measured(GKDTrainer):
    """Also logs means over tokens of both divergences, both entropies and the accuracy."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, True, num_items_in_batch)
        with torch.no_grad():
            teacher = self.teacher_model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
            labels = inputs["labels"][:, 1:]
            student, teacher = (made.logits[:, :-1].detach() for made in (outputs, teacher))
            kept = labels != -100
            of_temperature = self.generalized_jsd_loss
            hot = of_temperature.keywords["temperature"]

            def entropy(logits):
                log_p = (logits[kept] / hot).log_softmax(-1)
                return -(log_p.exp() * log_p).sum(-1).mean().item()

            found = {
                "distill/forward_kl": of_temperature(student, teacher, labels=labels, beta=0).item(),
                "distill/reverse_kl": of_temperature(student, teacher, labels=labels, beta=1).item(),
                "distill/teacher_entropy": entropy(teacher),
                "entropy": entropy(student),
                "mean_token_accuracy": (student.argmax(-1) == labels)[kept].float().mean().item(),
            }
        for name, value in found.items():
            self._metrics["train"][name].append(value)
        return (loss, outputs) if return_outputs else loss


def teacher_model(kind: str):
    if kind == "other":
        return model(reference=True)
    config = AutoConfig.from_pretrained(FOLDER / "model", **TEACHER)
    made = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    fill(made, False)
    return made


def run(teacher: str, beta: float, temperature: float, changes: dict) -> dict:
    changes = {"max_steps": 4} | changes
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    with tempfile.TemporaryDirectory() as output:
        arguments = QUIET | SHARED | changes
        tokenised = SFTTrainer(model=model(), train_dataset=rows("sft_completion"), processing_class=tokenizer,
                               args=SFTConfig(output_dir=output, packing=False, **arguments))
        policy = model()
        trainer = Measured(
            model=policy, teacher_model=teacher_model(teacher), processing_class=tokenizer,
            train_dataset=tokenised.train_dataset, data_collator=tokenised.data_collator,
            args=GKDConfig(output_dir=output, lmbda=0.0, beta=beta, temperature=temperature, **arguments))
        trainer.generalized_jsd_loss = functools.partial(GKDTrainer.generalized_jsd_loss, temperature=temperature)
        overrides = [f"distill.beta={beta}", f"distill.temperature={temperature}"]
        return finish(trainer, policy, changes, method="distill", data="sft_completion", reference=teacher,
                      overrides=overrides)


def main() -> None:
    torch.set_num_threads(1)
    shapes = {name: list(parameter.shape) for name, parameter in teacher_model("teacher").named_parameters()}
    result = {
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__},
        "defaults": SHARED,
        "teacher": {"config": TEACHER, "tensors": shapes},
    }
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(run(*rest))}" for name, *rest in RUNS)
    (FOLDER / "distill.json").write_text(json.dumps(result)[:-1] + ', "runs": {\n' + lines + "\n}}\n")


if __name__ == "__main__":
    main()
