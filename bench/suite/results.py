"""Numbers of a record: speeds, ratios, shares. A ratio is taken step by step (the same batch) within one repeat, so that a
machine that is busy for a while slows both; of a repeat it is the median of its steps."""

import statistics
from dataclasses import dataclass

from .record import Record
from .setups import Setup
from .task import Work
from .timing import Timing


@dataclass(frozen=True)
class Spread:
    """Over repeats."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: list) -> "Spread | None":
        values = list(values)
        return cls(statistics.median(values), min(values), max(values)) if values else None


@dataclass
class Results:
    """Results of one task."""

    record: Record
    task: Work

    @property
    def steps(self) -> range:
        """Steps that are timed."""
        return range(self.record.about["options"]["warmup"], self.task.steps)

    def setups(self) -> list:
        return self.record.setups(self.task.name)

    def runs(self, setup: Setup) -> list:
        return self.record.of(self.task.name, setup)

    def repeats(self) -> list:
        return sorted({t.repeat for t in self.record.timings if t.task == self.task.name})

    def rows(self) -> list:
        return list(dict.fromkeys(setup.row for setup in self.setups()))

    def seconds(self, timing: Timing) -> list:
        return [timing.seconds[step] for step in self.steps]

    def speed(self, setup: Setup, amount) -> float | None:
        """Median over repeats and steps of an amount of each step, per second."""
        runs = self.runs(setup)
        values = [amount(step) / run.seconds[step] for run in runs for step in self.steps]
        return statistics.median(values) if values else None

    def step_seconds(self, setup: Setup) -> float | None:
        values = [value for run in self.runs(setup) for value in self.seconds(run)]
        return statistics.median(values) if values else None

    def cores(self, setup: Setup) -> float | None:
        """Processor seconds a second, of the most disturbed process."""
        return min((run.cores(self.steps.start) for run in self.runs(setup)), default=None)

    def utilisation(self, setup: Setup) -> Spread | None:
        """Useful operations a second as a share of the products' rate in the same repeat."""
        shares = []
        for run in self.runs(setup):
            rates = self.record.rate(self.task.name, run.repeat, setup.type)
            if rates:
                speeds = [self.task.flops(setup, step) / run.seconds[step] for step in self.steps]
                shares.append(statistics.median(speeds) / rates.best(self.task))
        return Spread.of(shares)

    def fastest(self, program: str, row: tuple, repeat: int, any_type: bool = False) -> Timing | None:
        """Fastest of a program's set-ups of a row in a repeat."""
        def belongs(setup: Setup) -> bool:
            return setup.program == program and (setup.row == row or any_type and setup.recipe == row[0])

        runs = [t for t in self.record.timings
                if t.task == self.task.name and t.repeat == repeat and not t.error and belongs(t.setup)]
        return min(runs, key=lambda run: sum(self.seconds(run)), default=None)

    def ratio(self, peer: str, row: tuple, any_type: bool = False) -> Spread | None:
        """How many times as fast as a peer at its best Tandem is."""
        ratios = []
        for repeat in self.repeats():
            theirs = self.fastest(peer, row, repeat, any_type)
            ours = self.fastest("Tandem", row, repeat)
            if theirs and ours:
                pairs = zip(self.seconds(theirs), self.seconds(ours), strict=True)
                ratios.append(statistics.median(a / b for a, b in pairs))
        return Spread.of(ratios)

    def best_setup(self, peer: str, row: tuple) -> str:
        """The set-ups that were fastest in some repeat."""
        runs = [self.fastest(peer, row, repeat) for repeat in self.repeats()]
        names = [" ".join((run.setup.dtype, run.setup.attention)).strip() for run in runs if run]
        return ", ".join(dict.fromkeys(names))

    def peak(self, setup: Setup) -> int | None:
        return max((run.peak_bytes for run in self.runs(setup)), default=None)

    def memory(self, peer: str, row: tuple) -> float | None:
        """Tandem's peak as a share of that of the peer's set-up which takes least."""
        def peaks(program: str) -> list:
            found = (self.peak(setup) for setup in self.setups() if setup.program == program and setup.row == row)
            return [peak for peak in found if peak]

        ours, theirs = peaks("Tandem"), peaks(peer)
        return max(ours) / min(theirs) if ours and theirs else None

    def product_share(self, type_: str) -> Spread | None:
        """The rate of Tandem's products as a share of the best of any library's."""
        found = (self.record.rate(self.task.name, repeat, type_) for repeat in self.repeats())
        return Spread.of(own / rates.best(self.task) for rates in found if rates and (own := rates.of("Tandem", self.task)))

    def worst_product(self, type_: str) -> float | None:
        """The same of the single product at which it is lowest; of each, the median over repeats."""
        shares = {}
        for rates in self.record.rates:
            if rates.task == self.task.name and rates.type == type_:
                for name, times in rates.seconds.items():
                    if "Tandem" in times:
                        shares.setdefault(name, []).append(min(times.values()) / times["Tandem"])
        return min((statistics.median(values) for values in shares.values()), default=None)

    def loss_distance(self, row: tuple) -> float | None:
        """The largest distance between a peer's loss and Tandem's, step by step, where they should be the same."""
        if row[1] != "f32":
            return None
        runs = [run for setup in self.setups() if setup.row == row for run in self.runs(setup)
                if not (setup.program == "Mitchell" and setup.recipe == "sft")]
        steps = list(zip(*(run.losses for run in runs)))
        return max(max(step) - min(step) for step in steps) if len({run.setup.program for run in runs}) > 1 else None
