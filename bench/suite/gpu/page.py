"""The page of results, in markdown."""

import statistics

from ..setups import TITLES
from ..tables import share, spread
from .results import GpuResults
from .setups import GpuSetup
from .targets import targets

# Steps whose losses are shown.
SHOWN = 8
# Steps of a try that are timed.
STEPS = (1, 2)


def page(record, all_results: list, source: str) -> str:
    about, options = record.about, record.about["options"]
    rates = [rates.best() / 1e12 for rates in record.rates]
    sheet = about["data_sheet"]
    lines = [
        "# DPO on one GPU: TRL and Tandem", "",
        f"Written by `bench/gpu` from [{source}]({source}), which has every step of every process. "
        "[bench/README.md](../../../bench/README.md#on-a-gpu) explains the terms.", "",
        *(f"    {command}" for command in about["commands"]), "",
        f"Machine: {about['machine']}. {about['versions']}; Tandem at {about['commit'] or 'an unknown commit'}.", "",
        *([f"bf16 matmuls: torch reaches {' / '.join(f'{rate:.0f}' for rate in rates)} TFLOP/s on large matrices, by repeat"
           + (f"; the data sheet of {sheet['name']} says {sheet['bf16_tflops']:.0f}." if sheet else "."), ""] if rates else []),
        *(["```text", about["nvidia_smi"].rstrip(), "```", ""] if about.get("nvidia_smi") else []),
        "## Targets", "", *targets(all_results), "",
    ]
    for results in all_results:
        task = results.task
        timed = task.steps - options["warmup"]
        lines += [f"## {task.name}", "", f"{task.describe()}; {task.load('dpo', 0).tokens} informative tokens in the first step. "
                  f"{task.steps} steps a process, {timed} timed.", ""]
        if not any(setup.program == "TRL" for setup in results.setups()):
            lines += ["**Without TRL**: none of its settings has run, as the candidates below say.", ""]
        lines += ratios(results) + setups(results)
        for row in results.rows():
            lines += losses(results, row)
        lines += tried(results)
    return "\n".join(lines).rstrip() + "\n"


def ratios(results: GpuResults) -> list:
    """Tandem beside each peer at its fastest."""
    rows = []
    for peer in ("TRL", "torchtune"):
        for row in results.rows():
            ratio = results.ratio(peer, row)
            if ratio:
                rows.append(f"| {TITLES[row[0]]} | {peer} | {spread(ratio)} | {results.best(peer, row).name} | "
                            f"{results.memory_beside_fastest(row, peer):.2f} | {results.memory(peer, row):.2f} |")
    if not rows:
        return []
    return ["| | peer | peer ÷ Tandem, time of a step: median (least to most) | fastest of the peer | GPU memory, Tandem ÷ that one | ÷ the peer's smallest set-up |",
            "|---|---|---|---|---|---|", *rows, ""]


def setups(results: GpuResults) -> list:
    task, record = results.task, results.record
    lines = ["| | s/step | pairs/s | informative tokens/s | utilisation of torch's matmul rate | of the data sheet's | GPU peak MiB | PyTorch reserved MiB | planned arena MiB | peak ÷ plan |",
             "|---|---|---|---|---|---|---|---|---|---|"]
    for setup in results.setups():
        runs = results.runs(setup)
        if not runs:
            failed = next(t for t in record.timings if t.task == task.name and t.setup == setup and t.error)
            lines.append(f"| {setup.name} | **failed**: {failed.error.replace('|', '/')} | | | | | | | | |")
            continue
        of_torch, of_sheet, beside = results.utilisation(setup), results.of_data_sheet(setup), results.beside_plan(setup)
        cells = [
            setup.name, f"{results.step_seconds(setup):.3f}", f"{results.speed(setup, lambda step: task.facts['pairs_per_step']):.2f}",
            f"{results.speed(setup, lambda step: task.load(setup.method, step).tokens):.0f}", share(of_torch) if of_torch else "",
            share(of_sheet) if of_sheet else "", mebibytes(results.peak(setup)), mebibytes(max(run.reserved_bytes for run in runs)),
            mebibytes(max(run.planned_bytes for run in runs)), f"{100 * beside:.1f} %" if beside else "",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    sources = {run.peak_source for setup in results.setups() for run in results.runs(setup)} - {""}
    note = f"The peak is {' or '.join(sorted(sources))} memory as the driver reports it." if sources else "No GPU: the peak is host memory."
    return [*lines, "", note, ""]


def losses(results: GpuResults, row: tuple) -> list:
    found = results.losses(row)
    if len(found) < 2:
        return []
    weights = "other random weights" if results.task.facts.get("weights") == "random" else "the same weights"
    lines = [f"Losses of the first steps, {TITLES[row[0]]}: the same pairs in the same order, {weights}.", "",
             "| step | " + " | ".join(found) + " |", "|---|" + "---|" * len(found)]
    steps = list(zip(*found.values()))[:SHOWN]
    lines += [f"| {step} | " + " | ".join(f"{loss:.4f}" for loss in values) + " |" for step, values in enumerate(steps, 1)]
    return [*lines, ""]


def tried(results: GpuResults) -> list:
    """Candidates for each program's settings: rates over the steps of a try, as far as the record has them."""
    task, rows = results.task, []
    for name, found in results.record.about["tried"].items():
        if not name.startswith(task.name + " "):
            continue
        recipe = name.removeprefix(task.name + " ")
        for setup, result in found.items():
            if not isinstance(result, dict):
                continue
            cells = ["", "", ""]
            if "seconds" in result:
                work = GpuSetup.of_text(setup.split()[0], recipe, result["try"])
                tokens = statistics.mean(task.load(work.method, step).tokens for step in STEPS)
                of_sheet = statistics.mean(results.sheet_share(work, step, result["seconds"]) or 0.0 for step in STEPS)
                cells = [f"{result['seconds']:.3f}", f"{tokens / result['seconds']:.0f}", f"{100 * of_sheet:.0f} %" if of_sheet else ""]
            elif "error" in result:
                cells[0] = result["error"].replace("|", "/")
            else:
                continue
            rows.append("| " + " | ".join([setup, *cells, mebibytes(result.get("bytes", 0))]) + " |")
    if not rows:
        return []
    return ["Candidate settings, three steps each, in the order of the search; TRL's memory is that of PyTorch's allocator:", "",
            "| | s/step | informative tokens/s | utilisation of the data sheet's rate | MiB |", "|---|---|---|---|---|", *rows, ""]


def mebibytes(count: int | None) -> str:
    return f"{count / 2**20:.0f}" if count else ""
