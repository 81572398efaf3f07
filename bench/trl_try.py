#!/usr/bin/env python3
"""Searches for TRL's fastest settings on a task, in one process: which run, and how long a step takes.

    python trl_try.py FOLDER --shape SHAPE --recipe RECIPE --pairs N --device cuda --known FILE [--attentions …] [--has-liger]

`suite/gpu/search.py` says in which order. Prints a line of JSON for each setting: {"note": {"try", "seconds", "bytes"}}, with the mean of
its steps but the first and what PyTorch's allocator took, or with "error". FILE holds the notes of an earlier process by setting:
they are not tried again.
"""

import gc
import json
import math
import sys
from pathlib import Path

import torch
from accelerate.state import AcceleratorState
from suite.gpu.search import search
from suite.gpu.setups import ATTENTIONS, GpuSetup
from transformers.models.llama import modeling_llama
from trl_step import parser, train

# Liger's kernels take the place of this module's classes and functions, for all models made later.
UNPATCHED = dict(vars(modeling_llama))


def try_setup(args, setup: GpuSetup) -> dict:
    args.dtype, args.recompute, args.batch, args.liger = setup.dtype, setup.recompute, setup.batch, setup.is_liger
    args.attention, args.batching = setup.attention, setup.batching
    try:
        seconds, _, tokens = zip(*train(args)[1:])
        taken = torch.cuda.max_memory_reserved() if args.device == "cuda" else 0
        # Packed steps hold other rows: as long as they would take for the others' tokens.
        share = tokens_of_step(args) * len(tokens) / sum(tokens) if setup.batching == "packing" else 1.0
        return {"seconds": share * sum(seconds) / len(seconds), "bytes": taken}
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # noqa: BLE001: what a library cannot do is an answer, too
        return {"error": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
        vars(modeling_llama).update(UNPATCHED)


def tokens_of_step(args) -> float:
    facts = json.loads((args.folder / f"{args.shape}.json").read_text())
    return args.pairs * (facts["prompt_tokens"] + facts["answer_tokens"])


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--known", type=Path)
    options.add_argument("--attentions", nargs="+", choices=ATTENTIONS, default=ATTENTIONS)
    options.add_argument("--has-liger", action="store_true")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    known = json.loads(args.known.read_text()) if args.known else {}

    def seconds(setup: GpuSetup) -> float:
        if setup.text not in known:
            known[setup.text] = try_setup(args, setup)
            free()
            print(json.dumps({"note": {"try": setup.text, **known[setup.text]}}), flush=True)
            print(setup.text, known[setup.text], file=sys.stderr, flush=True)
        return known[setup.text].get("seconds", math.inf)

    search(args.recipe, args.pairs, args.attentions, args.has_liger, seconds)


if __name__ == "__main__":
    main()
