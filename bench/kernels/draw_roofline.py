#!/usr/bin/env python3
"""Draws the reads of a kernels benchmark under its machine's roof: draw_roofline.py JSON SVG.

x: arithmetic per byte read, 4 d G operations per token (multiply and add, keys and values) over the
bytes of a token; y: operations per second. The slope is the bandwidth of a plain sum of the same
memory in the same run; the flat roof is two 8-lane FMAs a cycle at the clock that the run measured.
Colour is the format, shape the size of the GQA group.
"""
import json
import math
import sys

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 460, 70, 150, 20, 50
X_RANGE, Y_RANGE = (0.5, 40.0), (4.0, 200.0)
COLORS = {"F16": "#7f7f7f", "K8V4": "#1f77b4", "K8V8": "#2ca02c", "K6V4": "#d62728"}
# Of a GQA group of 1, 4, 8 query heads: an outline around (0, 0).
SHAPES = {1: "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", 4: "M-4-4h8v8h-8z", 8: "M0-5.5L5.5 4.5h-11z"}
FLOP_PER_CYCLE = 32


def place(x, y):
    """Pixel of a point on logarithmic axes."""
    part_x = math.log(x / X_RANGE[0]) / math.log(X_RANGE[1] / X_RANGE[0])
    part_y = math.log(y / Y_RANGE[0]) / math.log(Y_RANGE[1] / Y_RANGE[0])
    return (LEFT + part_x * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - part_y * (HEIGHT - TOP - BOTTOM))


def text(x, y, words, anchor="middle", color="#333"):
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" fill="{color}">{words}</text>'


def axes():
    out = [f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for x in (0.5, 1, 2, 4, 8, 16, 32):
        px, bottom = place(x, Y_RANGE[0])
        out.append(f'<path d="M{px:.1f} {bottom:.1f}V{TOP}" stroke="#eee"/>')
        out.append(text(px, bottom + 18, x))
    for y in (5, 10, 20, 50, 100, 200):
        left, py = place(X_RANGE[0], y)
        out.append(f'<path d="M{left:.1f} {py:.1f}H{WIDTH - RIGHT}" stroke="#eee"/>')
        out.append(text(left - 8, py + 4, y, "end"))
    out.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10, "operations per byte"))
    out.append(f'<g transform="rotate(-90)">{text(-HEIGHT / 2, 18, "Gop/s, one core")}</g>')
    return out


def marker(x, y, group_size, color):
    return f'<path transform="translate({x:.1f} {y:.1f})" d="{SHAPES[group_size]}" fill="{color}"/>'


def roof(bandwidth, peak):
    """The two roofs; the slope's label lies along it, above the line."""
    ridge = peak / bandwidth
    (x0, y0), (x1, y1) = place(X_RANGE[0], X_RANGE[0] * bandwidth), place(ridge, peak)
    x2, _ = place(X_RANGE[1], peak)
    line = f'<path d="M{x0:.1f} {y0:.1f}L{x1:.1f} {y1:.1f}H{x2:.1f}" fill="none" stroke="black"/>'
    angle = math.degrees(math.atan2(y1 - y0, x1 - x0))
    middle = f"translate({(x0 + x1) / 2:.1f} {(y0 + y1) / 2:.1f}) rotate({angle:.1f})"
    return [line, f'<g transform="{middle}">{text(0, -7, f"{bandwidth:.1f} GB/s, sum of the same memory")}</g>',
            text(x2, y1 - 7, f"{peak:.0f} Gop/s, two FMAs a cycle", "end")]


def points(rows):
    out = []
    for row in rows:
        parts = row["name"].split("/")
        if parts[0] != "attend" or parts[1] not in COLORS or "uncertified" in row["name"]:
            continue
        if row["head_dim"] != 128 or row["group_size"] not in SHAPES:
            continue
        work = 4 * row["head_dim"] * row["group_size"]
        x, y = place(work / row["bytes_per_token"], work / row["ns_per_token"])
        out.append(marker(x, y, row["group_size"], COLORS[parts[1]]))
    return out


def legend():
    left, out = WIDTH - RIGHT + 25, []
    for k, (name, color) in enumerate(COLORS.items()):
        out.append(f'<path d="M{left - 6} {TOP + 20 + 20 * k}h12" stroke="{color}" stroke-width="8"/>')
        out.append(text(left + 14, TOP + 24 + 20 * k, name, "start", color))
    for k, group_size in enumerate(SHAPES):
        y = TOP + 115 + 20 * k
        out += [marker(left, y, group_size, "#333"), text(left + 14, y + 4, f"G = {group_size}", "start")]
    return out


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        run = json.load(file)
    rows = run["rows"]
    sums = sorted(r["read_sum_gigabytes_per_second"] for r in rows if r["name"].startswith("attend"))
    lines = axes() + roof(sums[len(sums) // 2], FLOP_PER_CYCLE * run["clock_gigahertz"]) + points(rows)
    lines += legend()
    with open(sys.argv[2], "w", encoding="utf-8") as file:
        file.write(f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" '
                   'font-family="sans-serif" font-size="12">\n' + "\n".join(lines) + "\n</svg>\n")


if __name__ == "__main__":
    main()
