"""The page of results, in markdown."""

import statistics

from .rates import DIRECTIONS, LIBRARIES, flops_of
from .results import Results, Spread
from .setups import TITLES
from .targets import targets

# Share of the threads. A program that used less was disturbed.
QUIET = 0.85


def page(record, all_results: list, picture: str | None, source: str) -> str:
    about, options = record.about, record.about["options"]
    commands = "\n".join(f"    {command}" for command in about["commands"])
    lines = [
        "# DPO and SFT on the CPU: TRL and Tandem", "",
        f"Written by `bench/run` from [{source}]({source}), which has every step of every process. "
        "[bench/README.md](../../bench/README.md) explains the terms.", "",
        commands, "",
        f"Machine: {about['machine']}. {options['threads']} threads. {about['versions']}; Tandem at {about['commit']}.",
    ]
    if about["torch_environment"]:
        level = ", ".join(f"{name}={value}" for name, value in about["torch_environment"].items())
        lines += ["", f"**The bf16 ratios favour Tandem**: on this machine torch crashes in a bf16 matmul, so its instruction set is "
                  f"limited ({level}) and its bf16 matmuls run without AMX."]
    lines += ["", "## Targets", "", *targets(all_results), ""]
    if picture:
        lines += [f"![Pairs a second]({picture})", ""]
    for results in all_results:
        lines += section(results)
    return "\n".join(lines).rstrip() + "\n"


def section(results: Results) -> list:
    task = results.task
    repeats = max(len(results.runs(setup)) for setup in results.setups())
    lines = [f"## {task.name}", "", f"{task.describe()}. {task.steps} steps a process, {len(results.steps)} timed; "
             f"{f'up to {repeats} repeats' if repeats > 1 else 'one repeat'}; {task.load('dpo', 0).tokens} informative tokens in the first step.", ""]
    lines += ratios(results, "TRL") + ratios(results, "Mitchell") + full_beside_adapters(results)
    lines += setups(results) + products(results)
    return lines


def ratios(results: Results, peer: str) -> list:
    rows = []
    for row in results.rows():
        ratio = results.ratio(peer, row)
        if ratio:
            any_type, memory = results.ratio(peer, row, any_type=True), results.memory(peer, row)
            distance = results.loss_distance(row)
            rows.append(f"| {TITLES[row[0]]}, {row[1]} | {spread(ratio)} | {results.best_setup(peer, row)} | "
                        f"{any_type.median:.2f} | {memory:.2f} | {'' if distance is None else f'{distance:.0e}'} |")
    if not rows:
        return []
    return [f"Speed of Tandem relative to {peer}, which runs the fastest of its set-ups in each repeat: median (least to most), or one repeat.", "",
            f"| | {peer} ÷ Tandem, time of a step | fastest {peer} | {peer} of any type ÷ Tandem | memory, Tandem ÷ {peer} | largest difference of losses |",
            "|---|---|---|---|---|---|", *rows, ""]


def full_beside_adapters(results: Results) -> list:
    """Time of Tandem's full training relative to its adapters."""
    rows = []
    for type_ in ("f32", "bf16"):
        for recipe in ("lora", "qlora", "lora-precompute", "qlora-precompute"):
            full = "full-precompute" if recipe.endswith("precompute") else "full"
            ratios = []
            for repeat in results.repeats():
                runs = [results.fastest("Tandem", (name, type_), repeat) for name in (full, recipe)]
                if all(runs):
                    pairs = zip(*(results.seconds(run) for run in runs), strict=True)
                    ratios.append(statistics.median(a / b for a, b in pairs))
            if ratios:
                rows.append(f"| {TITLES[recipe]}, {type_} | {spread(Spread.of(ratios))} |")
    if not rows:
        return []
    return ["Tandem, time per step, full training ÷ adapter:", "", "| | median (least to most) |", "|---|---|", *rows, ""]


def setups(results: Results) -> list:
    task, record = results.task, results.record
    lines = ["| | s/step | cores used | pairs or rows/s | informative tokens/s | real tokens/s | model-FLOP utilisation | peak MiB | last loss |",
             "|---|---|---|---|---|---|---|---|---|"]
    for setup in results.setups():
        failed = [t for t in record.timings if t.task == task.name and t.setup == setup and t.error]
        runs = results.runs(setup)
        if not runs:
            lines.append(f"| {setup.name} | **failed**: {failed[0].error.replace('|', '/')} | | | | | | | |")
            continue
        use = results.utilisation(setup)
        lines.append(
            f"| {setup.name} | {results.step_seconds(setup):.3f} | {results.cores(setup):.2f} | "
            f"{results.speed(setup, lambda step: task.facts['pairs_per_step']):.2f} | "
            f"{results.speed(setup, lambda step: task.load(setup.method, step).tokens):.0f} | "
            f"{results.speed(setup, lambda step: task.real_tokens(setup.method, step)):.0f} | "
            f"{'' if use is None else share(use)} | {results.peak(setup) / 2**20:.0f} | {runs[0].losses[-1]:.4f} |")
    threads = record.about["options"]["threads"]
    disturbed = [setup.name for setup in results.setups() if (results.cores(setup) or threads) < QUIET * threads]
    if disturbed:
        lines += ["", f"**Disturbed**: another program ran at the same time as {', '.join(disturbed)}. Their times are not valid, "
                  "nor are their utilisations."]
    return [*lines, ""]


def products(results: Results) -> list:
    """Matmul rate that utilisation refers to, and its parts."""
    record, task, lines = results.record, results.task, []
    for type_ in ("f32", "bf16"):
        found = [rates for repeat in results.repeats() if (rates := record.rate(task.name, repeat, type_))]
        if not found:
            continue
        best = Spread.of([rates.best(task) / 1e9 for rates in found])
        alone = {library: [rate / 1e9 for rates in found if (rate := rates.of(library, task))] for library in LIBRARIES}
        alone = ", ".join(f"{library} alone {statistics.median(values):.0f}" for library, values in alone.items() if values)
        lines.append(f"* {type_}: {best.median:.0f} GFLOP/s ({best.least:.0f} to {best.most:.0f}), each matmul by the library that is "
                     f"fastest at it ({found[0].winners()}); {alone}.")
    if not lines:
        return []
    lines = ["Matmul rate that utilisation refers to, measured in the same repeats at this task's shapes:", "", *lines, "",
             "| tokens × inputs × outputs, GFLOP/s of Tandem / torch | " + " | ".join(DIRECTIONS.values()) + " |",
             "|---|---|---|---|"]
    shapes = ["x".join(map(str, shape)) for shape in task.products()]
    for type_ in ("f32", "bf16"):
        for shape in shapes:
            cells = []
            for direction in DIRECTIONS:
                name = f"{direction} {type_} {shape}"
                times = [rates.seconds[name] for rates in record.rates if rates.task == task.name and name in rates.seconds]
                cells.append(" / ".join(rate_of(name, library, times) for library in LIBRARIES) if times else "")
            if any(cells):
                lines.append(f"| {type_} {shape.replace('x', ' × ')} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def rate_of(name: str, library: str, times: list) -> str:
    """Rate of one matmul, in GFLOP/s."""
    values = [flops_of(name) / time[library] / 1e9 for time in times if library in time]
    return f"{statistics.median(values):.0f}" if values else "–"


def spread(value: Spread) -> str:
    if value.least == value.most:
        return f"{value.median:.2f}"
    return f"{value.median:.2f} ({value.least:.2f} to {value.most:.2f})"


def share(value: Spread) -> str:
    if value.least == value.most:
        return f"{100 * value.median:.0f} %"
    return f"{100 * value.median:.0f} % ({100 * value.least:.0f} to {100 * value.most:.0f})"
