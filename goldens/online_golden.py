#!/usr/bin/env python3
"""Online DPO on given answers: writes goldens/online from TRL's OnlineDPOTrainer (trl.experimental.online_dpo).

The trainer runs as it is, but the policy's `generate` gives back the answers below instead of sampling, and the reward
function their scores. So chat template, prompt tokens, cut at EOS, log-probs, pairs, loss and optimiser are TRL's. No
answer's score equals the other's: TRL takes the first of equals as chosen, Tandem leaves such a pair out. Every step is
one micro-batch: TRL 1.16 does not divide the gradient by their number, so with two of two pairs its norm is twice that of
one of four.

prompts_conv.jsonl and prompts_plain.jsonl hold the prompts, NAME.json a run over them:

  args     TRL's arguments
  rows     of each line of the data: tokens of prompt and both answers, and scores before any penalty
  steps    TRL's log of each step, with the loss as it was before TRL rounds it
  masked   what TRL logs of each step over padding, too, here over the answers' tokens alone
  batches  of each step: its rows, which answer was chosen, and per row the sums of both answers' log-probs
  final    norm, sum and way of every tensor, as in small/train.json

Made with torch 2.11.0, transformers 5.17.0 and trl 1.16.0; CPU, f32, eager attention:

    OMP_NUM_THREADS=1 python goldens/online_golden.py
"""

import json
import os
import random
import tempfile
from pathlib import Path

os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"

import torch
import transformers
import trl
from datasets import load_dataset
from make_small import sentence, text, turn
from train_golden import FOLDER as SMALL
from train_golden import QUIET, SHARED, finish, model
from transformers import AutoTokenizer
from trl.experimental.online_dpo import OnlineDPOConfig, OnlineDPOTrainer

FOLDER = Path(__file__).parent / "online"
MAX_NEW_TOKENS, PENALTY = 16, 0.75
DEFAULTS = {key: value for key, value in SHARED.items() if key != "max_length"} | {
    "per_device_train_batch_size": 4, "max_steps": 3, "warmup_steps": 0, "loss_type": "sigmoid", "beta": 0.1,
    "missing_eos_penalty": None, "max_new_tokens": MAX_NEW_TOKENS,
}
# (name, data, reference, changes); reference "same" starts from the policy's weights, "other" from perturbed ones.
RUNS = [
    ("sigmoid", "prompts_conv", "same", {}),
    ("ipo", "prompts_conv", "same", {"loss_type": "ipo"}),
    ("missing_eos", "prompts_conv", "same", {"missing_eos_penalty": PENALTY}),
    ("beta_by_epoch", "prompts_conv", "same", {"beta": [0.1, 0.3], "max_steps": 8}),
    ("plain", "prompts_plain", "same", {}),
    ("other_reference", "prompts_conv", "other", {}),
]
# Tokens before EOS of the two answers of each row; 16 of them leave no room for EOS. The first four rows are padded, the
# next four to fewer than 16 tokens, the last four not at all.
NUM_TOKENS = [(8, 16), (0, 11), (16, 3), (4, 15), (2, 10), (6, 1), (9, 5), (7, 0), (15, 16), (16, 15), (16, 16), (15, 15)]


def write_prompts() -> None:
    rng = random.Random(11)
    conversations, plain = [], []
    for i in range(len(NUM_TOKENS)):
        prompt = [turn("user", text(rng, 1, 2))]
        if i % 4 == 1:
            prompt.insert(0, turn("system", sentence(rng, 3, 6)))
        if i % 6 == 5:
            prompt += [turn("assistant", sentence(rng, 3, 6)), turn("user", sentence(rng, 3, 8))]
        # Fields beside the prompt, of every second row.
        extra = {"answer": sentence(rng, 1, 3), "level": i} if i % 2 == 0 else {}
        conversations.append({"prompt": prompt} | extra)
        plain.append({"prompt": text(rng, 1, 2)} | extra)
    for name, rows in (("prompts_conv", conversations), ("prompts_plain", plain)):
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (FOLDER / f"{name}.jsonl").write_text(lines)


def given_rows(data: str, tokenizer) -> list[dict]:
    """Tokens of each prompt, and the answers and scores that the trainer will be given."""
    rng = random.Random(data)
    rows = []
    for i, line in enumerate((FOLDER / f"{data}.jsonl").read_text().splitlines()):
        prompt = json.loads(line)["prompt"]
        if not isinstance(prompt, str):
            prompt = tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        answers = [tokenizer.encode(" " + text(rng, 4, 4), add_special_tokens=False) for _ in range(2)]
        if i % 4 == 3:
            answers[1][:3] = answers[0][:3]  # Answers that begin alike.
        cut = [tokens[:n] + [tokenizer.eos_token_id] * (n < MAX_NEW_TOKENS)
               for tokens, n in zip(answers, NUM_TOKENS[i], strict=True)]
        scores = [0.0, 0.0]
        while abs(scores[0] - scores[1]) in (0.0, PENALTY):
            scores = [rng.randint(-12, 12) / 8 for _ in range(2)]
        rows.append({"prompt": tokenizer.encode(prompt, add_special_tokens=False), "completions": cut, "scores": scores})
    assert len({tuple(row["prompt"]) for row in rows}) == len(rows), "a prompt says which row it is"
    return rows


class GivenTrainer(OnlineDPOTrainer):
    """TRL's trainer on given answers, which keeps what each step computed."""

    def __init__(self, rows: list[dict], **arguments):
        super().__init__(reward_funcs=self.scores, **arguments)
        self.rows, self.batches, self.masked, self.unmasked = rows, [], [], []
        self.by_prompt = {tuple(row["prompt"]): i for i, row in enumerate(rows)}
        self.model.generate = self.given

    @property
    def beta(self) -> float:
        """TRL 1.16 indexes a list of betas with the epoch, which is a float, and fails; this is what it documents."""
        if isinstance(self._beta, list):
            return self._beta[min(int(self.state.epoch), len(self._beta) - 1)]
        return self._beta

    def given(self, input_ids, attention_mask, **_):
        """Stands for `generate`: `[2 * prompts, tokens]`, all prompts with their first answers, then with their second."""
        found = [self.by_prompt[tuple(row[mask.bool()].tolist())]
                 for row, mask in zip(input_ids, attention_mask, strict=True)]
        self.batch = found[: len(found) // 2]
        assert found == self.batch * 2
        answers = [self.rows[i]["completions"][side] for side in range(2) for i in self.batch]
        width = max(map(len, answers))
        padded = [tokens + [self._tokenizer.pad_token_id] * (width - len(tokens)) for tokens in answers]
        return torch.cat((input_ids, torch.tensor(padded)), dim=1)

    def scores(self, completion_ids, answer, level, **_) -> list[float]:
        """Of the answers, which must be those given, to prompts with their other fields beside them."""
        assert level == [i if i % 2 == 0 else None for i in self.batch * 2]
        assert [a is not None for a in answer] == [i % 2 == 0 for i in self.batch * 2]
        given = [(self.rows[i]["completions"][side], self.rows[i]["scores"][side])
                 for side in range(2) for i in self.batch]
        for tokens, (expected, _) in zip(completion_ids, given, strict=True):
            assert tokens[: len(expected)] == expected
        return [score for _, score in given]

    def _forward(self, model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs=None):
        logprobs = super()._forward(model, prompt_ids, prompt_mask, completion_ids, completion_mask, vision_inputs)
        self.mask = completion_mask.double()
        if model is self.ref_model:
            self.reference_logprobs = logprobs.double()
        else:
            self.policy_logprobs = logprobs.detach().double()
        return logprobs

    def training_step(self, model, inputs, num_items_in_batch=None):
        beta = self.beta
        loss = super().training_step(model, inputs, num_items_in_batch)
        self.exact_loss = loss.item()
        scores = torch.tensor([self.penalised(i, side) for side in range(2) for i in self.batch], dtype=torch.float64)
        assert abs(scores.mean().item() - self.stats["objective/scores"][-1]) < 1e-6
        self.masked.append(self.objective(self.mask, scores, beta))
        self.unmasked.append(self.objective(torch.ones_like(self.mask), scores, beta))
        per_row = lambda logprobs: (logprobs * self.mask).sum(1).reshape(2, -1).T.tolist()
        first, second = scores.reshape(2, -1)
        assert not (first == second).any(), "a tie"
        self.batches.append({
            "rows": self.batch, "num_padding": int((1 - self.mask).sum()), "chosen": (second > first).int().tolist(),
            "policy_logps": per_row(self.policy_logprobs), "reference_logps": per_row(self.reference_logprobs)})
        return loss

    def penalised(self, row: int, side: int) -> float:
        row = self.rows[row]
        ended = self._tokenizer.eos_token_id in row["completions"][side]
        return row["scores"][side] - (0 if ended else self.args.missing_eos_penalty or 0)

    def objective(self, mask, scores, beta: float) -> dict:
        """TRL's four means over sums of all positions, of those in `mask` alone."""
        kl = ((self.policy_logprobs - self.reference_logprobs) * mask).sum(1)
        return {
            "objective/kl": kl.mean().item(), "objective/entropy": -(self.policy_logprobs * mask).sum(1).mean().item(),
            "objective/non_score_reward": (-beta * kl).mean().item(),
            "objective/rlhf_reward": (scores - beta * kl).mean().item()}

    def log(self, logs, start_time=None):
        if "loss" in logs:
            assert logs["loss"] == round(self.exact_loss, 4)
            logs["loss"] = self.exact_loss
        super().log(logs, start_time)


def close(ours: float, theirs: float) -> bool:
    """What is computed here in float64 of TRL's f32 log-probs, and what TRL sums in f32."""
    return abs(ours - theirs) <= 1e-5 * max(1.0, abs(theirs))


def check(run: dict, unmasked: list[dict]) -> None:
    """What was kept is what TRL logged; the mask changes nothing exactly where there is no padding."""
    for step, (log, masked, everywhere, batch) in enumerate(
            zip(run["steps"], run["masked"], unmasked, run["batches"], strict=True)):
        for key, value in everywhere.items():
            assert close(value, log[key]), (step, key, value, log[key])
        assert (masked == everywhere) == (batch["num_padding"] == 0), step
        chosen = [row[side] for row, side in zip(batch["policy_logps"], batch["chosen"], strict=True)]
        assert close(sum(chosen) / len(chosen), log["logps/chosen"]), step
        way = [p[side] - r[side] for p, r, side in
               zip(batch["policy_logps"], batch["reference_logps"], batch["chosen"], strict=True)]
        assert close(log["beta"] * sum(way) / len(way), log["rewards/chosen"]), step
    assert {batch["num_padding"] == 0 for batch in run["batches"]} == {True, False}, "steps with padding and without"


def online_run(name: str, data: str, reference: str, changes: dict) -> dict:
    tokenizer = AutoTokenizer.from_pretrained(SMALL / "model")
    rows, arguments = given_rows(data, tokenizer), DEFAULTS | changes
    quiet = {key: value for key, value in QUIET.items() if key != "activation_checkpointing"}
    with tempfile.TemporaryDirectory() as output:
        policy = model()
        trainer = GivenTrainer(
            rows, model=policy, ref_model=model(reference == "other"), processing_class=tokenizer,
            train_dataset=load_dataset("json", data_files=str(FOLDER / f"{data}.jsonl"), split="train"),
            args=OnlineDPOConfig(output_dir=output, gradient_checkpointing=False, **(quiet | arguments)))
        run = finish(trainer, policy, arguments, data=data, reference=reference)
    run |= {"rows": rows, "masked": trainer.masked, "batches": trainer.batches}
    check(run, trainer.unmasked)
    print(name, [step["loss"] for step in run["steps"]])
    return run


def write(name: str, run: dict) -> None:
    """A line per row and per step, so that a difference between two versions can be read."""
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in run.items() if not isinstance(value, list)]
    for key in ("rows", "steps", "masked", "batches"):
        parts.append(f"{json.dumps(key)}: [\n" + ",\n".join(map(json.dumps, run[key])) + "\n]")
    (FOLDER / f"{name}.json").write_text("{" + ",\n".join(parts) + "}\n")


def main() -> None:
    torch.set_num_threads(1)
    FOLDER.mkdir(exist_ok=True)
    write_prompts()
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "trl": trl.__version__}
    runs = {name: online_run(name, *rest) for name, *rest in RUNS}
    changed = [a["chosen"] != b["chosen"] for a, b in
               zip(runs["sigmoid"]["batches"], runs["missing_eos"]["batches"], strict=True)]
    assert any(changed), "the penalty decides a pair"
    for name, run in runs.items():
        write(name, {"versions": versions} | run)


if __name__ == "__main__":
    main()
