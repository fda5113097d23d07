#!/usr/bin/env python3
"""Writes the tables and the picture of docs/scaling.md from cluster.json, rebalance.json and
membership.json.

usage: write_scaling.py [--check] RESULTS_FOLDER DOCS_FOLDER

Replaces what stands between each line `<!-- NAME -->` (inputs, sizes, choices, rebalance,
membership) and the next `<!-- end -->`, and writes scaling.svg. --check changes nothing and fails when either differs.
"""
import math
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
from page_tables import load, replace, write  # noqa: E402

NODES = (1, 10, 100, 1000)
ROUTINGS = {"random": "#7f7f7f", "owner": "#d62728", "prefix": "#1f77b4"}
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = 760, 320, 60, 30, 50, 70
PANEL = (WIDTH - LEFT - GAP - 100) / 2


def milliseconds(value):
    return f"{value:,.0f}"


def share(value):
    return f"{100 * value:.1f}"


def row_line(title, row):
    gigabytes = (row["pulled_bytes_per_node_second"] + row["offered_bytes_per_node_second"]) / 1e9
    return (f"| {title} | {share(row['local_hit_rate'])} | {share(row['pulled_hit_rate'])} "
            f"| {milliseconds(row['first_token_p50_ms'])} | {milliseconds(row['first_token_p99_ms'])} "
            f"| {gigabytes:.2f} | {row['hottest_over_mean']:.1f} "
            f"| {100 * row['busiest_link_share']:.0f} |")


HEAD = ["| {} | found here, % | pulled, % | wait p50, ms | p99, ms | GB/s per node "
        "| hottest ÷ mean sender | its link busy, % |", "|---|---|---|---|---|---|---|---|"]


def size_table(rows):
    lines = [HEAD[0].format("routing, nodes"), HEAD[1]]
    for routing in ROUTINGS:
        lines += [row_line(f"{routing}, {nodes:,}", rows[f"size/{routing}/{nodes}"])
                  for nodes in NODES]
    return lines


def choice_table(rows):
    titles = {"size/random/1000": "random, 1,000 nodes, offers",
              "no_offers/random/1000": "the same without offers",
              "size/prefix/1000": "prefix, 1,000 nodes, offers",
              "no_offers/prefix/1000": "the same without offers",
              "churn/second/100": "random, 100 nodes, one leaves and one comes every minute",
              "churn/owner_only/100": "the same, the owner before is not asked"}
    return [HEAD[0].format(""), HEAD[1]] + [row_line(title, rows[name])
                                            for name, title in titles.items()]


def input_table(cluster):
    inputs = cluster["inputs"]
    owner = {row["nodes"]: row["owner_us"] for row in cluster["owner"]}
    return ["| input | value | from |", "|---|---|---|",
            f"| a lookup of 128 blocks | {inputs['lookup_us']:.0f} µs | services.json |",
            f"| finding an owner among 10 / 100 / 1,000 nodes | {owner[10]:.1f} / {owner[100]:.1f} / "
            f"{owner[1000]:.1f} µs | measured in this run |",
            f"| asking another node | {inputs['peer_us']:.0f} µs | the lookup and 100 µs |",
            f"| a block of an 8e9 model, planes and originals | {inputs['block_bytes'] / 1e6:.1f} MB "
            "| its layout |",
            f"| a node's link | {inputs['link_bytes_per_second'] / 1e9:.2f} GB/s | assumed: 0.7 of "
            "100 Gbit/s |",
            f"| prefill | {inputs['prefill_tokens_per_second']:,.0f} tokens/s a node | assumed |",
            f"| requests | {inputs['requests_per_node_second']:g} per second and node | assumed |",
            f"| blocks of a node | {inputs['blocks_per_node']:,} | assumed |"]


def membership_table(rows):
    lines = ["| nodes | etcd's processors | a join is seen by all after, ms | a leave, ms |",
             "|---|---|---|---|"]
    return lines + [f"| {row['nodes']} | {row['etcd_processors']:.3f} "
                    f"| {row['join_seen_by_all_ms']:.0f} | {row['leave_seen_by_all_ms']:.0f} |"
                    for row in rows]


def rebalance_table(rows):
    lines = ["| nodes, and one that comes or goes | chains that move, % | ideal, % | of them between others, % |",
             "|---|---|---|---|"]
    return lines + [f"| {row['nodes']:,} | {100 * row['moved_share']:.2f} "
                    f"| {100 * row['ideal_share']:.2f} | {100 * row['waste_share']:.2f} |"
                    for row in rows]


def text(x, y, words, anchor="middle", color="#333"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def panel(left, title, ticks, place_y, curves):
    """A picture of curves over the number of nodes."""
    def place_x(nodes):
        return left + PANEL * math.log10(nodes) / 3

    out = [text(left + PANEL / 2, TOP - 12, title)]
    for nodes in NODES:
        x = place_x(nodes)
        out.append(f'<path d="M{x:.1f} {HEIGHT - BOTTOM}V{TOP}" stroke="#eee"/>')
        out.append(text(x, HEIGHT - BOTTOM + 18, f"{nodes:,}"))
    for value, label in ticks:
        y = place_y(value)
        out.append(f'<path d="M{left} {y:.1f}H{left + PANEL:.1f}" stroke="#eee"/>')
        out.append(text(left - 8, y + 4, label, "end"))
    for routing, values in curves.items():
        points = "L".join(f"{place_x(nodes):.1f} {place_y(value):.1f}"
                          for nodes, value in zip(NODES, values))
        out.append(f'<path d="M{points}" fill="none" stroke="{ROUTINGS[routing]}" '
                   'stroke-width="2"/>')
    return out + [text(left + PANEL / 2, HEIGHT - 12, "nodes")]


def picture(rows):
    bottom, span = HEIGHT - BOTTOM, HEIGHT - BOTTOM - TOP
    found = {routing: [rows[f"size/{routing}/{n}"]["local_hit_rate"]
                       + rows[f"size/{routing}/{n}"]["pulled_hit_rate"] for n in NODES]
             for routing in ROUTINGS}
    waits = {routing: [rows[f"size/{routing}/{n}"]["first_token_p99_ms"] for n in NODES]
             for routing in ROUTINGS}
    lines = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    lines += panel(LEFT, "tokens found here or pulled, %",
                   [(v / 100, v) for v in (0, 20, 40, 60, 80)],
                   lambda value: bottom - span * value / 0.8, found)
    lines += panel(LEFT + PANEL + GAP, "wait for a chain, p99, s",
                   [(10.0 ** e * 1e3, f"{10.0 ** e:g}") for e in (-1, 0, 1, 2, 3)],
                   lambda value: bottom - span * (math.log10(value / 1e3) + 1) / 4, waits)
    for k, (routing, color) in enumerate(ROUTINGS.items()):
        lines.append(text(WIDTH - 90, TOP + 20 + 20 * k, routing, "start", color))
    return (f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
            'font-family="sans-serif" font-size="12">\n' + "\n".join(lines) + "\n</svg>\n")


def main():
    arguments = sys.argv[1:]
    check = arguments[:1] == ["--check"]
    if len(arguments) != 2 + check:
        sys.exit(__doc__)
    results, docs = pathlib.Path(arguments[-2]), pathlib.Path(arguments[-1])
    cluster = load(results, "cluster")
    rows = {row["name"]: row for row in cluster["rows"]}
    page = docs / "scaling.md"
    words = page.read_text(encoding="utf-8")
    words = replace(words, "inputs", input_table(cluster))
    words = replace(words, "sizes", size_table(rows))
    words = replace(words, "choices", choice_table(rows))
    words = replace(words, "rebalance", rebalance_table(load(results, "rebalance")["rows"]))
    words = replace(words, "membership", membership_table(load(results, "membership")["rows"]))
    write(page, words, check)
    write(docs / "scaling.svg", picture(rows), check)


if __name__ == "__main__":
    main()
