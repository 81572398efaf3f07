"""Bars of pairs a second, as SVG: a panel for each task and type, a group for each recipe."""

from html import escape

from .results import Results
from .setups import PROGRAMS

COLOURS = {"TRL": "#8b949e", "Mitchell": "#bf8700", "Tandem": "#2f81f7"}
PANEL, GAP, BAR, HEIGHT = 340, 36, 21, 130
STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328; }
  .small { font-size: 10px; }
  .title { font-size: 13px; font-weight: 600; }
  .line { stroke: #8b949e; }
  @media (prefers-color-scheme: dark) { text { fill: #e6edf3; } }
"""


def picture(all_results: list) -> str | None:
    """The SVG, or nothing where there is nothing to compare."""
    panels = [(results, type_) for results in all_results for type_ in ("f32", "bf16")]
    panels = [(results, type_, bars(results, type_)) for results, type_ in panels]
    panels = [panel for panel in panels if panel[2]]
    if not panels:
        return None
    columns = 2
    width = columns * PANEL + (columns + 1) * GAP
    rows = (len(panels) + columns - 1) // columns
    step = HEIGHT + 96
    body = [legend(width)]
    for index, (results, type_, groups) in enumerate(panels):
        x, y = GAP + index % columns * (PANEL + GAP), 40 + index // columns * step
        body.append(draw(f"{results.task.name}, {type_}", groups, x, y))
    height = 40 + rows * step
    return (f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img">\n'
            f"<title>Pairs (rows, for SFT) a second of TRL and Tandem</title>\n<style>{STYLE}</style>\n" + "\n".join(body) + "\n</svg>\n")


def bars(results: Results, type_: str) -> dict:
    """Pairs a second by recipe and program, a program at its fastest set-up."""
    groups = {}
    for recipe, row_type in results.rows():
        if row_type != type_:
            continue
        speeds = {}
        for setup in results.setups():
            speed = results.speed(setup, lambda step: results.task.facts["pairs_per_step"])
            if setup.row == (recipe, type_) and speed:
                speeds[setup.program] = max(speed, speeds.get(setup.program, 0.0))
        ratio = results.ratio("TRL", (recipe, type_))
        if speeds:
            groups[recipe] = (speeds, ratio and ratio.median)
    return groups


def legend(width: int) -> str:
    text, x = ['<text class="title" x="36" y="20">Pairs a second (SFT: rows), and how many times TRL’s</text>'], width - 250
    for program in PROGRAMS:
        text.append(f'<rect x="{x}" y="11" width="10" height="10" fill="{COLOURS[program]}"/>'
                    f'<text x="{x + 14}" y="20">{program}</text>')
        x += 80
    return "\n".join(text)


def draw(title: str, groups: dict, x: int, y: int) -> str:
    most = max(speed for speeds, _ in groups.values() for speed in speeds.values())
    text = [f'<text class="title" x="{x}" y="{y + 14}">{escape(title)}</text>']
    base, width = y + HEIGHT + 48, PANEL / len(groups)
    text.append(f'<line class="line" x1="{x}" y1="{base}" x2="{x + PANEL}" y2="{base}"/>')
    for number, (recipe, (speeds, ratio)) in enumerate(groups.items()):
        centre = x + (number + 0.5) * width
        left = centre - BAR * len(speeds) / 2
        programs = [program for program in PROGRAMS if program in speeds]
        for place, program in enumerate(programs):
            height = max(1.0, HEIGHT * speeds[program] / most)
            at = left + place * BAR
            text.append(f'<rect x="{at:.1f}" y="{base - height:.1f}" width="{BAR - 2}" height="{height:.1f}" fill="{COLOURS[program]}">'
                        f"<title>{program} {escape(recipe)}: {speeds[program]:.2f} pairs/s</title></rect>")
            text.append(f'<text class="small" text-anchor="middle" x="{at + BAR / 2 - 1:.1f}" y="{base - height - 4:.1f}">{short(speeds[program])}</text>')
        for line, word in enumerate(recipe.split("-")):
            text.append(f'<text class="small" text-anchor="middle" x="{centre:.1f}" y="{base + 13 + 11 * line}">{escape(word)}</text>')
        if ratio:
            tall = HEIGHT * max(speeds.values()) / most
            text.append(f'<text text-anchor="middle" x="{centre:.1f}" y="{base - tall - 17:.1f}">{ratio:.1f}×</text>')
    return "\n".join(text)


def short(value: float) -> str:
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"
