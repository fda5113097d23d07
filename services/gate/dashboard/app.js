// The page: asks gate's /api every two seconds and shows what it says.
"use strict";

const RUNGS = ["none", "values", "keys", "head", "layer"];
const state = {token: sessionStorage.getItem("certkv-token") || "", page: "", next: "", selected: "", rows: [], timer: 0};
const by = (id) => document.getElementById(id);

async function ask(path) {
  const headers = state.token ? {Authorization: "Bearer " + state.token} : {};
  const answer = await fetch(path, {headers, cache: "no-store"});
  if (answer.status === 401) throw Object.assign(new Error("token"), {needsToken: true});
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error || "status " + answer.status);
  return body;
}

function show(id, ...children) { by(id).replaceChildren(...children); }
function tile(label, value, kind) { return el("div", {class: "tile " + (kind || "")}, el("p", {}, label), el("strong", {}, value)); }
const shortName = (name) => name.replace(/^requests\//, "");

function showOverview(all) {
  by("policy").textContent = `Policy ${all.policy.version}: ${all.policy.text}`;
  let reads = 0, first = 0;
  for (const format of all.formats) { reads += format.total; first += format.rungs.none; }
  const coverage = reads ? first / reads : 1;
  show("tiles",
    tile("Open requests", number(all.requests.open)),
    tile("Certified at first read", reads ? percent(coverage) : "–", coverage > 0.9 ? "good" : coverage > 0.5 ? "warn" : "bad"),
    tile("Reads of a head", number(reads)),
    tile("Repaired", number(reads - first), reads === first ? "good" : "warn"),
    tile("Originals re-read", bytes(all.repair_bytes)),
    tile("Outside tolerance", number(all.outside_tolerance), all.outside_tolerance ? "bad" : "good"),
    tile("Failed reads", number(all.failed_reads), all.failed_reads ? "warn" : "good"));
  showFormats(all.formats);
  showTiers(all);
}

function showFormats(formats) {
  if (!formats.length) return show("formats", el("p", {class: "empty"}, "No read was reported yet"));
  show("formats", el("p", {class: "legend"}, ...RUNGS.map((rung) => el("span", {class: rung}, rung === "none" ? "first read" : rung))),
    ...formats.map((format) => el("div", {class: "row"},
      el("div", {class: "bar"}, el("span", {class: "name"}, format.name),
        el("span", {class: "sub"}, `${percent(format.rungs.none / format.total)} of ${number(format.total)}`)),
      stack(RUNGS.filter((rung) => format.rungs[rung] > 0).map((rung) => ({share: format.rungs[rung] / format.total, kind: rung,
        title: `${rung === "none" ? "first read" : rung} ${number(format.rungs[rung])}`}))))));
}

function tierRow(name, used, capacity, note) {
  return el("div", {class: "row"},
    el("div", {class: "bar"}, el("span", {class: "name"}, name),
      el("span", {class: "sub"}, capacity ? `${bytes(used)} of ${bytes(capacity)}` : bytes(used))),
    stack(capacity ? [{share: Math.min(1, used / capacity), kind: "used", title: `${percent(used / capacity)} used`}] : []),
    note ? el("p", {class: "sub"}, note) : null);
}
function showTiers(all) {
  const store = all.store;
  if (!store.known) return show("tiers", el("p", {class: "empty"}, store.error || "Asking the store"));
  const rows = [];
  let saved = 0, quantized = 0;
  for (const cache of store.caches) {
    rows.push(el("h3", {}, cache.description),
      tierRow("Quantized", cache.device_used, cache.device_capacity, `${number(cache.blocks_leased)} blocks leased, ${number(cache.blocks_pinned)} pinned`),
      tierRow("Originals", cache.backing_used, cache.backing_capacity, ""));
    saved += cache.backing_block_bytes; quantized += cache.device_block_bytes;
  }
  if (store.disk_bytes >= 0) rows.push(tierRow("Disk", store.disk_bytes, 0, ""));
  if (quantized) rows.push(el("p", {class: "sub"}, `A quantized block takes 1 / ${(saved / quantized).toFixed(2)} of its original`));
  rows.push(el("p", {class: "sub"}, `${number(store.sessions)} sessions, ${number(store.leases)} leases, ` +
    (store.asked ? `hit rate ${percent(store.found / store.asked)}` : "no lookup yet")));
  for (const tenant of all.tenants) {
    rows.push(el("div", {class: "row"}, el("div", {class: "bar"}, el("span", {class: "name"}, `Tenant ${tenant.tenant}`),
      el("span", {class: "sub"}, tenant.budget ? `${bound(tenant.committed)} of ${bound(tenant.budget)}` : `${bound(tenant.committed)}, no limit`)),
      stack(tenant.budget ? [{share: Math.min(1, tenant.committed / tenant.budget), kind: "used", title: "committed"}] : [])));
  }
  show("tiers", ...(store.caches.length ? rows : [el("p", {class: "empty"}, "No cache is registered")]));
}

function flags(risk) {
  return [risk.closed ? el("span", {class: "flag off"}, "closed") : null,
    risk.forced_exact ? el("span", {class: "flag bad"}, "forced exact") : null,
    risk.outside_tolerance ? el("span", {class: "flag bad"}, "outside tolerance") : null,
    risk.canary_mismatches ? el("span", {class: "flag bad"}, "output differs") : null,
    risk.failed_reads ? el("span", {class: "flag warn"}, `${number(risk.failed_reads)} failed`) : null];
}
function showRequests(list, now) {
  state.rows = list.requests.map((risk) => risk.name);
  state.next = list.next_page_token;
  by("next").disabled = !list.next_page_token;
  by("first").disabled = !state.page;
  by("count").textContent = `${number(list.request_count)} match`;
  const focused = document.activeElement && document.activeElement.dataset.name;
  const rows = list.requests.map((risk) => el("tr", {tabindex: 0, "data-name": risk.name, "aria-selected": String(shortName(risk.name) === state.selected)},
    el("td", {}, el("span", {class: "name"}, shortName(risk.name)), ...flags(risk),
      el("div", {class: "sub"}, [risk.label, risk.tenant, ago(now, risk.update_time_ms)].filter(Boolean).join(" · "))),
    el("td", {}, meter(risk.score, riskColor(risk.score, risk.tv_tolerance), bound(risk.score))),
    el("td", {class: "n"}, number(risk.reads)),
    el("td", {class: "n wide"}, number(risk.repaired)),
    el("td", {class: "n wide"}, bytes(risk.repair_bytes)),
    el("td", {class: "n wide"}, risk.budget ? percent(risk.budget_committed / risk.budget) : "–")));
  const body = by("requests").tBodies[0];
  body.replaceChildren(...(rows.length ? rows : [el("tr", {}, el("td", {colspan: 6, class: "empty"}, "No request matches"))]));
  if (focused) for (const row of rows) if (row.dataset.name === focused) row.focus();
}

function fact(name, value) { return el("div", {}, el("dt", {}, name), el("dd", {}, value)); }
function showDetail(risk, now) {
  const title = el("div", {class: "bar"}, el("h2", {id: "detail-title"}, shortName(risk.name), ...flags(risk)),
    el("button", {type: "button", id: "close", "aria-label": "Close the request"}, "Close"));
  const facts = el("dl", {class: "facts"}, fact("Label", risk.label || "–"), fact("Tenant", risk.tenant || "–"), fact("Model", risk.model || "–"),
    fact("Mode", `${risk.read_mode}, ${risk.risk_mode}`), fact("Tolerance", bound(risk.tv_tolerance)),
    fact("Largest served bound", bound(risk.max)), fact("Before repair", bound(risk.score)), fact("Sum of bounds", bound(risk.sum)),
    fact("Budget", risk.budget ? `${bound(risk.budget_committed)} of ${bound(risk.budget)}` : "none"),
    fact("Reads", number(risk.reads)), fact("Repaired", number(risk.repaired)), fact("Re-read", bytes(risk.repair_bytes)),
    fact("Opened", ago(now, risk.open_time_ms)));
  const parts = [title, facts];
  const room = Math.round(Math.max(280, Math.min(700, by("detail").clientWidth - 34)));
  if (risk.heads.length) {
    parts.push(el("h3", {}, "Largest served bound by layer (down) and query head (across)"), heatMap(risk.heads, risk.tv_tolerance, room));
    if (risk.timeline.buckets.length) parts.push(el("h3", {}, "Bounds and repairs over time"),
      el("p", {class: "legend"}, el("span", {class: "first"}, "before repair"), el("span", {class: "served"}, "served"), el("span", {class: "repair"}, "repairs")),
      timeline(risk.timeline, risk.tv_tolerance, room));
    parts.push(el("h3", {}, "Worst reads before repair"), el("div", {class: "scroll"}, el("table", {id: "worst"},
      el("thead", {}, el("tr", {}, ...["Layer", "Head", "Position", "Before", "Served", "Rung", "Output is"].map((name, i) => el("th", {class: i < 5 ? "n" : ""}, name)))),
      el("tbody", {}, ...risk.worst_reads.slice(0, 8).map((read) => el("tr", {}, ...[read.layer, read.query_head, number(read.query_position), bound(read.first), bound(read.served)]
        .map((value) => el("td", {class: "n"}, value)), el("td", {}, read.rung), el("td", {}, read.outcome)))))));
  } else {
    parts.push(el("p", {class: "empty"}, "No read was reported yet"));
  }
  if (risk.events.length) parts.push(el("h3", {}, "Events"), el("ol", {class: "events"}, ...risk.events.slice().reverse().map((event) => eventItem(event, now))));
  show("detail", ...parts);
  by("close").addEventListener("click", () => { location.hash = ""; });
}
function eventItem(event, now) {
  return el("li", {}, el("time", {}, ago(now, event.time_ms)), el("strong", {}, event.kind), event.request ? el("span", {class: "sub"}, " " + shortName(event.request)) : null,
    el("div", {class: "sub"}, event.message));
}
function showEvents(events, now) {
  show("events", ...(events.length ? events.map((event) => eventItem(event, now)) : [el("li", {class: "empty"}, "Nothing happened")]));
}

function listPath() {
  const query = new URLSearchParams({order: by("order").value, page_size: "25", page_token: state.page, label: by("label").value});
  if (by("closed").checked) query.set("closed", "1");
  if (by("troubled").checked) query.set("troubled", "1");
  return "api/requests?" + query;
}
async function refresh() {
  clearTimeout(state.timer);
  state.selected = location.hash.startsWith("#/request/") ? decodeURIComponent(location.hash.slice(10)) : "";
  try {
    const [overview, list, events] = await Promise.all([ask("api/overview"), ask(listPath()), ask("api/events")]);
    by("login").hidden = true; by("main").hidden = false;
    showOverview(overview);
    showRequests(list, overview.now_ms);
    showEvents(events.events, overview.now_ms);
    await refreshDetail(overview.now_ms);
    by("state").textContent = "live"; by("state").className = "state live";
    if (!document.documentElement.dataset.loadMs) document.documentElement.dataset.loadMs = performance.now().toFixed(1);
  } catch (error) {
    if (error.needsToken) { by("login").hidden = false; by("main").hidden = true; by("state").textContent = "locked";
      by("login-error").textContent = state.token ? "Gate does not take this token" : ""; return; }
    by("state").textContent = "no answer: " + error.message; by("state").className = "state lost";
  }
  state.timer = setTimeout(refresh, 2000);
}
async function refreshDetail(now) {
  if (!state.selected) return show("detail", el("h2", {id: "detail-title"}, "Request"), el("p", {class: "empty"}, "Choose a request to see its layers and heads"));
  if (by("detail").contains(document.activeElement) && document.activeElement.classList.contains("cell")) return;
  try {
    showDetail(await ask("api/requests/" + encodeURIComponent(state.selected)), now);
  } catch (error) {
    if (error.needsToken) throw error;
    show("detail", el("h2", {id: "detail-title"}, state.selected), el("p", {class: "empty"}, error.message));
  }
}

function open(name) { location.hash = "#/request/" + encodeURIComponent(shortName(name)); }
function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  by("theme").textContent = theme === "dark" ? "Light" : "Dark";
}
function toggleTheme() {
  const next = document.documentElement.dataset.theme === "dark" ? "light" : "dark";
  localStorage.setItem("certkv-theme", next); setTheme(next);
}
function moveRow(step) {
  const rows = [...by("requests").tBodies[0].rows];
  const at = rows.indexOf(document.activeElement);
  const next = rows[Math.min(rows.length - 1, Math.max(0, at + step))];
  if (next) next.focus();
}
function onKey(event) {
  if (event.target.matches("input, select") || event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "j" || event.key === "k") moveRow(event.key === "j" ? 1 : -1);
  if (event.key === "t") toggleTheme();
  if (event.key === "Escape") location.hash = "";
  if (event.key === "Enter" && event.target.dataset.name) open(event.target.dataset.name);
}

setTheme(new URLSearchParams(location.search).get("theme") || localStorage.getItem("certkv-theme") || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
by("theme").addEventListener("click", toggleTheme);
by("requests").addEventListener("click", (event) => { const row = event.target.closest("tr[data-name]"); if (row) open(row.dataset.name); });
for (const id of ["order", "closed", "troubled", "label"]) by(id).addEventListener("input", () => { state.page = ""; refresh(); });
by("next").addEventListener("click", () => { state.page = state.next; refresh(); });
by("first").addEventListener("click", () => { state.page = ""; refresh(); });
by("login").addEventListener("submit", (event) => { event.preventDefault(); state.token = by("token").value; sessionStorage.setItem("certkv-token", state.token); refresh(); });
document.addEventListener("keydown", onKey);
addEventListener("hashchange", refresh);
refresh();
