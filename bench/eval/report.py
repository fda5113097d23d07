#!/usr/bin/env python3
"""Makes bench/results/evaluation.json of the results of evaluate.py, and of that file the table and
the picture of docs/evaluation.md: report.py FOLDER. With --from-json: only table and picture."""

import argparse
import json
import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).parents[2]
JSON = ROOT / "bench/results/evaluation.json"
PAGE = ROOT / "docs/evaluation.md"
PICTURE = ROOT / "docs/evaluation.svg"
BEGIN, END = "<!-- table: ./dev eval -->", "<!-- end of table -->"
WINDOWS = {"prose": "#1f5fa8", "code": "#2f8f4e", "copy": "#8e44ad", "outliers": "#c0392b"}
LABELS = {"copy": "copy of random tokens", "outliers": "prose, outlier channels"}
GATES = ("", "ungated", "gated", "tight")  # FP16 has none


def collect(folder):
    """stage -> item -> configuration -> result, of items that FP16 was measured on."""
    stages = {}
    for path in sorted(folder.glob("*.json")):
        stage, item, _ = path.stem.split("-", 2)
        result = json.loads(path.read_text())
        del result["summary"]
        result.pop("token_ids", None)
        stages.setdefault(stage, {}).setdefault(item, {})[result.pop("configuration")] = result
    for stage, items in stages.items():
        stages[stage] = {item: r for item, r in items.items() if "FP16" in r}
    return stages


def configurations(stages):
    """All that have a window, FP16 first, then by format and gate."""
    names = {
        name
        for kind in WINDOWS
        for results in stages.get(kind, {}).values()
        for name in results
    }

    def place(name):
        form, _, gate = name.partition(" ")
        return name != "FP16", form, GATES.index(gate)

    return sorted(names, key=place)


def change_percent(window, base):
    return 100 * math.expm1((window["nll_sum"] - base["nll_sum"]) / base["token_count"])


def of_windows(items, configuration):
    """Changes against FP16 over the windows that have both, or None: percent of perplexity, its
    standard error, worst."""
    pairs = [
        (results[configuration], results["FP16"])
        for results in items.values()
        if configuration in results
    ]
    if not pairs:
        return None
    tokens = sum(base["token_count"] for _, base in pairs)
    mean = sum(one["nll_sum"] - base["nll_sum"] for one, base in pairs) / tokens
    # Stretches of 64 tokens as samples.
    samples = [a - b for one, base in pairs for a, b in zip(one["nll_of_64"], base["nll_of_64"])]
    centre = sum(samples) / len(samples)
    variance = sum((sample - centre) ** 2 for sample in samples) / max(1, len(samples) - 1)
    return {
        "windows": len(pairs),
        "tokens": tokens,
        "change": 100 * math.expm1(mean),
        "error": 100 * math.sqrt(variance / len(samples)),
        "worst_window": max(change_percent(one, base) for one, base in pairs),
        "worst_stretch": max(samples),
        "same_top": sum(one["same_top_token"] for one, _ in pairs)
        / sum(one["top_token_count"] for one, _ in pairs),
    }


def spread(made):
    """Cell of a change and its standard error."""
    if made is None:
        return ""
    return f"{made['change']:+.2f} ± {made['error']:.2f}"


def share(items, configuration, part, whole):
    results = [item[configuration] for item in items.values() if configuration in item]
    total = sum(whole(result) for result in results)
    return sum(part(result) for result in results) / total if total else 0.0


def natural_windows(stages):
    return {
        f"{kind}{item}": results
        for kind in ("prose", "code")
        for item, results in stages[kind].items()
    }


def row(stages, configuration):
    """Cells of the table of one configuration."""
    natural = natural_windows(stages)
    made = of_windows(natural, configuration)
    cells = [f"`{configuration}`" if configuration != "FP16" else "FP16"]
    cells.append(f"{made['tokens']:,}" if made else "0")
    cells += [spread(of_windows(stages[kind], configuration)) for kind in ("prose", "code")]
    if made:
        cells += [f"{made['worst_window']:+.2f}", f"{made['worst_stretch']:+.3f}"]
        cells.append(f"{100 * made['same_top']:.1f}")
    else:
        cells += ["", "", ""]
    copied = of_windows(stages.get("copy", {}), configuration)
    cells += [spread(copied), f"{100 * copied['same_top']:.1f}" if copied else ""]
    cells.append(spread(of_windows(stages.get("outliers", {}), configuration)))
    asked = [r[configuration] for r in stages.get("retrieval", {}).values() if configuration in r]
    right, digits = (sum(r[field] for r in asked) for field in ("right", "digit_count"))
    cells.append(f"{right} of {digits}" if asked else "")
    decoded = [r[configuration] for r in stages.get("greedy", {}).values() if configuration in r]
    cells.append(", ".join(str(r["first_other"]) for r in decoded))
    if configuration == "FP16" or not made:
        return cells + ["", "", ""]
    reads = lambda r: r["read_count"]
    accepted = share(natural, configuration, lambda r: r["rungs"][1] - r["observed_reads"], reads)
    again = share(natural, configuration, lambda r: r["repair_bytes"], lambda r: r["read_bytes"])
    took = share(natural, configuration, lambda r: r["read_us_per_token"] / 1000, lambda _: 1)
    return cells + [f"{100 * accepted:.1f}", f"{100 * again:.1f}", f"{took:.1f}"]


HEAD = (
    ("format, gate", ":--"),
    ("tokens", "--:"),
    ("prose, %", "--:"),
    ("code, %", "--:"),
    ("worst window, %", "--:"),
    ("worst 64 tokens, nats", "--:"),
    ("same first choice, %", "--:"),
    ("copy, %", "--:"),
    ("copy, same first choice, %", "--:"),
    ("outlier model, %", "--:"),
    ("digits found", "--:"),
    ("greedy, tokens until another", "--:"),
    ("certified at once, %", "--:"),
    ("read again, %", "--:"),
    ("reads, ms per token", "--:"),
)
HEAD_LINES = ([name for name, _ in HEAD], [rule for _, rule in HEAD])


def table(stages):
    rows = [row(stages, configuration) for configuration in configurations(stages)]
    # Columns of stages that were not run are left out.
    columns = [column for column in zip(*HEAD_LINES, *rows) if any(column[len(HEAD_LINES) :])]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in zip(*columns))
    counts = {kind: len(items) for kind, items in stages.items()}
    tokens = of_windows(natural_windows(stages), "FP16")["tokens"]
    note = (
        f"FP16: {counts['prose']} windows of prose and {counts['code']} of code, {tokens:,} tokens "
        "counted; a row with fewer had no time for all, and is compared with FP16 on its own "
        f"windows. {counts.get('copy', 0)} windows of copies, {counts.get('outliers', 0)} of the "
        f"outlier model, {counts.get('retrieval', 0)} questions, {counts.get('greedy', 0)} greedy "
        "continuations."
    )
    return text + "\n\n" + note + "\n"


# The picture: one column a configuration, one dot a window, on a scale that is linear around 0.


def height(percent):
    """Pixels above the line of 0."""
    return math.copysign(70 * math.log10(1 + abs(percent) / 0.1), percent)


def picture(stages):
    order = configurations(stages)[1:]
    dots = [
        (order.index(name), kind, change_percent(result, results["FP16"]))
        for kind in WINDOWS
        for results in stages.get(kind, {}).values()
        for name, result in results.items()
        if name in order
    ]
    top = max(height(p) for _, _, p in dots) + 25
    bottom = min(0, min(height(p) for _, _, p in dots)) - 15
    left, step = 70, 72
    width, tall = left + step * len(order) + 20, top - bottom + 90
    zero = top + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {tall:.0f}" '
        'font-family="DejaVu Sans, sans-serif" font-size="11">',
        f'<rect width="{width}" height="{tall:.0f}" fill="white"/>',
        f'<text x="{left}" y="16">Change of perplexity against FP16, %, of each window</text>',
    ]
    for percent in (-1, -0.1, 0, 0.1, 1, 10, 100, 1000, 10000, 100000):
        y = zero - height(percent)
        if not bottom <= height(percent) <= top:
            continue
        shade = "#888" if percent == 0 else "#ddd"
        parts.append(
            f'<line x1="{left}" x2="{width - 10}" y1="{y:.1f}" y2="{y:.1f}" stroke="{shade}"/>'
        )
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{percent:+g}</text>')
    shift = {kind: 12 * (i - 1.5) for i, kind in enumerate(WINDOWS)}
    for column, kind, percent in dots:
        x = left + step * (column + 0.5) + shift[kind]
        parts.append(
            f'<circle cx="{x:.1f}" cy="{zero - height(percent):.1f}" r="3.5" '
            f'fill="{WINDOWS[kind]}" fill-opacity="0.7"/>'
        )
    for column, name in enumerate(order):
        x, y = left + step * (column + 0.5), zero - bottom + 16
        for line, word in enumerate(name.split()):
            parts.append(
                f'<text x="{x:.1f}" y="{y + 14 * line:.1f}" text-anchor="middle">{word}</text>'
            )
    for i, (kind, colour) in enumerate(WINDOWS.items()):
        x, y = left + 150 * i, tall - 10
        label = LABELS.get(kind, kind)
        parts.append(f'<circle cx="{x + 4}" cy="{y - 4:.0f}" r="3.5" fill="{colour}"/>')
        parts.append(f'<text x="{x + 12}" y="{y:.0f}">{label}</text>')
    return "\n".join(parts + ["</svg>\n"])


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=pathlib.Path, nargs="?")
    parser.add_argument("--from-json", action="store_true")
    options = parser.parse_args()
    if not options.from_json:
        stages = collect(options.folder)
        lacking = [kind for kind in ("prose", "code") if not stages.get(kind)]
        if lacking:
            sys.exit(
                f"{options.folder} has no finished {', '.join(lacking)} yet; run evaluate.py on"
            )
        JSON.write_text(json.dumps(stages, indent=1, sort_keys=True) + "\n")
    stages = json.loads(JSON.read_text())
    page = PAGE.read_text()
    before, rest = page.split(BEGIN, 1)
    PAGE.write_text(before + BEGIN + "\n" + table(stages) + END + rest.split(END, 1)[1])
    PICTURE.write_text(picture(stages))


if __name__ == "__main__":
    main()
