"""Ways of taking a step on a GPU, and which of them are tried."""

from dataclasses import dataclass

from ..setups import Setup

# What is measured of each size unless told otherwise.
RECIPES = {"tiny": ["full", "full-precompute", "lora"], "1B": ["full", "full-precompute"], "8B": ["lora", "qlora"]}
# TRL's types of weights: `autocast` keeps them in f32 and multiplies in bf16, as Tandem does.
DTYPES = {"full": ["autocast", "bf16"], "lora": ["bf16"], "qlora": ["bf16"]}
# Tokens of Tandem's micro-batches.
MICRO_BATCHES = [4096, 8192, 16384, 32768]


@dataclass(frozen=True)
class GpuSetup(Setup):
    """One program with one choice of what it leaves to the user."""

    recompute: str = "none"  # Tandem's word; TRL's gradient checkpointing is `block`
    batch: int = 0  # TRL: pairs at a time; Tandem: tokens of a micro-batch
    is_liger: bool = False

    @property
    def name(self) -> str:
        unit = "tokens" if self.program == "Tandem" else "pairs"
        words = (self.program, self.recipe, self.dtype, self.settings(unit))
        return " ".join(words)

    def settings(self, unit: str) -> str:
        recompute = "" if self.recompute == "none" else f" recompute={self.recompute}"
        return f"{self.batch} {unit}{recompute}{' liger' if self.is_liger else ''}"

    @property
    def type(self) -> str:
        return "bf16"

    @property
    def tried(self) -> str:
        """As `trl_try.py` and the command line take it."""
        return ",".join([self.dtype, self.recompute, str(self.batch), *(["liger"] if self.is_liger else [])])

    @classmethod
    def of_text(cls, program: str, recipe: str, text: str) -> "GpuSetup":
        dtype, recompute, batch, *liger = text.split(",")
        return cls(program, recipe, dtype, "sdpa" if program == "TRL" else "", recompute, int(batch), "liger" in liger)


def of_trl(recipe: str, pairs: int, has_liger: bool) -> list:
    """Set-ups to try; of those that differ in the batch alone the smallest comes first. Fewer pairs at a time are for where more
    do not fit."""
    batches = [batch for batch in (1, 2, 4, 8, 16, 32) if batch <= pairs and pairs % batch == 0]

    def at_least(least: int) -> list:
        return [batch for batch in batches if batch >= least] or batches[-1:]

    return [GpuSetup("TRL", recipe, dtype, "sdpa", recompute, batch, is_liger)
            for dtype in DTYPES[recipe.removesuffix("-precompute")]
            for is_liger in ([False, True] if has_liger else [False])
            for recompute in ("none", "block")
            for batch in at_least(4 if is_liger or recompute == "block" else 2)]


def of_tandem(recipe: str) -> list:
    return [GpuSetup("Tandem", recipe, "bf16", "", recompute, tokens)
            for recompute in ("none", "selective", "block") for tokens in MICRO_BATCHES]
