// Drawing: elements are made with createElement and textContent alone, so that no text of a client
// can become markup.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function el(name, attributes, ...children) {
  const node = document.createElement(name);
  return fill(node, attributes, children);
}
function svg(name, attributes, ...children) {
  const node = document.createElementNS(SVG, name);
  return fill(node, attributes, children);
}
function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes || {})) {
    if (value !== undefined && value !== null) node.setAttribute(key, value);
  }
  for (const child of children) {
    if (child !== null && child !== undefined) {
      node.append(child instanceof Node ? child : String(child));
    }
  }
  return node;
}

const number = (value) => Number(value).toLocaleString("en-US");
const percent = (share) => (100 * share).toFixed(share > 0 && share < 0.1 ? 2 : 1) + " %";
function bound(value) {
  if (value === null || value === undefined) return "∞";
  if (value === 0) return "0";
  if (value >= 100) return number(Math.round(value));
  return value < 0.001 ? value.toExponential(1) : value.toPrecision(3);
}
function bytes(value) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (value >= 1024 && unit < units.length - 1) { value /= 1024; unit += 1; }
  return (unit === 0 ? value : value.toFixed(value < 10 ? 2 : 1)) + " " + units[unit];
}
function ago(now, then) {
  const seconds = Math.max(0, (now - then) / 1000);
  if (seconds < 90) return seconds.toFixed(0) + " s ago";
  if (seconds < 5400) return (seconds / 60).toFixed(0) + " min ago";
  return (seconds / 3600).toFixed(1) + " h ago";
}

// Green below the tolerance, through yellow, to red at 1: by octaves, because bounds span many.
function riskColor(tv, tolerance) {
  const octaves = Math.log2(Math.max(tv, 1e-6) / Math.max(tolerance, 1e-6));
  const share = Math.min(1, Math.max(0, (octaves + 5) / 7));
  return `hsl(${Math.round(145 - 140 * share)} ${Math.round(48 + 20 * share)}% 47%)`;
}

function meter(share, color, text) {
  const bar = svg("svg", {viewBox: "0 0 100 10", preserveAspectRatio: "none", "aria-hidden": "true"},
    svg("rect", {class: "track", width: 100, height: 10, rx: 2}),
    svg("rect", {width: Math.max(share > 0 ? 1 : 0, 100 * Math.min(1, share)), height: 10, rx: 2, fill: color}));
  return el("div", {class: "meter"}, bar, el("output", {}, text));
}

// Parts of one bar: [{share, kind, title}].
function stack(parts) {
  const bar = svg("svg", {viewBox: "0 0 1000 14", preserveAspectRatio: "none", role: "img",
    "aria-label": parts.map((part) => part.title).join(", ")},
    svg("rect", {class: "track", width: 1000, height: 14}));
  let x = 0;
  for (const part of parts) {
    bar.append(svg("rect", {class: part.kind, x, width: 1000 * part.share, height: 14},
      svg("title", {}, part.title)));
    x += 1000 * part.share;
  }
  return bar;
}

// One cell per layer (rows) and query head (columns), coloured by its largest served bound.
function heatMap(heads, tolerance, room) {
  const layers = 1 + Math.max(...heads.map((head) => head.layer));
  const columns = 1 + Math.max(...heads.map((head) => head.query_head));
  const left = 34, top = 18;
  const cell = Math.max(4, Math.min(40, (room - left - 2) / columns));
  const tall = Math.max(8, Math.min(22, Math.floor(480 / layers)));
  const width = Math.max(room, left + columns * cell + 2), height = top + layers * tall + 2;
  const map = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "group", id: "heat",
    "aria-label": `Largest bound of ${layers} layers by ${columns} query heads`});
  const step = Math.max(1, Math.ceil(columns / 16)), rows = Math.max(1, Math.ceil(layers / 16));
  for (let head = 0; head < columns; head += step) {
    map.append(svg("text", {x: left + (head + 0.5) * cell, y: 12, "text-anchor": "middle"}, head));
  }
  for (let layer = 0; layer < layers; layer += rows) {
    map.append(svg("text", {x: left - 6, y: top + (layer + 0.5) * tall + 3, "text-anchor": "end"}, layer));
  }
  for (const head of heads) {
    const text = `layer ${head.layer}, query head ${head.query_head}: largest bound ` +
      `${bound(head.max)}, sum ${bound(head.sum)}, ${number(head.reads)} reads`;
    map.append(svg("rect", {class: "cell", x: left + head.query_head * cell, y: top + head.layer * tall,
      width: cell - 1, height: tall - 1, rx: 1.5, fill: riskColor(head.max, tolerance),
      "data-layer": head.layer, "data-head": head.query_head, role: "img", "aria-label": text,
      tabindex: head === heads[0] ? 0 : -1}, svg("title", {}, text)));
  }
  map.addEventListener("keydown", (event) => moveInMap(event, map));
  return map;
}
function moveInMap(event, map) {
  const moves = {ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0]};
  const move = moves[event.key], at = event.target.dataset;
  if (!move || at.layer === undefined) return;
  const next = map.querySelector(
    `[data-layer="${Number(at.layer) + move[0]}"][data-head="${Number(at.head) + move[1]}"]`);
  event.preventDefault();
  if (next) { event.target.tabIndex = -1; next.tabIndex = 0; next.focus(); }
}

// Bounds before and after repair over time, on a logarithmic scale, with repairs as bars below.
function timeline(line, tolerance, room) {
  const width = room, height = 190, left = 46, right = 8, top = 8, floor = 128, base = 164;
  const least = Math.min(tolerance, ...line.buckets.filter((bucket) => bucket.reads > 0 && bucket.max > 0).map((bucket) => bucket.max));
  const low = Math.max(-6, Math.min(-1, Math.floor(Math.log10(least)))), scale = (tv) => floor - (floor - top) * (Math.max(low, Math.log10(Math.max(tv, 1e-9))) - low) / -low;
  const count = line.buckets.length, span = Math.max(count, 2);
  const x = (index) => left + (width - left - right) * (index + 0.5) / span;
  const chart = svg("svg", {viewBox: `0 0 ${width} ${height}`, role: "img", id: "timeline",
    "aria-label": "Bounds before and after repair, and repairs, over time"});
  for (let power = low; power <= 0; power += 1) {
    const y = scale(10 ** power);
    chart.append(svg("line", {class: "grid", x1: left, x2: width - right, y1: y, y2: y}));
    chart.append(svg("text", {x: left - 6, y: y + 3, "text-anchor": "end"}, power === 0 ? "1" : (10 ** power).toString()));
  }
  const limit = scale(tolerance);
  chart.append(svg("path", {class: "limit", d: `M${left} ${limit}H${width - right}`}, svg("title", {}, `tolerance ${tolerance}`)));
  const draw = (kind, pick) => {
    const points = line.buckets.map((bucket, i) => [i, bucket]).filter(([, bucket]) => bucket.reads > 0)
      .map(([i, bucket]) => [x(i), scale(pick(bucket))]);
    if (points.length === 1) points.unshift([points[0][0] - 6, points[0][1]]);
    chart.append(svg("path", {class: kind, d: "M" + points.map((point) => point.map((v) => v.toFixed(1)).join(" ")).join("L")}));
  };
  draw("first", (bucket) => bucket.first_max);
  draw("served", (bucket) => bucket.max);
  const most = Math.max(1, ...line.buckets.map((bucket) => bucket.repairs));
  line.buckets.forEach((bucket, i) => {
    const tall = (base - floor - 8) * bucket.repairs / most;
    if (tall > 0) chart.append(svg("rect", {class: "bars", x: x(i) - 3, y: base - tall, width: 6, height: tall}, svg("title", {}, `${number(bucket.repairs)} repairs of ${number(bucket.reads)} reads, ${bytes(bucket.repair_bytes)}`)));
  });
  chart.append(svg("text", {x: left - 6, y: base - 4, "text-anchor": "end"}, "repairs"));
  chart.append(svg("line", {class: "grid", x1: left, x2: width - right, y1: base, y2: base}));
  const seconds = count * line.bucket_ms / 1000;
  chart.append(svg("text", {x: left, y: height - 10}, "0 s"));
  chart.append(svg("text", {x: width - right, y: height - 10, "text-anchor": "end"}, `${seconds < 10 ? seconds.toFixed(1) : seconds.toFixed(0)} s after the first read`));
  return chart;
}
