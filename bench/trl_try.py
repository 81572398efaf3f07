#!/usr/bin/env python3
"""Tries settings of TRL on a task, one after another in one process: which fit, and how long a step takes.

    python trl_try.py FOLDER --shape SHAPE --recipe RECIPE --pairs N --device cuda --try bf16,none,4 --try bf16,none,8 …

A setting is a type of weights, what is recomputed, and pairs at a time; `liger` may follow. Settings that differ in the last
number alone are tried until one does not fit or is slower than the one before. Prints a line of JSON for each: {"note": {"try", "seconds",
"bytes"}}, with the mean of its steps but the first and what PyTorch's allocator took, or with "error".
"""

import gc
import json
import sys

import torch
from accelerate.state import AcceleratorState
from trl_step import parser, train


def seconds_of(args, setting: str) -> dict:
    args.dtype, args.recompute, batch, *liger = setting.split(",")
    args.batch, args.liger = int(batch), "liger" in liger
    try:
        spent = [seconds for seconds, _ in train(args)][1:]
        taken = torch.cuda.max_memory_reserved() if args.device == "cuda" else 0
        return {"seconds": sum(spent) / len(spent), "bytes": taken}
    except torch.OutOfMemoryError:
        return {"error": "out of memory"}
    except Exception as error:  # noqa: BLE001: what a library cannot do is an answer, too
        return {"error": f"{type(error).__name__}: {error}"[:200]}
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)


def free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--try", dest="settings", action="append", required=True, metavar="DTYPE,RECOMPUTE,PAIRS[,liger]")
    args = options.parse_args()
    torch.set_num_threads(args.threads)
    before = {}  # by what settings have in common, the last one's seconds; 0 where no larger one is to be tried
    for setting in args.settings:
        dtype, recompute, _, *liger = setting.split(",")
        group = (dtype, recompute, *liger)
        last = before.get(group)
        if last == 0:
            continue
        found = seconds_of(args, setting)
        free()
        seconds = found.get("seconds", 0)
        before[group] = 0 if last and seconds > last else seconds
        print(json.dumps({"note": {"try": setting, **found}}), flush=True)
        print(setting, found, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
