"""Search for TRL's fastest settings: one setting at a time is changed, and kept where steps get faster. Most of what could be combined is
never faster than its parts, and a GPU is often lent for minutes."""

import math
from dataclasses import replace

from .setups import DTYPES, GpuSetup

# Pairs or rows at a time with which attention is chosen: enough to fill a GPU, and few enough to fit.
START = 8
# Attention that takes rows without padding; the others see a mask of all of them.
WITHOUT_PADDING = ["fa4", "fa2", "varlen", "flex"]


def search(recipe: str, rows: int, attentions: list, has_liger: bool, seconds) -> None:
    """Calls `seconds` with one set-up after another, the one that should be fastest first. It returns the seconds of a step, and infinity
    where the set-up does not run. `rows` are the pairs or rows of a step."""
    batches = [batch for batch in (1, 2, 4, 8, 16, 32) if batch <= rows and rows % batch == 0]
    best = None
    for dtype in DTYPES[recipe.removesuffix("-precompute")]:
        if best is None:
            start = max(batch for batch in batches if batch <= START)
            best = first(GpuSetup("TRL", recipe, dtype, batch=start, is_liger=has_liger), attentions, batches, seconds)
            if best is None:
                continue
            if recipe == "sft":
                runs = [name for name in attentions if name in WITHOUT_PADDING and seconds(replace(best, attention=name)) < math.inf]
                unpadded = [replace(best, batching=batching, attention=name) for batching in ("padding-free", "packing") for name in runs]
                best = min([best, *unpadded], key=seconds)
            best = more(best, batches, seconds)
            if has_liger:
                best = min([best, replace(best, is_liger=False)], key=seconds)
            # Recomputation makes room for larger batches.
            best = min([best, more(replace(best, recompute="block", batch=min(2 * best.batch, batches[-1])), batches, seconds)], key=seconds)
        else:
            more(fewer(replace(best, dtype=dtype), batches, seconds), batches, seconds)
        # What a user gets who sets nothing.
        seconds(fewer(replace(best, dtype=dtype, attention="sdpa", is_liger=False, batching="padded", recompute="none"), batches, seconds))


def first(start: GpuSetup, attentions: list, batches: list, seconds) -> GpuSetup | None:
    """The fastest attention; with fewer rows at a time where none has run."""
    for batch in reversed([batch for batch in batches if batch <= start.batch]):
        for is_liger in dict.fromkeys([start.is_liger, False]):
            tried = [replace(start, batch=batch, attention=attention, is_liger=is_liger) for attention in attentions]
            best = min(tried, key=seconds)
            if seconds(best) < math.inf:
                return best
    return None


def more(setup: GpuSetup, batches: list, seconds) -> GpuSetup:
    """More rows at a time, while that makes steps faster."""
    for batch in [batch for batch in batches if batch > setup.batch]:
        larger = replace(setup, batch=batch)
        if seconds(larger) >= seconds(setup):
            break
        setup = larger
    return setup


def fewer(setup: GpuSetup, batches: list, seconds) -> GpuSetup:
    """The same set-up, with fewer rows at a time where it does not run."""
    for batch in reversed([batch for batch in batches if batch <= setup.batch]):
        setup = replace(setup, batch=batch)
        if seconds(setup) < math.inf:
            break
    return setup
