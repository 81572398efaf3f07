#!/usr/bin/env python3
"""Times attention on a GPU: torch's, by each of its back ends, and Tandem's, by each kind of its kernels; forward and backward, in turns.

    cargo bench -p tandem-kernels --bench ops --no-run        # says where the program is that times Tandem's
    python bench/gpu_attention.py --ops-bench target/release/deps/ops-… --out docs/results/gpu/attention.md
    python bench/gpu_attention.py --ops-bench … --device cpu  # all of it without a GPU, one small case

Causal, bf16, 16384 tokens as sequences of 1024 to 16384, 32 heads of 128 with 8 for keys and values. Writes a table, and beside it
all numbers as JSON. Rates count what causal attention has to multiply: half of all scores; backward is 2.5 times forward.
"""

import argparse
import json
import re
import statistics
import subprocess
import sys
from pathlib import Path

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from torch_products import median_seconds

BACKENDS = {"cuda": {"flash": SDPBackend.FLASH_ATTENTION, "cuDNN": SDPBackend.CUDNN_ATTENTION},
            "cpu": {"flash": SDPBackend.FLASH_ATTENTION}}
HEAD = 128
# Sequences, their length, heads, key/value heads: the cases of Tandem's bench.
CASES = {"cuda": [(16384 // length, length, 32, 8) for length in (1024, 2048, 4096, 8192, 16384)], "cpu": [(2, 48, 4, 2)]}
PLACE = {"cuda": "cuda", "cpu": "emulated"}
PASSES = ["forward", "backward"]


def of_torch(case: tuple, backend: SDPBackend, device: str) -> dict:
    """Seconds of both passes. Where a back end takes no grouped heads, keys and values are repeated before the clock starts."""
    count, length, heads, kv_heads = case

    def tensor(num_heads: int) -> torch.Tensor:
        return torch.randn(count, num_heads, length, HEAD, device=device, dtype=torch.bfloat16, requires_grad=True)

    q, k, v, d_out = tensor(heads), tensor(kv_heads), tensor(kv_heads), tensor(heads).detach()

    def forward(k=k, v=v, is_grouped=True):
        return scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)

    with sdpa_kernel(backend):
        try:
            out = forward()
        except RuntimeError:
            k, v = (x.detach().repeat_interleave(heads // kv_heads, 1).requires_grad_() for x in (k, v))
            out = forward(k, v, False)
            run = lambda: forward(k, v, False)  # noqa: E731
        else:
            run = forward
        with torch.no_grad():
            seconds = {"forward": median_seconds(run, device)}
        seconds["backward"] = median_seconds(lambda: torch.autograd.grad(out, (q, k, v), d_out, retain_graph=True), device)
    return seconds


def kernels_of(device: str) -> dict:
    """Kinds of Tandem's kernels, by their names in the table."""
    has_warpgroups = device == "cpu" or torch.cuda.get_device_capability() == (9, 0)
    return {"Tandem": "mma"} | ({"Tandem, wgmma": "wgmma"} if has_warpgroups else {})


def of_tandem(program: str, device: str, kernels: str) -> dict:
    """Seconds of each case and pass: `{(16, 1024): {"forward": 0.001, …}}`."""
    command = [program, "--device", PLACE[device], "--attention", kernels, "--json", "attention"]
    process = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    found = {}
    for line in process.stdout.splitlines():
        timed = json.loads(line)
        name = re.fullmatch(r"attention (\d+) of (\d+), .* (forward|backward)", timed["name"])
        if name:
            found.setdefault((int(name[1]), int(name[2])), {})[name[3]] = timed["seconds"]
    return found


def measure(args) -> list:
    """A value for each case, pass and program: the median of the rounds."""
    samples = {}
    for _ in range(args.rounds):
        ours = {name: of_tandem(args.ops_bench, args.device, kernels) for name, kernels in kernels_of(args.device).items()}
        for case in CASES[args.device]:
            found = {name: seconds.get(case[:2], {}) for name, seconds in ours.items()}
            for name, backend in BACKENDS[args.device].items():
                try:
                    found[name] = of_torch(case, backend, args.device)
                except RuntimeError as error:
                    print(f"torch's {name} at {case}: {error}", file=sys.stderr)
            for program, seconds in found.items():
                for which, value in seconds.items():
                    samples.setdefault((case, which, program), []).append(value)
    return [{"case": case, "pass": which, "program": program, "seconds": statistics.median(values), "rounds": values}
            for (case, which, program), values in samples.items()]


def table(measured: list, device: str) -> list:
    own = list(kernels_of(device))
    programs = [f"torch, {name}" for name in BACKENDS[device]] + own
    lines = ["| | " + " | ".join([*programs, "best of torch ÷ best of Tandem"]) + " |", "|---|" + "---|" * (len(programs) + 1)]
    for which in PASSES:
        for case in CASES[device]:
            count, length, heads, _ = case
            flops = 2.0 * count * length * (length + 1) * heads * HEAD * (2.5 if which == "backward" else 1.0)
            seconds = {one["program"]: one["seconds"] for one in measured if (one["case"], one["pass"]) == (case, which)}
            cells = [f"{1e3 * seconds[name]:.3f} ms, {flops / seconds[name] / 1e12:.0f} TFLOP/s" if name in seconds else "–"
                     for name in [*BACKENDS[device], *own]]
            best, ours = (min((value for name, value in seconds.items() if (name in own) == is_own), default=None) for is_own in (False, True))
            ratio = f"{best / ours:.2f}" if best and ours else "–"
            lines.append(f"| {which}, {count} × {length} | " + " | ".join([*cells, ratio]) + " |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops-bench", required=True, help="the bench of tandem-kernels")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="the page; its numbers are put beside it")
    args = parser.parse_args()
    measured = measure(args)
    name = torch.cuda.get_device_name() if args.device == "cuda" else "the processor; Tandem's GPU is emulated: no number means anything"
    lines = ["# Attention on a GPU: torch and Tandem", "",
             f"By `bench/gpu_attention.py` on {name}; torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}. "
             f"bf16, causal, heads of {HEAD}; sequences × length; the median of {args.rounds} rounds in turns.", "",
             *table(measured, args.device), ""]
    print("\n".join(lines))
    if args.out:
        args.out.write_text("\n".join(lines))
        args.out.with_suffix(".json").write_text(json.dumps(measured, indent=1) + "\n")


if __name__ == "__main__":
    main()
