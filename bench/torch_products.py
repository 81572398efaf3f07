#!/usr/bin/env python3
"""Times torch's products: the three of a linear layer, at each shape.

    python torch_products.py [--device cuda] --threads N f32|bf16 TOKENSxINPUTSxOUTPUTS ...

Prints lines of JSON as `cargo bench -p tandem-kernels --bench ops -- --products …` does, and measures as it does: medians,
and activations that come from memory and not from the cache that the last call left.
"""

import argparse
import json
import math
import statistics
import time

import torch

BYTES = 512 << 20  # of all sets of activations together


def median_seconds(run, device: str = "cpu") -> float:
    """Seconds of a call. A sample is a millisecond at least; on a GPU, whose queue is waited for once a sample, twenty."""
    wait, least = (torch.cuda.synchronize, 20e-3) if device == "cuda" else (lambda: None, 1e-3)

    def seconds(calls: int) -> float:
        start = time.perf_counter()
        for _ in range(calls):
            run()
        wait()
        return (time.perf_counter() - start) / calls

    seconds(1)
    calls = math.ceil(least / max(seconds(1), 1e-9))
    samples, start = [], time.perf_counter()
    while len(samples) < 5 or (time.perf_counter() - start < 0.25 and len(samples) < 101):
        samples.append(seconds(calls))
    return statistics.median(samples)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dtype", choices=["f32", "bf16"])
    parser.add_argument("shapes", nargs="+")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    args = parser.parse_args()

    torch.set_num_threads(args.threads)
    torch.set_default_device(args.device)
    dtype = torch.float32 if args.dtype == "f32" else torch.bfloat16
    for text in args.shapes:
        tokens, inputs, outputs = (int(number) for number in text.split("x"))
        weight = (torch.rand(outputs, inputs) - 0.5).to(dtype)
        count = min(200, max(2, BYTES // (tokens * (inputs + outputs) * weight.element_size())))
        x, y = ((torch.rand(tokens, width) - 0.5).to(dtype) for width in (inputs, outputs))
        sets = [(x.clone(), y.clone()) for _ in range(count)]
        turn = 0
        gradient = torch.empty_like(weight)

        def next_set():
            nonlocal turn
            turn = (turn + 1) % count
            return sets[turn]

        def forward():
            x, y = next_set()
            torch.mm(x, weight.t(), out=y)

        def backward_input():
            dx, dy = next_set()
            torch.mm(dy, weight, out=dx)

        def backward_weight():
            x, dy = next_set()
            torch.mm(dy.t(), x, out=gradient)

        products = {"linear": forward, "linear_backward_input": backward_input, "linear_backward_weight": backward_weight}
        with torch.no_grad():
            for name, product in products.items():
                print(json.dumps({"name": f"{name} {args.dtype} {text}", "seconds": median_seconds(product, args.device)}), flush=True)


if __name__ == "__main__":
    main()
