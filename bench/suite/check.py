"""Checks the count of useful operations in two ways: token by token on small tasks, and against `tandem plan`, which counts
what its program really computes."""

import json
import random
import subprocess
import sys

from .flops import Llama, Load, attention_forward, load_of_pair, load_of_row, useful
from .setups import Setup
from .task import Task
from .timing import write_config

# What a plan counts beside products (norms, activations, RoPE, the optimiser), as a share of all.
REST = 0.02


def by_hand() -> None:
    """Every product of every token, one by one."""
    rng, llama = random.Random(7), Llama(hidden=8, layers=3, heads=4, kv_heads=2, intermediate=12, vocab=50)
    for _ in range(200):
        prompt, chosen, rejected = ([rng.randrange(2) for _ in range(rng.randint(1, 6))] for _ in range(3))
        # A token is known by all that stands before it: what two sequences share is there once.
        contexts = {tuple(prompt + answer)[:end] for answer in (chosen, rejected)
                    for end in range(1, len(prompt) + len(answer) + 1)}
        predicting = {tuple(prompt + answer)[:end] for answer in (chosen, rejected)
                      for end in range(len(prompt), len(prompt) + len(answer))}
        expect(load_of_pair(prompt, chosen, rejected),
               Load(len(contexts), sum(map(len, contexts)), len(predicting), 2))
        whole = tuple(prompt + chosen)
        ends = range(1, len(whole) + 1)
        expect(load_of_row(prompt, chosen), Load(len(whole), sum(ends), len(chosen), 1))

        forward = 0
        for context in contexts:
            for layer in range(llama.layers):
                head = llama.hidden // llama.heads
                forward += 2 * llama.hidden * head * (llama.heads + 2 * llama.kv_heads)  # queries, keys, values
                forward += len(context) * llama.heads * 4 * head  # scores and their mix of values
                if layer == llama.layers - 1 and context not in predicting:
                    continue
                forward += 2 * llama.heads * head * llama.hidden  # output
                forward += 3 * 2 * llama.hidden * llama.intermediate  # gate, up, down
            forward += 2 * llama.hidden * llama.vocab * (context in predicting)
        load = load_of_pair(prompt, chosen, rejected)
        expect(useful(llama, load, "full", "precompute"), 3 * forward)
        expect(useful(llama, load, "full", "model"), 4 * forward)


def against_plan(task: Task, args) -> list:
    """A line for each recipe of the suite."""
    one, output = Task(task.size, task.shape, task.folder, 1, task.pairs), args.work / "plan"
    setups = [Setup("Tandem", recipe, "f32") for recipe in ("full", "full-precompute", "lora", "sft")]
    return [beside_plan(one, setup, [write_config(setup, one, output, args)], args) for setup in setups]


def beside_plan(task: Task, setup: Setup, words: list, args) -> str:
    """A plan of one step whose micro-batch is the whole batch; `words` are its file and options. Tandem's attention multiplies queries
    and keys once more in backward; everything else that it counts beside the useful operations is less than `REST` of them."""
    process = subprocess.run([args.tandem, "plan", *words, "--json"], stdout=subprocess.PIPE, check=True, text=True,
                             stderr=subprocess.DEVNULL)
    plan = json.loads(process.stdout)["ranks"][0]["plan"]
    if plan["micro_batches_in_a_step"] != 1:
        sys.exit("the check needs a step in one micro-batch: raise --micro-batch-tokens")
    counted = next(phase for phase in plan["phases"] if phase["name"] == "train")["flops_of_largest_micro_batch"]
    load, ours = task.load(setup.method, 0), task.flops(setup, 0)
    again = attention_forward(Llama.of(task.facts), load) / 2
    rest = (counted - again - ours) / ours
    line = (f"{task.name} {setup.recipe}: useful {ours / 1e9:.2f} GFLOP, planned {counted / 1e9:.2f}, of these {again / 1e9:.2f} "
            f"scores computed twice; the rest is {100 * rest:.2f} %")
    # The plan's step is that of the largest micro-batch; only with one step is it ours.
    if not 0 <= rest < REST:
        sys.exit(f"the count of useful operations is not that of the plan:\n{line}")
    return line


def expect(found, wanted) -> None:
    if found != wanted:
        sys.exit(f"the count of useful operations is wrong: {found}, not {wanted}")
