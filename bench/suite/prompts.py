"""Prompts that programs continue."""

import random


def made_prompts(count: int, vocabulary: int) -> list:
    """Prompts of random words, as long as those of UltraFeedback."""
    rng = random.Random(0)
    lengths = [min(300, max(8, round(rng.lognormvariate(4.25, 0.45)))) for _ in range(count)]
    return [[rng.randrange(4, vocabulary) for _ in range(length)] for length in lengths]
