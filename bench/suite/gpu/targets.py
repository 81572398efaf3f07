"""Targets of Tandem on a GPU, and measured values."""

UTILISATION = 0.5
SPEED = 2.0
MEMORY = 0.6
# How far the peak may be from the plan.
PLAN = 0.05
# Rows with a target of utilisation: size and recipe.
UTILISED = [("1B", "full-precompute"), ("8B", "lora")]


def targets(all_results: list) -> list:
    """Table of targets: measured value of each row, and verdict."""
    lines = ["| | target | measured | |", "|---|---|---|---|"]
    rows = [(results, row) for results in all_results for row in results.rows()]

    def line(what: str, target: str, holds, form, value, keep=lambda results, row: True) -> None:
        found = [(f"{results.task.name} {row[0]}", number) for results, row in rows
                 if keep(results, row) and (number := value(results, row)) is not None]
        kept = [holds(number) for _, number in found]
        verdict = "not measured" if not kept else "met" if all(kept) else "**missed**" if not any(kept) else "**partly met**"
        measured = ", ".join(f"{name} {form(number)}" for name, number in found)
        lines.append(f"| {what} | {target} | {measured} | {verdict} |")

    def is_utilised(results, row) -> bool:
        return (results.task.size, row[0]) in UTILISED

    for what, share in (("the data sheet's rate", "of_data_sheet"), ("torch's matmul rate", "utilisation")):
        line(f"model-FLOP utilisation, of {what}", f"≥ {percent(UTILISATION)}", lambda number: number >= UTILISATION, percent,
             lambda results, row: median_of(results, row, share), is_utilised)
    line("pairs/s, Tandem ÷ TRL", f"≥ {SPEED:.1f}×", lambda number: number >= SPEED, lambda number: f"{number:.1f}×",
         lambda results, row: (ratio := results.ratio("TRL", row)) and ratio.median)
    line("GPU memory, Tandem ÷ fastest TRL", f"≤ {MEMORY}", lambda number: number <= MEMORY, lambda number: f"{number:.2f}",
         lambda results, row: results.memory_beside_fastest(row), lambda results, _: results.record.about["options"]["device"] == "cuda")
    line("peak of GPU memory ÷ plan", f"within {percent(PLAN)}", lambda number: abs(number - 1) <= PLAN,
         lambda number: f"{100 * number:.1f} %", lambda results, row: (ours := results.best("Tandem", row)) and results.beside_plan(ours))
    return lines


def median_of(results, row: tuple, share: str) -> float | None:
    """Value of Tandem's best set-up of a row."""
    ours = results.best("Tandem", row)
    found = getattr(results, share)(ours) if ours else None
    return found.median if found else None


def percent(value: float) -> str:
    return f"{100 * value:.0f} %"
