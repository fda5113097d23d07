#!/usr/bin/env python3
"""Writes the table of docs/cluster.md from hosts.json.

usage: write_cluster.py [--check] RESULTS_FOLDER DOCS_FOLDER

Replaces what stands between the line `<!-- hosts -->` and the next `<!-- end -->`. --check changes
nothing and fails when it differs.
"""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from page_tables import load, replace, write  # noqa: E402


def host_table(results):
    lines = ["| phase | reads/s | certified heads | exact heads | errors "
             "| longest without an answer, ms |", "|---|---|---|---|---|---|"]
    rows = [row for row in results["rows"] if row["network"] == "namespaces"]
    for row in rows[:-1]:
        lines.append(f"| {row['phase']} | {row['reads_per_second']:.0f} | {row['certified_heads']} "
                     f"| {row['exact_heads']} | {row['errors']} "
                     f"| {row['longest_without_answer_ms']} |")
    total = rows[-1]
    assert total["phase"] == "total"
    reasons = ", ".join(f"{count} `{reason}`" for reason, count
                        in sorted(total["reasons"].items(), key=lambda item: -item[1]))
    return lines + ["", f"{total['reads']:,} reads: {total['certified_heads']:,} heads certified, "
                    f"{total['exact_heads']:,} exact, {total['errors']} errors ({reasons}), "
                    f"{total['uncertified']} uncertified, {total['wrong']} wrong; no lease was left."]


def main():
    arguments = sys.argv[1:]
    check = arguments[:1] == ["--check"]
    if len(arguments) != 2 + check:
        sys.exit(__doc__)
    page = pathlib.Path(arguments[-1]) / "cluster.md"
    words = page.read_text(encoding="utf-8")
    words = replace(words, "hosts", host_table(load(pathlib.Path(arguments[-2]), "hosts")))
    write(page, words, check)


if __name__ == "__main__":
    main()
