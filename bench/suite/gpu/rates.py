"""Rate that utilisation refers to: bf16 matmuls, as torch reaches it on large ones in the same repeat, and the rate in the
GPU's data sheet."""

import json
import subprocess
import tomllib
from dataclasses import asdict, dataclass, field
from pathlib import Path

from ..task import HERE
from .timing import environment

# The fastest of these counts: factors of 128 MiB and more, far beyond caches.
SHAPES = {"cuda": ["8192x8192x8192", "16384x8192x8192", "16384x4096x28672"], "cpu": ["512x512x512"]}
TABLE = HERE.parent / "crates/tandem-train/src/plan/devices.toml"


@dataclass
class GpuRates:
    """Operations per second of one repeat, by matmul."""

    repeat: int
    rates: dict = field(default_factory=dict)

    def to_json(self) -> dict:
        return asdict(self)

    @classmethod
    def from_json(cls, value: dict) -> "GpuRates":
        return cls(**value)

    def best(self, _task=None) -> float:
        return max(self.rates.values())


def measure(repeat: int, args) -> GpuRates:
    """Measures matmuls with torch."""
    command = [args.python, HERE / "torch_products.py", "--device", args.device, "--threads", str(args.threads), "bf16"]
    process = subprocess.run([*command, *SHAPES[args.device]], env=environment(args), stdout=subprocess.PIPE, text=True, check=True)
    found = GpuRates(repeat)
    for line in process.stdout.splitlines():
        product = json.loads(line)
        rows, inputs, outputs = map(int, product["name"].split()[2].split("x"))
        found.rates[product["name"]] = 2.0 * rows * inputs * outputs / product["seconds"]
    return found


def data_sheet(name: str, memory_bytes: int, table: Path = TABLE) -> dict | None:
    """The row of Tandem's table of devices for a GPU by the name that its driver gives: of those whose first word is in it, the one
    whose memory is nearest."""
    rows = tomllib.loads(table.read_text())["device"]
    words = name.upper().replace("-", " ").split()
    known = [row for row in rows if row["name"].split("-")[0] in words or row["name"].replace("-", " ") in name.upper()]
    return min(known, key=lambda row: abs(row.get("memory_gib", 0) - memory_bytes / 2**30), default=None)
