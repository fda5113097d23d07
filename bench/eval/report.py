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
WINDOWS = {"prose": "#1f5fa8", "code": "#2f8f4e", "outliers": "#c0392b"}


def collect(folder):
    """stage -> item -> configuration -> result, of items whose configurations are all there."""
    stages = {}
    for path in sorted(folder.glob("*.json")):
        stage, item, _ = path.stem.split("-", 2)
        result = json.loads(path.read_text())
        del result["summary"]
        stages.setdefault(stage, {}).setdefault(item, {})[result.pop("configuration")] = result
    for stage, items in stages.items():
        most = max(len(results) for results in items.values())
        stages[stage] = {item: r for item, r in items.items() if len(r) == most}
    return stages


def change_percent(window, base):
    return 100 * math.expm1((window["nll_sum"] - base["nll_sum"]) / base["token_count"])


def of_windows(items, configuration):
    """Changes against FP16 over some windows: percent of perplexity, its standard error, worst."""
    pairs = [(results[configuration], results["FP16"]) for results in items.values()]
    tokens = sum(base["token_count"] for _, base in pairs)
    mean = sum(one["nll_sum"] - base["nll_sum"] for one, base in pairs) / tokens
    # Stretches of 64 tokens as samples.
    samples = [a - b for one, base in pairs for a, b in zip(one["nll_of_64"], base["nll_of_64"])]
    centre = sum(samples) / len(samples)
    variance = sum((sample - centre) ** 2 for sample in samples) / max(1, len(samples) - 1)
    return {
        "change": 100 * math.expm1(mean),
        "error": 100 * math.sqrt(variance / len(samples)),
        "worst_window": max(change_percent(one, base) for one, base in pairs),
        "worst_stretch": max(samples),
        "same_top": sum(one["same_top_token"] for one, _ in pairs)
        / sum(one["top_token_count"] for one, _ in pairs),
    }


def has(items, configuration):
    return all(configuration in results for results in items.values())


def share(items, configuration, part, whole):
    results = [item[configuration] for item in items.values() if configuration in item]
    total = sum(whole(result) for result in results)
    return sum(part(result) for result in results) / total if total else 0.0


def row(stages, configuration):
    """Cells of the table of one configuration."""
    natural = {
        f"{kind}{item}": results
        for kind in ("prose", "code")
        for item, results in stages.get(kind, {}).items()
    }
    cells = [f"`{configuration}`" if configuration != "FP16" else "FP16"]
    for kind in ("prose", "code"):
        made = of_windows(stages[kind], configuration)
        cells.append(f"{made['change']:+.2f} ± {made['error']:.2f}")
    made = of_windows(natural, configuration)
    cells += [
        f"{made['worst_window']:+.2f}",
        f"{made['worst_stretch']:+.3f}",
        f"{100 * made['same_top']:.1f}",
    ]
    if has(stages["outliers"], configuration):
        outliers = of_windows(stages["outliers"], configuration)["change"]
        cells.append(f"{outliers:+.2f}" if abs(outliers) < 100 else f"{outliers:+.0f}")
    else:
        cells.append("")
    for stage in ("retrieval", "needles"):
        right, asked = (lambda r: r["right"]), (lambda r: r["digit_count"])
        found = share(stages[stage], configuration, right, asked)
        cells.append(f"{100 * found:.0f}" if has(stages[stage], configuration) else "")
    if configuration == "FP16":
        return cells + ["", ""]
    reads = lambda r: r["read_count"]
    accepted = share(natural, configuration, lambda r: r["rungs"][1] - r["observed_reads"], reads)
    again = share(natural, configuration, lambda r: r["repair_bytes"], lambda r: r["read_bytes"])
    return cells + [f"{100 * accepted:.1f}", f"{100 * again:.1f}"]


HEAD = (
    ("format, gate", ":--"),
    ("prose, %", "--:"),
    ("code, %", "--:"),
    ("worst window, %", "--:"),
    ("worst 64 tokens, nats", "--:"),
    ("same first choice, %", "--:"),
    ("outlier model, %", "--:"),
    ("digits found, %", "--:"),
    ("the same, outlier model, %", "--:"),
    ("certified at once, %", "--:"),
    ("read again, %", "--:"),
)


def table(stages):
    order = list(next(iter(stages["prose"].values())))
    lines = [[name for name, _ in HEAD], [rule for _, rule in HEAD]]
    order.sort(
        key=lambda name: (
            name != "FP16",
            name.split()[0],
            "ungated gated tight".find(name.split()[-1]),
        )
    )
    lines += [row(stages, configuration) for configuration in order]
    text = "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
    counts = {kind: len(items) for kind, items in stages.items()}
    tokens = sum(
        r["FP16"]["token_count"] for k in WINDOWS if k != "outliers" for r in stages[k].values()
    )
    note = (
        f"{counts['prose']} windows of prose, {counts['code']} of code, {counts['outliers']} of "
        f"the outlier model, {counts['retrieval']} questions; {tokens:,} tokens are counted in "
        "prose and code."
    )
    greedy = stages.get("greedy", {}).get("00", {})
    said = [
        f"`{name}` {result['first_other']}"
        for name, result in sorted(greedy.items())
        if name != "FP16"
    ]
    if said:
        count = next(iter(greedy.values()))["token_count"]
        note += (
            f"\n\nGreedy decoding of {count} tokens with `certkv.transformers`, tokens until the "
            f"first that FP16 doesn't choose: {', '.join(said)}."
        )
    return text + "\n\n" + note + "\n"


# The picture: one column a configuration, one dot a window, on a scale that is linear around 0.


def height(percent):
    """Pixels above the line of 0."""
    return math.copysign(70 * math.log10(1 + abs(percent) / 0.1), percent)


def picture(stages):
    order = [name for name in sorted(next(iter(stages["prose"].values()))) if name != "FP16"]
    order.sort(key=lambda name: (name.split()[0], "ungated gated tight".find(name.split()[1])))
    dots = [
        (order.index(name), kind, change_percent(result, results["FP16"]))
        for kind in WINDOWS
        for results in stages.get(kind, {}).values()
        for name, result in results.items()
        if name != "FP16"
    ]
    top = max(height(p) for _, _, p in dots) + 25
    bottom = min(0, min(height(p) for _, _, p in dots)) - 15
    left, step = 70, 62
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
    shift = {kind: 12 * (i - 1) for i, kind in enumerate(WINDOWS)}
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
        x, y = left + 110 * i, tall - 10
        label = "prose, outlier channels" if kind == "outliers" else kind
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
        lacking = [kind for kind in (*WINDOWS, "retrieval", "needles") if not stages.get(kind)]
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
