#!/usr/bin/env python3
"""Writes the read tables of docs/performance.md from a kernels benchmark: write_tables.py JSON MARKDOWN.

Replaces what stands between the lines `<!-- reads -->` and `<!-- end -->`.
"""
import json
import sys

GROUPS = (1, 4, 8)
BEGIN, END = "<!-- reads -->\n", "<!-- end -->\n"


def table(rows, head_dim):
    """The lines of one head dim's table."""
    suffix = "" if head_dim == 128 else f"/d{head_dim}"
    lines = [f"| d = {head_dim} | B/token | ns/token G = 1 / 4 / 8 | ratio to F16 "
             "| share of read bandwidth, % | certificate, % |", "|---|---|---|---|---|---|"]
    for name in ("F16", "K8V4", "K8V8", "K6V4"):
        found = [rows[f"attend/{name}/G{group}{suffix}"] for group in GROUPS]

        def cell(key, form, scale=1):
            return " / ".join(format(row[key] * scale, form) for row in found)

        title = f"`{name}`, witness" if name == "K6V4" else f"`{name}`"
        certificate = "" if name == "F16" else cell("certificate_cost", ".0f", 100)
        lines.append(f"| {title} | {found[0]['bytes_per_token']:.0f} | {cell('ns_per_token', '.1f')} "
                     f"| {cell('ratio_to_fp16', '.2f')} "
                     f"| {cell('share_of_read_bandwidth', '.0f', 100)} | {certificate} |")
    return lines


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        rows = {row["name"]: row for row in json.load(file)["rows"]}
    with open(sys.argv[2], encoding="utf-8") as file:
        text = file.read()
    begin, rest = text.split(BEGIN)
    end = rest.split(END, 1)[1]
    tables = "\n".join(table(rows, 128) + [""] + table(rows, 64)) + "\n"
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(begin + BEGIN + tables + END + end)


if __name__ == "__main__":
    main()
