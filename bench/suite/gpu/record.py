"""Measurements, in one JSON file."""

import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from .. import record
from .nvml import Gpu
from .rates import GpuRates, data_sheet
from .timing import GpuTiming


@dataclass
class GpuRecord(record.Record):
    """All of a run. `about["tried"]` has, by task and recipe, what was tried and how long its steps took."""

    TIMING: ClassVar = GpuTiming
    RATES: ClassVar = GpuRates
    SAME: ClassVar = ["steps", "warmup", "pairs", "device", "same_weights", "set"]

    @classmethod
    def start(cls, args, root: Path) -> "GpuRecord":
        known = super().start(args, root)
        known.about |= {"tried": {}, "data_sheet": None, "nvidia_smi": ""}
        if args.gpu:
            known.about["data_sheet"] = data_sheet(args.gpu.name(), args.gpu.memory().total)
            known.about["nvidia_smi"] = subprocess.run(["nvidia-smi"], stdout=subprocess.PIPE, text=True).stdout
        return known

    @staticmethod
    def machine(args) -> str:
        return describe(args.gpu) if args.gpu else record.machine()

    def tried(self, task: str, recipe: str) -> dict:
        """By set-up's name: `{"seconds"}` or `{"error"}`."""
        return self.about["tried"].setdefault(f"{task} {recipe}", {})

    def has_tried(self, task: str, recipe: str) -> bool:
        return bool(self.about["tried"].get(f"{task} {recipe}"))

    def rate(self, _task: str, repeat: int, _type: str) -> GpuRates | None:
        return next((rates for rates in self.rates if rates.repeat == repeat), None)


def describe(gpu: Gpu) -> str:
    return f"{gpu.name()}, {gpu.memory().total / 2**20:.0f} MiB, driver {gpu.driver()}; {record.machine()}"
