"""Ways of taking a step on a GPU."""

import dataclasses
from dataclasses import dataclass

from ..setups import Setup

# What is measured of each size unless told otherwise.
RECIPES = {"tiny": ["full", "full-precompute", "lora", "sft"], "1B": ["full", "full-precompute", "sft"], "8B": ["lora", "qlora"]}
# TRL's types of weights: `autocast` keeps them in f32 and multiplies in bf16, as Tandem does.
DTYPES = {"full": ["bf16", "autocast"], "sft": ["bf16", "autocast"], "lora": ["bf16"], "qlora": ["bf16"]}
# Attention of TRL's models, the one that should be fastest first (`trl_attention.py` explains them).
ATTENTIONS = ["fa4", "fa2", "varlen", "cudnn", "sdpa", "flex"]
# Pairs at a time of torchtune's LoRA recipe, which computes whole logits; the most that run are taken.
TORCHTUNE = [8, 4, 2, 1]
# Rows of a batch padded to the longest; one after another without padding; packed to sequences of the greatest length.
BATCHINGS = ["padded", "padding-free", "packing"]
# Tokens of Tandem's micro-batches.
MICRO_BATCHES = [4096, 8192, 16384, 32768]


@dataclass(frozen=True)
class GpuSetup(Setup):
    """One program with one choice of what it leaves to the user."""

    recompute: str = "none"  # Tandem's word; TRL's gradient checkpointing is `block`
    batch: int = 0  # TRL: pairs or rows at a time; Tandem: tokens of a micro-batch
    is_liger: bool = False
    batching: str = "padded"  # of TRL

    @property
    def name(self) -> str:
        unit = "tokens" if self.program == "Tandem" else "rows" if self.recipe == "sft" else "pairs"
        recompute = [] if self.recompute == "none" else [f"recompute={self.recompute}"]
        return " ".join([self.program, self.recipe, self.dtype, f"{self.batch} {unit}", *recompute, *self.words()])

    def words(self) -> list:
        """Settings that are not the plain ones."""
        attention = [self.attention] if self.attention not in ("", "sdpa") else []
        liger = ["liger"] if self.is_liger else []
        return [*attention, *liger, *([self.batching] if self.batching != "padded" else [])]

    @property
    def is_plain(self) -> bool:
        return not self.words()

    @property
    def type(self) -> str:
        return "bf16"

    @property
    def text(self) -> str:
        """As the command line takes it."""
        return ",".join([self.dtype, self.recompute, str(self.batch), *self.words()])

    @classmethod
    def of_text(cls, program: str, recipe: str, text: str) -> "GpuSetup":
        dtype, recompute, batch, *words = text.split(",")
        setup = cls(program, recipe, dtype, "sdpa" if program != "Tandem" else "", recompute, int(batch))
        for word in words:
            change = ({"is_liger": True} if word == "liger" else {"attention": word} if word in ATTENTIONS
                      else {"batching": word} if word in BATCHINGS else None)
            if change is None or program != "TRL":
                raise ValueError(f"{text}: {word} is none of liger, {', '.join([*ATTENTIONS, *BATCHINGS])}, which TRL can have")
            setup = dataclasses.replace(setup, **change)
        return setup


def of_tandem(recipe: str) -> list:
    return [GpuSetup("Tandem", recipe, "bf16", "", recompute, tokens)
            for recompute in ("none", "selective", "block") for tokens in MICRO_BATCHES]
