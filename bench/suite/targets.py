"""Targets of Tandem, and measured values."""

from .results import Results

UTILISATION = {"f32": 0.65, "bf16": 0.55}
PRODUCTS = 0.85
MEMORY = 0.4
LONG_PROMPT = 7.0
FULL = {"f32": 5.0, "bf16": 4.0}
LORA = 5.0


def targets(all_results: list) -> list:
    """Table of targets: measured value of each task, bound at the matmul rate, and verdict."""
    lines = ["| | target | measured | bound | |", "|---|---|---|---|---|"]

    def listed(value, form, keep) -> tuple:
        found = [(results.task.name, value(results)) for results in all_results if keep(results)]
        found = [(name, number) for name, number in found if number is not None]
        return found, ", ".join(f"{name} {form(number)}" for name, number in found)

    def line(what: str, target: float, form, value, at_most: bool = False, keep=lambda results: True, bound=lambda results: None) -> None:
        found, measured = listed(value, form, keep)
        holds = [number <= target if at_most else number >= target for _, number in found]
        verdict = "not measured" if not found else "met" if all(holds) else "**missed**" if not any(holds) else "**partly met**"
        lines.append(f"| {what} | {'≤' if at_most else '≥'} {form(target)} | {measured} | {listed(bound, form, keep)[1]} | {verdict} |")

    def ratio(what: str, target: float, row: tuple, keep=lambda results: True) -> None:
        line(what, target, times, lambda results: median(results.ratio("TRL", row)), keep=keep, bound=lambda results: most(results, row))

    def percent(value: float) -> str:
        return f"{100 * value:.0f} %"

    def times(value: float) -> str:
        return f"{value:.1f}×"

    def is_long_prompt(results: Results) -> bool:
        return results.task.shape == "long-prompt"

    for type_ in UTILISATION:
        line(f"all matmuls of a step, {type_}, relative to the fastest library", PRODUCTS, percent,
             lambda results: median(results.product_share(type_)))
        line(f"slowest single matmul, {type_}, relative to the fastest library", PRODUCTS, percent, lambda results: results.worst_product(type_))
    for type_, target in UTILISATION.items():
        line(f"DPO with reference model, {type_}: model-FLOP utilisation, about 100 M parameters", target, percent,
             lambda results: median(utilisation(results, ("full", type_))), keep=lambda results: results.task.size == "M")
    for type_, target in FULL.items():
        ratio(f"DPO with reference model, {type_}: pairs/s, Tandem ÷ TRL", target, ("full", type_), lambda results: not is_long_prompt(results))
    for type_ in FULL:
        ratio(f"DPO with reference model, long shared prompts, {type_}: pairs/s, Tandem ÷ TRL", LONG_PROMPT, ("full", type_), is_long_prompt)
    for type_ in FULL:
        ratio(f"LoRA, {type_}: pairs/s, Tandem ÷ TRL", LORA, ("lora", type_))
    line("peak memory, Tandem ÷ TRL, worst row", MEMORY, lambda value: f"{value:.2f}", worst_memory, at_most=True)
    return lines


def median(spread):
    return spread and spread.median


def utilisation(results: Results, row: tuple):
    setups = [setup for setup in results.setups() if setup.program == "Tandem" and setup.row == row]
    return results.utilisation(setups[0]) if setups else None


def most(results: Results, row: tuple):
    """Ratio to TRL if Tandem only did the useful operations, at the matmul rate."""
    ratio, used = median(results.ratio("TRL", row)), median(utilisation(results, row))
    return ratio / used if ratio and used else None


def worst_memory(results: Results):
    return max((share for row in results.rows() if (share := results.memory("TRL", row))), default=None)
