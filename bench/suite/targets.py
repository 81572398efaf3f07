"""What Tandem is meant to reach, beside what was measured."""

from .results import Results

UTILISATION = {"f32": 0.65, "bf16": 0.55}
PRODUCTS = 0.85
MEMORY = 0.4
LONG_PROMPT = 7.0
FULL = {"f32": 5.0, "bf16": 4.0}
LORA = 5.0


def targets(all_results: list) -> list:
    """A table: a target, what each task measured, and whether all of them hold."""
    lines = ["| | target | measured | |", "|---|---|---|---|"]

    def line(what: str, target: float, form, value, at_most: bool = False, keep=lambda results: True) -> None:
        found = [(results.task.name, value(results)) for results in all_results if keep(results)]
        found = [(name, number) for name, number in found if number is not None]
        holds = [number <= target if at_most else number >= target for _, number in found]
        verdict = "not measured" if not found else "held" if all(holds) else "**missed**" if not any(holds) else "**held in part**"
        measured = ", ".join(f"{name} {form(number)}" for name, number in found)
        lines.append(f"| {what} | {'≤' if at_most else '≥'} {form(target)} | {measured} | {verdict} |")

    def percent(value: float) -> str:
        return f"{100 * value:.0f} %"

    def times(value: float) -> str:
        return f"{value:.1f}×"

    def is_long_prompt(results: Results) -> bool:
        return results.task.shape == "long-prompt"

    for type_ in UTILISATION:
        line(f"products of a step together, {type_}, of the best rate of any library", PRODUCTS, percent,
             lambda results: median(results.product_share(type_)))
        line(f"the worst single product, {type_}", PRODUCTS, percent, lambda results: results.worst_product(type_))
    for type_, target in UTILISATION.items():
        line(f"DPO with reference model, {type_}: model-FLOP utilisation of the model of about 100 M", target, percent,
             lambda results: median(best_utilisation(results, type_)), keep=lambda results: results.task.size == "M")
    for type_, target in FULL.items():
        line(f"DPO with reference model, {type_}: pairs/s against TRL", target, times,
             lambda results: median(results.ratio("TRL", ("full", type_))), keep=lambda results: not is_long_prompt(results))
    for type_ in FULL:
        line(f"the same on long shared prompts, {type_}", LONG_PROMPT, times,
             lambda results: median(results.ratio("TRL", ("full", type_))), keep=is_long_prompt)
    for type_ in FULL:
        line(f"LoRA, {type_}: pairs/s against TRL", LORA, times, lambda results: median(results.ratio("TRL", ("lora", type_))))
    line("peak memory, Tandem ÷ TRL, the worst row", MEMORY, lambda value: f"{value:.2f}", worst_memory, at_most=True)
    return lines


def median(spread):
    return spread and spread.median


def best_utilisation(results: Results, type_: str):
    setups = [setup for setup in results.setups() if setup.program == "Tandem" and setup.row == ("full", type_)]
    return results.utilisation(setups[0]) if setups else None


def worst_memory(results: Results):
    return max((share for row in results.rows() if (share := results.memory("TRL", row))), default=None)
