"""Matmul rate of this machine at the shapes of a task, by the fastest library; utilisation refers to it. Forward and both
backward matmuls of each linear layer and of the head."""

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, dataclass, field

from .task import HERE, Task, Work
from .timing import environment

DIRECTIONS = {"linear": "forward", "linear_backward_input": "input's gradient",
              "linear_backward_weight": "weight's gradient"}

LIBRARIES = ["Tandem", "torch"]

ROUNDS = 3


@dataclass
class Rates:
    """Seconds of each matmul in one repeat, by library: `{"linear f32 500x256x512": {"Tandem": 0.001, "torch": 0.002}}`."""

    task: str
    repeat: int
    type: str
    seconds: dict = field(default_factory=dict)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict) -> "Rates":
        return cls(**value)

    def weights(self, task: Work) -> dict:
        """Operations of each product in a step: a layer's come once a layer, the head's once."""
        *layer, head = task.products()
        count = {shape_name(shape): task.facts["num_hidden_layers"] for shape in layer} | {shape_name(head): 1}
        return {name: flops_of(name) * count[name.split()[2]] for name in self.seconds}

    def best(self, task: Work) -> float:
        """Operations per second, each product by the library that is fastest at it, in the proportions of a step."""
        weights = self.weights(task)
        each = {name: weights[name] / flops_of(name) * min(times.values()) for name, times in self.seconds.items()}
        return sum(weights.values()) / sum(each.values())

    def of(self, library: str, task: Work) -> float | None:
        """The same by one library alone, if it made all of them."""
        if any(library not in times for times in self.seconds.values()):
            return None
        weights = self.weights(task)
        return sum(weights.values()) / sum(weights[name] / flops_of(name) * times[library]
                                           for name, times in self.seconds.items())

    def winners(self) -> str:
        """Which library was fastest at how many of the products."""
        names = [min(times, key=times.get) for times in self.seconds.values()]
        return ", ".join(f"{name} {names.count(name)}" for name in sorted(set(names), key=names.count, reverse=True))


def shape_name(shape: tuple) -> str:
    return "x".join(map(str, shape))


def flops_of(name: str) -> float:
    rows, inputs, outputs = map(int, name.split()[2].split("x"))
    return 2.0 * rows * inputs * outputs


def measure(task: Task, type_: str, repeat: int, args) -> Rates:
    """Both libraries in turns; of each product the fastest round, since a busy neighbour only makes it slower."""
    rates = Rates(task.name, repeat, type_)
    shapes = [shape_name(shape) for shape in task.products()]
    for _ in range(ROUNDS):
        threads = os.environ | {"TANDEM_BENCH_THREADS": str(args.threads)}
        commands = {
            "Tandem": ([args.ops_bench, "--products", type_, *shapes], threads),
            "torch": ([args.python, HERE / "torch_products.py", "--threads", str(args.threads), type_, *shapes],
                      environment(args)),
        }
        for library, (command, variables) in commands.items():
            process = subprocess.run(command, env=variables, stdout=subprocess.PIPE, text=True)
            if process.returncode:
                print(f"{library} cannot multiply {type_} ({process.returncode}): left out of the rate", file=sys.stderr)
                continue
            for line in process.stdout.splitlines():
                product = json.loads(line)
                times = rates.seconds.setdefault(product["name"], {})
                times[library] = min(product["seconds"], times.get(library, math.inf))
    return rates


def build_bench(root) -> str:
    """The program that times Tandem's products."""
    command = ["cargo", "bench", "-p", "tandem-kernels", "--bench", "ops", "--no-run", "--message-format", "json"]
    process = subprocess.run(command, cwd=root, stdout=subprocess.PIPE, text=True)
    for line in process.stdout.splitlines():
        message = json.loads(line)
        if message.get("executable") and message.get("target", {}).get("name") == "ops":
            return message["executable"]
    sys.exit("cannot build the bench of tandem-kernels, which measures the rate of products; see above, or give --ops-bench")
