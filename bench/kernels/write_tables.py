#!/usr/bin/env python3
"""Writes the tables of docs/performance.md from benchmark results.

usage: write_tables.py [--check] RESULTS_FOLDER MARKDOWN

Replaces what stands between each line `<!-- NAME -->` (reads, targets, progressive, peers, the same of
the other CPU, other, lengths, parts) and the next `<!-- end -->`. --check changes nothing and fails when a
table isn't what the results say.
"""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from page_tables import join, load_rows, replace, write  # noqa: E402

GROUPS = (1, 4, 8)


def read_table(rows, head_dim):
    """The lines of one head dim's table of dense reads."""
    suffix = "" if head_dim == 128 else f"/d{head_dim}"
    lines = [f"| d = {head_dim} | B/token | ns/token G = 1 / 4 / 8 | ratio to F16 "
             "| share of read bandwidth, % | certificate, % |", "|---|---|---|---|---|---|"]
    for name in ("F16", "K8V4", "K8V8", "K6V4"):
        found = [rows[f"attend/{name}/G{group}{suffix}"] for group in GROUPS]

        def cell(key, form, scale=1):
            return join([row[key] * scale for row in found], form)

        title = f"`{name}`, witness" if name == "K6V4" else f"`{name}`"
        certificate = "" if name == "F16" else cell("certificate_cost", ".0f", 100)
        lines.append(f"| {title} | {found[0]['bytes_per_token']:.0f} | {cell('ns_per_token', '.1f')} "
                     f"| {cell('ratio_to_fp16', '.2f')} "
                     f"| {cell('share_of_read_bandwidth', '.0f', 100)} | {certificate} |")
    return lines


def length_table(rows):
    """Dense reads of other lengths than 32k tokens, d = 128."""
    lines = ["| tokens | `F16`, ns/token G = 1 / 4 / 8 | `K8V4` | ratio | certificate, % |",
             "|---|---|---|---|---|"]
    for tokens in (4096, 32768, 131072):
        suffix = "" if tokens == 32768 else f"/n{tokens}"
        f16, k8v4 = ([rows[f"attend/{name}/G{group}{suffix}"] for group in GROUPS]
                     for name in ("F16", "K8V4"))
        lines.append(f"| {tokens:,} | {join([row['ns_per_token'] for row in f16], '.1f')} "
                     f"| {join([row['ns_per_token'] for row in k8v4], '.1f')} "
                     f"| {join([row['ratio_to_fp16'] for row in k8v4], '.2f')} "
                     f"| {join([row['certificate_cost'] * 100 for row in k8v4], '.0f')} |")
    return lines


def part_table(rows):
    """What a read of 32k tokens, d = 128, takes more for each part of its certificate."""
    lines = ["| % of the read, G = 1 / 4 / 8 | `K8V4` | `K6V4`, witness |", "|---|---|---|"]
    for part, title in (("half-widths", "half-widths of logits"),
                        ("atoms", "masses and largest logits of atoms"),
                        ("weight-errors", "errors of 15-bit weights"),
                        ("value-errors", "η and reaches of values")):
        cells = [join([rows[f"attend/{name}/without-{part}/G{group}"]["part_cost"] * 100
                       for group in GROUPS], ".1f") for name in ("K8V4", "K6V4")]
        lines.append(f"| {title} | {cells[0]} | {cells[1]} |")
    cells = [join([rows[f"attend/{name}/G{group}"]["certificate_cost"] * 100 for group in GROUPS],
                  ".1f") for name in ("K8V4", "K6V4")]
    lines.append(f"| all of them, and the checks of `Attend` | {cells[0]} | {cells[1]} |")
    return lines


def target_row(what, targets, values_by_cpu, form, at_least):
    """One line of the targets, each value compared as it is printed."""
    def is_reached(value, target):
        rounded = float(format(value, form))
        return rounded >= target if at_least else rounded <= target

    wanted = " / ".join(f"{target:g}" for target in targets)
    cells = []
    for values in values_by_cpu:
        reached = " / ".join("yes" if is_reached(value, target) else "no"
                             for value, target in zip(values, targets))
        cells.append(f"{join(values, form)} | {reached}")
    return f"| {what} | {'' if at_least else '≤ '}{wanted} | {' | '.join(cells)} |"


def target_table(runs):
    """The targets beside each CPU's kernels, progressive reads and peers."""
    def dense(name, key, scale=1):
        return [[kernels[f"attend/{name}/G{group}"][key] * scale for group in GROUPS]
                for kernels, _, _ in runs]

    def step(name, key):
        return [[kernels[name][key]] for kernels, _, _ in runs]

    skipping = [[progressive[f"progressive/G{group}"]["ratio_to_fp16"] for group in GROUPS]
                for _, progressive, _ in runs]
    q4 = [[peers[f"peer/ggml/Q8_0-Q4_0/G{group}"]["ratio_of_k8v4_to_it"] for group in GROUPS]
          for _, _, peers in runs]
    return [
        "| what, AVX2, d = 128 | target | EPYC | reached | Skylake | reached |",
        "|---|---|---|---|---|---|",
        target_row("`K8V4` with certificate ÷ own F16, G = 1 / 4 / 8", (2.1, 1.3, 1.2),
                   dense("K8V4", "ratio_to_fp16"), ".2f", True),
        target_row("`K8V8`, G = 1 / 4 / 8", (1.7, 1.3, 1.2), dense("K8V8", "ratio_to_fp16"), ".2f",
                   True),
        target_row("certificate of `K8V4`, % of the read, G = 1 / 4 / 8", (5, 5, 5),
                   dense("K8V4", "certificate_cost", 100), ".0f", False),
        target_row("progressive read, 10 % read, G = 1 / 4 / 8", (4, 2, 2), skipping, ".2f", True),
        target_row("finishing step, 8,192 atoms, µs per query", (15,),
                   step("finish/K8V4/tolerance_0.2", "microseconds"), ".0f", False),
        target_row("sealing `K8V4`, GB/s of 16-bit input, one core", (3.5,),
                   step("seal/K8V4", "gigabytes_per_second"), ".1f", True),
        target_row("`K8V4` ÷ ggml's `Q8_0` keys and `Q4_0` values, G = 1 / 4 / 8", (5, 5, 5), q4,
                   ".2f", True),
    ]


def progressive_row(title, rows):
    def cell(key, form, scale=1):
        return join([row[key] * scale for row in rows], form)

    return (f"| {title} | {cell('share_read', '.0f', 100)} | {cell('ns_per_token', '.1f')} "
            f"| {cell('ratio_to_fp16', '.2f')} | {cell('ratio_to_dense', '.2f')} "
            f"| {cell('scan_ratio_to_fp16', '.1f')} |")


def progressive_table(rows):
    lines = ["| data | read in full, % | ns/token | ÷ F16 | ÷ dense `K8V4` | scan alone ÷ F16 |",
             "|---|---|---|---|---|---|",
             progressive_row("planted, G = 1 / 4 / 8",
                             [rows[f"progressive/G{group}"] for group in GROUPS])]
    for layer in (0, 9, 19, 29):
        found = [rows[f"progressive/trace/layer{layer}/n{tokens}"]
                 for tokens in (1728, 32768, 131072)]
        title = f"layer {layer}" + (", 1.7k / 32k / 128k" if layer == 0 else "")
        lines.append(progressive_row(title, found))
    return lines


def peer_table(rows):
    lines = ["| keys, values of ggml | B/token | ns/token G = 1 / 4 / 8 | our `K8V4` is faster by |",
             "|---|---|---|---|"]
    for keys, values in (("F16", "F16"), ("Q8_0", "Q8_0"), ("Q8_0", "Q4_0")):
        found = [rows[f"peer/ggml/{keys}-{values}/G{group}"] for group in GROUPS]
        lines.append(f"| `{keys}`, `{values}` | {found[0]['bytes_per_token']} "
                     f"| {join([row['ns_per_token'] for row in found], '.1f')} "
                     f"| {join([row['ratio_of_k8v4_to_it'] for row in found], '.2f')} |")
    return lines


def main():
    arguments = sys.argv[1:]
    check = arguments[:1] == ["--check"]
    if len(arguments) != 2 + check:
        sys.exit(__doc__)
    folder, markdown = pathlib.Path(arguments[-2]), pathlib.Path(arguments[-1])
    kernels, progressive, peers = epyc = [
        load_rows(folder, name) for name in ("kernels", "progressive", "peers")]
    skylake = [load_rows(folder, f"{name}-skylake") for name in ("kernels", "progressive", "peers")]
    steps = load_rows(folder, "steps-skylake")
    skylake[0].update({name: row for name, row in steps.items() if not name.startswith("attend/")})
    text = markdown.read_text(encoding="utf-8")
    text = replace(text, "reads", read_table(kernels, 128) + [""] + read_table(kernels, 64))
    text = replace(text, "targets", target_table([epyc, skylake]))
    text = replace(text, "progressive", progressive_table(progressive))
    text = replace(text, "progressive-skylake", progressive_table(skylake[1]))
    text = replace(text, "peers", peer_table(peers))
    text = replace(text, "peers-skylake", peer_table(skylake[2]))
    text = replace(text, "other", [line for dim in (128, 64, 256)
                                   for line in read_table(skylake[0], dim) + [""]][:-1])
    text = replace(text, "lengths", length_table(skylake[0]))
    text = replace(text, "parts", part_table(skylake[0]))
    write(markdown, text, check)


if __name__ == "__main__":
    main()
