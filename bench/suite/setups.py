"""Ways of taking a step, and which of them are compared with which."""

from dataclasses import dataclass

# What is trained and with which reference. `model`: a second model in memory; `precompute`: its log-probabilities are
# known before the first step; `base`: the policy without its adapter.
RECIPES = {
    "full": ("full", "model"),
    "full-precompute": ("full", "precompute"),
    "lora": ("lora", "base"),
    "lora-precompute": ("lora", "precompute"),
    "qlora": ("qlora", "base"),
    "qlora-precompute": ("qlora", "precompute"),
    "sft": ("full", "none"),
}
DEFAULT_RECIPES = ["full", "full-precompute", "lora", "qlora", "sft"]
TITLES = {
    "full": "DPO, reference model",
    "full-precompute": "DPO, precomputed reference",
    "lora": "DPO, LoRA r16",
    "lora-precompute": "DPO, LoRA r16, precomputed reference",
    "qlora": "DPO, QLoRA r16",
    "qlora-precompute": "DPO, QLoRA r16, precomputed reference",
    "sft": "SFT",
}
PROGRAMS = ["TRL", "Mitchell", "Tandem"]


@dataclass(frozen=True)
class Setup:
    """One program in one configuration."""

    program: str
    recipe: str
    dtype: str  # f32, bf16 or TRL's autocast
    attention: str = ""  # of TRL

    @property
    def name(self) -> str:
        return " ".join(part for part in (self.program, self.recipe, self.dtype, self.attention) if part)

    @property
    def adapter(self) -> str:
        return RECIPES[self.recipe][0]

    @property
    def reference(self) -> str:
        return RECIPES[self.recipe][1]

    @property
    def method(self) -> str:
        return "sft" if self.recipe == "sft" else "dpo"

    @property
    def type(self) -> str:
        """The type of the products."""
        return "f32" if self.dtype == "f32" else "bf16"

    @property
    def row(self) -> tuple[str, str]:
        """Set-ups of one row do the same work in the same type and are compared."""
        return (self.recipe, self.type)


def all_setups() -> list[Setup]:
    """Rows one after the other, so that what is compared runs close together."""
    setups = []
    for recipe in RECIPES:
        # TRL's `bf16` keeps weights and optimiser in bf16; `autocast` (bf16=True) keeps them in f32, as Tandem's bf16 does.
        for type_, dtypes in (("f32", ["f32"]), ("bf16", ["autocast", "bf16"])):
            setups += [Setup("TRL", recipe, dtype, "sdpa") for dtype in dtypes]
            if recipe == "full":
                setups.append(Setup("TRL", recipe, type_, "eager"))
            if recipe in ("full", "sft"):
                setups.append(Setup("Mitchell", recipe, type_))
            setups.append(Setup("Tandem", recipe, type_))
    return setups
