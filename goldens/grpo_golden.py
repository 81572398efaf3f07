#!/usr/bin/env python3
"""GRPO on given answers: writes goldens/grpo from TRL's GRPOTrainer.

The trainer runs as it is, but a rollout function gives back the answers below instead of sampling, and the reward
function their scores. So chat template, prompt tokens, advantages, old log-probabilities, loss and optimiser are TRL's.
The prompts are those of goldens/online. With `num_iterations` of 2 a batch is trained on twice: the second time its
ratios are not 1, and TRL has old log-probabilities of the weights before the first.

NAME.json holds a run:

  args     TRL's arguments
  rows     of each line of the data: tokens of the prompt and of its answers, and their scores
  steps    TRL's log of each step, with the loss as it was before TRL rounds it
  batches  of each step: its rows, and per row and answer the old log-probabilities, or null where they are the policy's
  adapter  of runs whose answers a server gave: the config of the adapter that trains, and its tensors by name and shape
  served   of the same runs: the server's log-probabilities by row and answer
  final    norm, sum and way of every tensor, as in small/train.json

Made with torch 2.13.0, transformers 5.17.0 and trl 1.16.0; CPU, f32, eager attention:

    OMP_NUM_THREADS=1 python goldens/grpo_golden.py [NAME ...]
"""

import json
import os
import random
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import transformers
import trl
from datasets import load_dataset
from formula import weight
from make_small import text
from peft import LoraConfig, PeftModel, get_peft_model, set_peft_model_state_dict
from safetensors.torch import load_file
from train_golden import FOLDER as SMALL
from train_golden import QUIET, SHARED, finish, model
from transformers import AutoTokenizer
from trl import GRPOConfig, GRPOTrainer

FOLDER = Path(__file__).parent / "grpo"
PROMPTS = Path(__file__).parent / "online" / "prompts_conv.jsonl"
MAX_NEW_TOKENS, GROUP = 16, 3
DEFAULTS = {key: value for key, value in SHARED.items() if key not in ("max_length", "train_sampling_strategy")} | {
    "per_device_train_batch_size": 2 * GROUP, "num_generations": GROUP, "max_steps": 4, "warmup_steps": 0,
    "max_completion_length": MAX_NEW_TOKENS, "learning_rate": 5e-4, "beta": 0.0, "num_iterations": 1,
}
TWICE = {"num_iterations": 2}
RUNS = {
    "dapo": {},
    "grpo_kl": {"loss_type": "grpo", "beta": 0.1},
    "bnpo": {"loss_type": "bnpo", "scale_rewards": "batch", **TWICE},
    "dr_grpo": {"loss_type": "dr_grpo", "scale_rewards": "none", **TWICE},
    "clipped": {"epsilon": 0.01, "epsilon_high": 0.02, "delta": 1.03, "beta": 0.05, **TWICE},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 0.002, "beta": 0.1, **TWICE},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 0.002, **TWICE},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.01, **TWICE},
    "sapo": {"loss_type": "sapo", **TWICE},
    "vespo": {"loss_type": "vespo", "beta": 0.05, "use_bias_correction_kl": False, **TWICE},
    "temperature": {"temperature": 0.7, "beta": 0.1, **TWICE},
    "truncated": {"mask_truncated_completions": True, "loss_type": "grpo", **TWICE},
    "off_policy": {"off_policy_mask_threshold": 0.001, **TWICE},
    "entropy": {"top_entropy_quantile": 0.3, "beta": 0.1, **TWICE},
}
# Answers of a server, which trains an adapter: TRL corrects for its log-probabilities as for vLLM's.
MODE, MOST, LEAST = ("vllm_importance_sampling_" + key for key in ("mode", "clip_max", "clip_min"))
SERVED_RUNS = {
    "served_sequence_mask": {MODE: "sequence_mask", MOST: 1.05, "epsilon": 0.01, **TWICE},
    "served_token_mask": {MODE: "token_mask", MOST: 1.1, LEAST: 0.9, "loss_type": "vespo", **TWICE},
    "served_token_truncate": {MODE: "token_truncate", MOST: 1.05, "loss_type": "cispo", "epsilon_high": 1.01, **TWICE},
    "served_sequence_truncate": {
        MODE: "sequence_truncate", MOST: 1.1, LEAST: 0.95, "loss_type": "grpo", "importance_sampling_level": "sequence",
        "off_policy_mask_threshold": 0.01, **TWICE},
    "served_temperature": {"temperature": 0.7, **TWICE},
    "served_none": {"vllm_importance_sampling_correction": False, **TWICE},
}
# Tokens before EOS of the answers of each row; 16 of them leave no room for EOS.
NUM_TOKENS = [(8, 16, 3), (1, 11, 5), (16, 3, 9), (4, 15, 2), (2, 10, 6), (6, 1, 16), (9, 5, 7), (7, 2, 4), (15, 16, 1),
              (16, 15, 8), (16, 16, 3), (15, 15, 5)]


def given_rows(tokenizer) -> list[dict]:
    """Tokens of each prompt, and the answers and scores that the trainer will be given."""
    rng = random.Random("grpo")
    rows = []
    for i, line in enumerate(PROMPTS.read_text().splitlines()):
        prompt = tokenizer.apply_chat_template(json.loads(line)["prompt"], tokenize=False, add_generation_prompt=True)
        answers = [tokenizer.encode(" " + text(rng, 4, 4), add_special_tokens=False) for _ in range(GROUP)]
        if i % 4 == 3:
            answers[1][:3] = answers[0][:3]  # Answers that begin alike.
        cut = [tokens[:n] + [tokenizer.eos_token_id] * (n < MAX_NEW_TOKENS)
               for tokens, n in zip(answers, NUM_TOKENS[i], strict=True)]
        # One group with equal scores.
        scores = [1.0] * GROUP if i == 3 else [rng.randint(-12, 12) / 8 for _ in range(GROUP)]
        rows.append({"prompt": tokenizer.encode(prompt, add_special_tokens=False), "completions": cut, "scores": scores})
    assert len({tuple(row["prompt"]) for row in rows}) == len(rows), "a prompt says which row it is"
    return rows


class GivenTrainer(GRPOTrainer):
    """TRL's trainer on given answers, which keeps what each step computed."""

    def __init__(self, rows: list[dict], tokenizer, **arguments):
        super().__init__(reward_funcs=self.given, rollout_func=self.rollout, processing_class=tokenizer, **arguments)
        self.rows, self.tokenizer, self.batches = rows, tokenizer, []
        self.by_prompt = {tuple(row["prompt"]): i for i, row in enumerate(rows)}

    def serves(self):
        """Has the trainer treat the answers as vLLM's."""
        self.use_vllm, self._last_loaded_step, self.served = True, -1, {}
        self.vllm_generation = SimpleNamespace(sync_weights=lambda: None)

    @torch.no_grad()
    def log_probs(self, row: int, answer: int) -> list[float]:
        """A server's, which are near the policy's."""
        prompt, tokens = self.rows[row]["prompt"], self.rows[row]["completions"][answer]
        logits = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1:-1] / self.temperature
        own = logits.log_softmax(-1).gather(1, torch.tensor(tokens).unsqueeze(1)).squeeze(1).tolist()
        rng = random.Random(f"served {row} {answer}")
        return [min(0.0, number + rng.gauss(0.0, 0.02)) for number in own]

    def rollout(self, prompts, _trainer):
        ids = [self.tokenizer.encode(
            self.tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True),
            add_special_tokens=False) for prompt in prompts]
        found = [self.by_prompt[tuple(prompt)] for prompt in ids]
        assert all(found[i] == found[i // GROUP * GROUP] for i in range(len(found))), "groups are neighbours"
        answers = [self.rows[row]["completions"][i % GROUP] for i, row in enumerate(found)]
        self.scores = [self.rows[row]["scores"][i % GROUP] for i, row in enumerate(found)]
        served = None
        if self.use_vllm:
            served = [self.log_probs(row, i % GROUP) for i, row in enumerate(found)]
            self.served |= {row: served[i:i + GROUP] for i, row in enumerate(found) if i % GROUP == 0}
        return {"prompt_ids": ids, "completion_ids": answers, "logprobs": served}

    def given(self, completion_ids, **_) -> list[float]:
        return self.scores

    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        self.exact_loss = loss.item()
        # TRL shuffles the answers of a batch.
        rows, old = [], {}
        for i in range(len(inputs["prompt_ids"])):
            prompt = inputs["prompt_ids"][i][inputs["prompt_mask"][i].bool()].tolist()
            row = self.by_prompt[tuple(prompt)]
            length = max(len(answer) for answer in self.rows[row]["completions"])
            tokens = inputs["completion_ids"][i].tolist()
            answer = next(n for n, answer in enumerate(self.rows[row]["completions"])
                          if tokens[:len(answer)] == answer and (row, n) not in old)
            if row not in rows:
                rows.append(row)
            log_probs = inputs.get("old_per_token_logps")
            length = len(self.rows[row]["completions"][answer])
            old[row, answer] = None if log_probs is None else log_probs[i][:length].tolist()
        self.batches.append({"rows": rows, "old": [[old[row, n] for n in range(GROUP)] for row in rows]})
        return loss

    def log(self, logs, start_time=None):
        if "loss" in logs:
            assert abs(logs["loss"] - self.exact_loss) < 1e-4
            logs["loss"] = self.exact_loss
        super().log(logs, start_time)


def adapter(policy, folder: str):
    """The policy with an adapter of the formula's weights, and what another program makes it from."""
    options = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
    trained = get_peft_model(policy, LoraConfig(task_type="CAUSAL_LM", **options))
    trained.save_pretrained(folder)
    shapes = {key: tuple(tensor.shape) for key, tensor in load_file(f"{folder}/adapter_model.safetensors").items()}
    set_peft_model_state_dict(trained, {key: torch.from_numpy(weight(key, shape)) for key, shape in shapes.items()})
    trained.save_pretrained(folder)
    return PeftModel.from_pretrained(trained.unload(), folder, is_trainable=True), {
        "config": json.loads(Path(folder, "adapter_config.json").read_text()),
        "tensors": [[key, list(shape)] for key, shape in sorted(shapes.items())]}


def run(name: str, changes: dict) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(SMALL / "model")
    rows, arguments = given_rows(tokenizer), DEFAULTS | changes
    quiet = {key: value for key, value in QUIET.items() if key != "activation_checkpointing"}
    with tempfile.TemporaryDirectory() as folder:
        # The reference is read from the policy's folder.
        start = f"{folder}/start"
        model().save_pretrained(start)
        policy = transformers.AutoModelForCausalLM.from_pretrained(start, attn_implementation="eager", dtype="float32")
        facts = {}
        if name in SERVED_RUNS:
            policy, facts["adapter"] = adapter(policy, f"{folder}/adapter")
        trainer = GivenTrainer(
            rows, tokenizer, model=policy,
            train_dataset=load_dataset("json", data_files=str(PROMPTS), split="train").select_columns(["prompt"]),
            args=GRPOConfig(output_dir=f"{folder}/run", gradient_checkpointing=False, shuffle_dataset=False,
                            **(quiet | arguments)))
        if name in SERVED_RUNS:
            trainer.serves()
        result = finish(trainer, policy, arguments)
    result |= {"rows": rows, "batches": trainer.batches} | facts
    if name in SERVED_RUNS:
        del result["final"]
        result["served"] = [trainer.served.get(row) for row in range(len(rows))]
    print(name, [step["loss"] for step in result["steps"]], [step["grad_norm"] for step in result["steps"]])
    return result


def write(name: str, result: dict) -> None:
    """A line per row and per step, so that a difference between two versions can be read."""
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items() if not isinstance(value, list)]
    for key in ("rows", "steps", "batches", *(["served"] if "served" in result else [])):
        parts.append(f"{json.dumps(key)}: [\n" + ",\n".join(map(json.dumps, result[key])) + "\n]")
    (FOLDER / f"{name}.json").write_text("{" + ",\n".join(parts) + "}\n")


def main() -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    for name, changes in (RUNS | SERVED_RUNS).items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        write(name, {"versions": versions} | run(name, changes))


if __name__ == "__main__":
    main()
