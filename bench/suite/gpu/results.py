"""Numbers of a record of GPU runs: the suite's, with the GPU's memory."""

import statistics
from dataclasses import dataclass

from ..results import Results, Spread
from .setups import GpuSetup

# Beside its arena Tandem takes tables and workspaces (`cuda::BESIDE`), and the driver a context: what a plan leaves of a GPU.
BESIDE = (384 << 20) + (512 << 20)


@dataclass
class GpuResults(Results):
    """Results of one task."""

    def peak(self, setup: GpuSetup) -> int | None:
        """Peak of GPU memory; without a GPU, of host memory."""
        return max((run.gpu_peak_bytes or run.peak_bytes for run in self.runs(setup)), default=None)

    def of_row(self, program: str, row: tuple) -> list:
        return [setup for setup in self.setups() if setup.program == program and setup.row == row and self.runs(setup)]

    def best(self, program: str, row: tuple) -> GpuSetup | None:
        """The set-up whose steps were fastest, in the median."""
        return min(self.of_row(program, row), key=self.step_seconds, default=None)

    def memory_beside_fastest(self, row: tuple, peer: str = "TRL") -> float | None:
        """Tandem's peak as a share of that of a peer's fastest set-up."""
        ours, theirs = self.best("Tandem", row), self.best(peer, row)
        return self.peak(ours) / self.peak(theirs) if ours and theirs else None

    def of_data_sheet(self, setup: GpuSetup) -> Spread | None:
        """Useful operations a second as a share of what the data sheet promises."""
        sheet = self.record.about["data_sheet"]
        shares = []
        for run in self.runs(setup) if sheet else []:
            shares.append(statistics.median(self.sheet_share(setup, step, run.seconds[step]) for step in self.steps))
        return Spread.of(shares)

    def sheet_share(self, setup: GpuSetup, step: int, seconds: float) -> float | None:
        """Useful operations of a step that took so long, as a share of what the data sheet promises."""
        sheet = self.record.about["data_sheet"]
        return self.task.flops(setup, step) / seconds / (sheet["bf16_tflops"] * 1e12) if sheet else None

    def beside_plan(self, setup: GpuSetup) -> float | None:
        """Tandem's peak as a share of the planned one: the arena, and what is taken beside it."""
        runs = [run for run in self.runs(setup) if run.gpu_peak_bytes and run.planned_bytes]
        return max((run.gpu_peak_bytes / (run.planned_bytes + BESIDE) for run in runs), default=None)

    def losses(self, row: tuple) -> dict:
        """Losses of each set-up, in its first repeat."""
        return {setup.name: self.runs(setup)[0].losses for program in ("TRL", "torchtune", "Tandem") for setup in self.of_row(program, row)
                if setup.batching != "packing"}
