#!/usr/bin/env python3
"""Writes the tables of docs/bulk.md from bulk.json.

usage: write_bulk.py [--check] RESULTS_FOLDER DOCS_FOLDER

Replaces what stands between each line `<!-- NAME -->` (throughput, lookups, first reads, long
links) and the next `<!-- end -->`. --check changes nothing and fails when it differs.
"""
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from page_tables import load, replace, write  # noqa: E402


def throughput_table(results):
    lines = ["| 2 connections over loopback | pulled, GB/s | plain sockets, GB/s "
             "| share (median; least to most), % |", "|---|---|---|---|"]
    for title, name in (("in the clear", "throughput"), ("mutual TLS, sockets in the clear",
                                                         "throughput_tls")):
        row = results[name]
        lines.append(f"| {title} | {row['pull_gigabytes_per_second']:.2f} "
                     f"| {row['plain_socket_gigabytes_per_second']:.2f} | {100 * row['ratio']:.0f}; "
                     f"{100 * row['ratio_least']:.0f} to {100 * row['ratio_most']:.0f} |")
    return lines


def lookup_table(results):
    lines = ["| one block of 277 KB from another store | p50, ms | p99, ms |", "|---|---|---|"]
    for title, name in (("a connection of before", "lookup"), ("a new one", "lookup_new_connection"),
                        ("mutual TLS, a connection of before", "lookup_tls"),
                        ("mutual TLS, a new one", "lookup_new_connection_tls")):
        row = results[name]
        lines.append(f"| {title} | {row['milliseconds_p50']:.2f} | {row['milliseconds_p99']:.2f} |")
    return lines


def first_read_table(results):
    row = results["first_read"]
    seconds = row["seconds_until_readable"]
    lines = [f"| {row['tokens']:,} tokens over {row['link_bytes_per_second'] / 1e6:.0f} MB/s "
             "| readable after, s |", "|---|---|"]
    for title, name in (("quantized planes, originals later", "planes_then_originals"),
                        ("FP16 originals alone, planes made of them", "originals_only"),
                        ("both", "whole"),
                        ("FP16 originals by plain sockets, unchecked", "plain_socket_originals")):
        lines.append(f"| {title} | {seconds[name]:.2f} |")
    return lines


def link_table(results):
    lines = ["| round trip, ms | lost packets, % | connections | pulled, MB/s | plain sockets, MB/s "
             "| share, % |", "|---|---|---|---|---|---|"]
    for row in results["long_link"]["rows"]:
        lines.append(f"| {row['round_trip_ms']} | {row['lost_percent']:g} | {row['connections']} "
                     f"| {row['pull_megabytes_per_second']:.0f} "
                     f"| {row['plain_socket_megabytes_per_second']:.0f} "
                     f"| {100 * row['ratio']:.0f} |")
    return lines


def main():
    arguments = sys.argv[1:]
    check = arguments[:1] == ["--check"]
    if len(arguments) != 2 + check:
        sys.exit(__doc__)
    results = load(pathlib.Path(arguments[-2]), "bulk")
    page = pathlib.Path(arguments[-1]) / "bulk.md"
    words = page.read_text(encoding="utf-8")
    words = replace(words, "throughput", throughput_table(results))
    words = replace(words, "lookups", lookup_table(results))
    words = replace(words, "first reads", first_read_table(results))
    words = replace(words, "long links", link_table(results))
    write(page, words, check)


if __name__ == "__main__":
    main()
