// Pools: every node with its label and owner, the tide with its forecast, and what was loaned and reclaimed.

import { fetchJson } from "./connection.js";
import { KeyedList, byId, element, setAttributes, setText, svgElement } from "./dom.js";
import { clock, duration, number, plural } from "./format.js";

const HEIGHT = 170;
const LEFT = 40;
const RIGHT = 12;
const TOP = 12;
const BOTTOM = 22;
const REFRESH_MS = 1000;
const NUM_LINES = 10;
// Above this number of servers each is shown in brief, with the rest in its tooltip.
const MAX_WIDE_NODES = 24;
const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

// --- nodes ------------------------------------------------------------------------------------------------------------

function makeNodeCard() {
  return element(
    "li", { class: "node" }, element("div", { class: "node-id" }), element("div", { class: "cells", "aria-hidden": "true" }),
    element("div", { class: "node-label" }), element("div", { class: "second" }),
  );
}

function fillNodeCard(card, node, nowS) {
  const [id, cells, label, detail] = card.children;
  const drain = node.drain;
  setAttributes(card, { class: `node pool-${node.pool}${node.is_loaned ? " loaned" : ""}${drain === null ? "" : " draining"}` });
  setText(id, node.node_id);
  setText(label, drain === null ? node.pool : `${node.pool} → ${drain.pool}`);
  const held = [...Array(node.num_training).fill("by-training"), ...Array(node.num_serving).fill("by-services")];
  const shown = [...held, ...Array(Math.max(0, node.num_devices - held.length)).fill("by-nobody")].slice(0, 16);
  while (cells.children.length < shown.length) cells.append(element("span"));
  while (cells.children.length > shown.length) cells.lastChild.remove();
  shown.forEach((holder, index) => setAttributes(cells.children[index], { class: `cell ${holder}` }));
  setText(detail, describeNode(node, nowS));
  setAttributes(card, { title: `${node.node_id} is labelled for ${node.pool}, owned by ${node.owner}; of ${plural(node.num_devices, "device")} training holds ${node.num_training}, services ${node.num_serving}${drain === null ? "" : `; ${drain.reason}`}` });
}

function describeNode(node, nowS) {
  if (node.drain !== null) {
    const since = duration(Math.max(0, nowS - (node.drain.reclaim_at_s ?? node.drain.since_at_s)));
    return node.drain.reclaim_at_s !== null ? `reclaimed for ${since}` : `drains for ${since}`;
  }
  if (node.is_loaned) return `on loan from ${node.owner}`;
  const free = node.num_devices - node.num_training - node.num_serving;
  return free === node.num_devices ? "free" : free > 0 ? `${free} of ${node.num_devices} free` : "held";
}

// A one-line summary of the pools, in the same words as `springtide top`.
export function summaryOf(pools) {
  const parts = pools.filter((pool) => pool.num_nodes > 0 || pool.num_lent > 0).map((pool) => {
    const loaned = pool.num_borrowed > 0 ? ` (${pool.num_borrowed} on loan)` : "";
    return `${pool.pool} ${plural(pool.num_nodes, "server")}${loaned}`;
  });
  return parts.join(" · ");
}

// --- the tide ---------------------------------------------------------------------------------------------------------

function scaleOf(tide, nowS, width) {
  const ahead = tide.forecast.length > 0 ? tide.forecast.at(-1).at_s + tide.forecast_bin_s : nowS;
  const from = Math.max(Math.min(tide.from_at_s, nowS - tide.bin_s * 4), nowS - tide.bin_s * tide.peaks.length - tide.bin_s);
  const to = Math.max(ahead, nowS + (nowS - from) * 0.04);
  const values = [...tide.peaks, ...tide.forecast.map((band) => band.upper), ...tide.sizes.flatMap((size) => [size.num_open, size.num_owned])];
  const highest = Math.max(1, ...values) * 1.06;
  return {
    from, to, highest,
    // The time at a horizontal position of the chart.
    at: (x) => from + ((x - LEFT) / (width - LEFT - RIGHT)) * (to - from),
    x: (atS) => LEFT + ((Math.min(Math.max(atS, from), to) - from) / (to - from)) * (width - LEFT - RIGHT),
    y: (value) => HEIGHT - BOTTOM - (value / highest) * (HEIGHT - TOP - BOTTOM),
  };
}

const point = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;

// A step line through [at_s, value]; the last value is held until `endS`.
function stepPath(steps, endS, { x, y }) {
  if (steps.length === 0) return "";
  let path = `M${point(x(steps[0][0]), y(steps[0][1]))}`;
  for (const [atS, value] of steps.slice(1)) path += `H${x(atS).toFixed(1)}V${y(value).toFixed(1)}`;
  return `${path}H${x(endS).toFixed(1)}`;
}

// The area between two step lines: along the first one and back along the second.
function stepBand(steps, endS, { x, y }) {
  let there = "";
  let back = "";
  steps.forEach(([atS, low, high], index) => {
    const [left, right] = [x(atS), x(index + 1 < steps.length ? steps[index + 1][0] : endS)];
    there += `${index === 0 ? "M" : "L"}${point(left, y(high))}L${point(right, y(high))}`;
    back = `L${point(right, y(low))}L${point(left, y(low))}${back}`;
  });
  return steps.length === 0 ? "" : `${there}${back}Z`;
}

function drawTide(svg, { tide, now_s: nowS, wall_clock_offset_s: offsetS }) {
  const width = Math.max(300, svg.clientWidth);
  const scale = scaleOf(tide, nowS, width);
  const parts = [hatchesOf()];
  const add = (tag, attributes, text) => {
    const node = svgElement(tag, attributes);
    if (text !== undefined) setText(node, text);
    parts.push(node);
    return node;
  };
  for (const value of gridValues(scale.highest)) {
    const y = scale.y(value);
    add("line", { class: "grid-line", x1: LEFT, x2: width - RIGHT, y1: y, y2: y });
    add("text", { class: "tick", x: LEFT - 6, y: y + 4, "text-anchor": "end" }, String(value));
  }
  drawHours(add, scale, offsetS, width);
  const needed = tide.peaks.map((peak, index) => [tide.from_at_s + index * tide.bin_s, peak]);
  add("path", { class: "need", d: stepBand(needed.map(([atS, peak]) => [atS, 0, peak]), nowS, scale) });
  const bandEndS = tide.forecast.length > 0 ? tide.forecast.at(-1).at_s + tide.forecast_bin_s : nowS;
  const ahead = tide.forecast.map((band) => [Math.max(nowS, band.at_s), band]);
  add("path", { class: "band", d: stepBand(ahead.map(([atS, band]) => [atS, band.lower, band.upper]), bandEndS, scale) });
  add("path", { class: "expected", d: stepPath(ahead.map(([atS, band]) => [atS, band.expected]), bandEndS, scale) });
  drawSizes(add, tide.sizes, nowS, scale);
  add("line", { class: "now", x1: scale.x(nowS), x2: scale.x(nowS), y1: TOP - 6, y2: HEIGHT - BOTTOM });
  setAttributes(svg, { viewBox: `0 0 ${width} ${HEIGHT}`, height: HEIGHT, "aria-label": describeTide(tide) });
  svg.replaceChildren(...parts);
  return scale;
}

// Describes one moment of the chart: needed and open devices in the past, the forecast in the future.
export function describeMoment(atS, { tide, now_s: nowS, wall_clock_offset_s: offsetS }) {
  const when = clock(atS, offsetS, tide.day_s < 7200);
  if (atS > nowS) {
    const band = tide.forecast.findLast((candidate) => candidate.at_s <= atS);
    if (band === undefined) return "";
    return `${when}: ${number(band.expected, 2)} expected, ${number(band.lower, 2)} to ${number(band.upper, 2)}`;
  }
  const index = Math.floor((atS - tide.from_at_s) / tide.bin_s);
  const size = tide.sizes.findLast((candidate) => candidate.at_s <= atS);
  const needed = tide.peaks[index] === undefined ? "" : `${tide.peaks[index]} needed`;
  const open = size === undefined ? "" : `${size.num_open} open to services of ${size.num_owned} owned`;
  const text = [needed, open].filter(Boolean).join(", ");
  return text === "" ? "" : `${when}: ${text}`;
}

function drawSizes(add, sizes, nowS, scale) {
  const loaned = sizes.map((size) => [size.at_s, size.num_open, Math.max(size.num_open, size.num_owned)]);
  const borrowed = sizes.map((size) => [size.at_s, size.num_owned, Math.max(size.num_open, size.num_owned)]);
  add("path", { class: "lent", d: stepBand(loaned, nowS, scale) });
  add("path", { class: "borrowed", d: stepBand(borrowed, nowS, scale) });
  add("path", { class: "owned", d: stepPath(sizes.map((size) => [size.at_s, size.num_owned]), scale.to, scale) });
  add("path", { class: "open", d: stepPath(sizes.map((size) => [size.at_s, size.num_open]), nowS, scale) });
}

function drawHours(add, { from, to, x }, offsetS, width) {
  const step = STEPS_S.find((candidate) => (to - from) / candidate <= Math.max(3, width / 110)) ?? 172800;
  // Ticks at round moments of the reader's own clock.
  const zoneS = new Date((from + offsetS) * 1000).getTimezoneOffset() * -60;
  const shift = offsetS + zoneS;
  for (let at = Math.ceil((from + shift) / step) * step - shift; at <= to; at += step) {
    add("line", { class: "grid-line", x1: x(at), x2: x(at), y1: TOP - 6, y2: HEIGHT - BOTTOM + 3 });
    if (x(at) > LEFT + 12 && x(at) < width - 22) add("text", { class: "tick", x: x(at), y: HEIGHT - 6, "text-anchor": "middle" }, clock(at, offsetS, step < 60));
  }
}

function gridValues(highest) {
  const step = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000].find((candidate) => highest / candidate <= 5) ?? 5000;
  const values = [];
  for (let value = 0; value <= highest; value += step) values.push(value);
  return values;
}

// Loaned and borrowed nodes differ in colour and in the direction of the hatching.
function hatchesOf() {
  const defs = svgElement("defs");
  for (const [name, angle] of [["lent", 45], ["borrowed", -45]]) {
    const pattern = svgElement("pattern", { id: `${name}-hatch`, width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${angle})` });
    pattern.append(svgElement("rect", { class: `${name}-line`, width: 2, height: 7 }));
    defs.append(pattern);
  }
  return defs;
}

function describeTide(tide) {
  const now = tide.level === null ? "nothing is known of what services need" : `services need ${plural(tide.level, "device")} now`;
  const highest = tide.forecast.length === 0 ? "" : `, at most ${number(Math.max(...tide.forecast.map((band) => band.upper)))} by the forecast`;
  return `The tide: ${now}${highest}.`;
}

function describeForecast({ tide, now_s: nowS, wall_clock_offset_s: offsetS }) {
  if (tide.level === null) return "no service has been deployed yet";
  const now = `${plural(tide.level, "device")} needed now`;
  if (tide.forecast.length === 0) return `${now}; a forecast takes a whole day (${duration(tide.day_s)}) of the past`;
  const highest = tide.forecast.reduce((one, other) => (other.upper > one.upper ? other : one));
  return `${now}; highest ahead: ${number(highest.expected, 2)} expected, up to ${number(highest.upper, 2)}, ${highest.at_s <= nowS ? "now" : `at ${clock(highest.at_s, offsetS, tide.day_s < 3600)}`}`;
}

// --- loans and reclaims -----------------------------------------------------------------------------------------------

const EFFECTS = { stopped: "stopped", shrunk: "shrank", moved: "moved", forced: "ended by force" };

function describeHandover(handover) {
  const affected = handover.affected.map((job) => {
    const change = job.effect === "moved" || job.effect === "stopped" ? "" : ` ${job.num_workers_before} → ${job.num_workers_after}`;
    return `${job.name} ${EFFECTS[job.effect]}${change}`;
  });
  const cost = handover.cost_s > 0 ? `cost ${number(handover.cost_s)} device\u2011s` : "";
  return [...affected, cost].filter(Boolean).join(", ");
}

function timesOf(handover, nowS) {
  // A node may be drained long before it is needed: the duration of a reclaim counts from the order to leave.
  const began = handover.reclaim_at_s ?? handover.demanded_at_s;
  if (handover.state === "draining") return `for ${duration(Math.max(0, nowS - began))}`;
  if (handover.state !== "done") return handover.state;
  const labelled = handover.labelled_at_s - began;
  const label = labelled > 0 ? `label ${duration(labelled)}` : "label at once";
  return handover.serving_at_s === null ? label : `${label}, serving ${duration(handover.serving_at_s - began)}`;
}

function makeHandoverRow() {
  const row = element("tr");
  for (const name of ["when", "what", "why", "whom", "number"]) row.append(element("td", { class: name }));
  row.children[1].append(element("span"), " ", element("span", { class: "first" }), element("div", { class: "second" }));
  return row;
}

function fillHandoverRow(row, handover, nowS, offsetS) {
  const [when, what, why, whom, took] = row.children;
  const isReclaim = handover.kind === "reclaim";
  const isHarsh = isReclaim && handover.reclaim_kind === "interrupting";
  setText(when, clock(handover.demanded_at_s, offsetS));
  setAttributes(what.children[0], { class: `state ${handover.state === "draining" ? "pending" : isHarsh ? "failed" : isReclaim ? "pool-inference" : "pool-training"}` });
  setText(what.children[0], isReclaim ? "RECLAIM" : handover.is_return ? "RETURN" : "LOAN");
  setText(what.children[1], handover.node_id);
  setText(what.children[2], `${handover.from_pool} → ${handover.to_pool}`);
  setText(why, handover.reason || "no reason given");
  setText(whom, describeHandover(handover) || (isReclaim && handover.state === "done" ? "nobody was there" : ""));
  setText(took, timesOf(handover, nowS));
  const ahead = handover.reclaim_at_s === null ? 0 : handover.reclaim_at_s - handover.demanded_at_s;
  setAttributes(took, { title: ahead > 0 ? `it drained ${duration(ahead)} before any job had to leave` : null });
}

// --- the section ------------------------------------------------------------------------------------------------------

export class PoolsSection {
  constructor() {
    this.report = null;
    this.wanted = "";
    this.have = null;
    this.isBusy = false;
    this.pastDays = 1;
    this.scale = null;
    this.pointerX = null;
    byId("tide").addEventListener("pointermove", (event) => this.point(event.clientX - byId("tide").getBoundingClientRect().left));
    byId("tide").addEventListener("pointerleave", () => this.point(null));
    this.nodes = new KeyedList(byId("pool-nodes"), makeNodeCard);
    this.rows = new KeyedList(byId("handovers").querySelector("tbody"), makeHandoverRow);
    new ResizeObserver(() => this.drawTide()).observe(byId("tide"));
    for (const button of document.querySelectorAll("[data-days]")) button.addEventListener("click", () => this.choose(Number(button.dataset.days)));
    this.mark();
  }

  choose(days) {
    this.pastDays = days;
    this.have = null;
    this.mark();
    this.refresh();
  }

  mark() {
    for (const button of document.querySelectorAll("[data-days]")) setAttributes(button, { "aria-pressed": String(Number(button.dataset.days) === this.pastDays) });
  }

  // Nodes are in every status; the tide and the loans are fetched when the nodes have changed, and at intervals.
  draw(status, nowS) {
    const nodes = status.nodes ?? [];
    byId("pools").hidden = nodes.length === 0;
    for (const entry of document.querySelectorAll(".of-pools")) entry.hidden = nodes.length === 0;
    if (nodes.length === 0) return;
    byId("pool-nodes").classList.toggle("dense", nodes.length > MAX_WIDE_NODES);
    this.nodes.update(nodes.filter((node) => node.num_devices > 0), (node) => node.node_id, (card, node) => fillNodeCard(card, node, nowS));
    setText(byId("pools-summary"), summaryOf(status.pools ?? []));
    // A configured day may be short, so the chart is refreshed after a hundredth of it.
    const everyS = Math.min(10, Math.max(1, (this.report?.tide.day_s ?? 0) / 100));
    this.wanted = JSON.stringify([nodes, Math.floor(nowS / everyS)]);
    this.refresh();
    this.drawHandovers(nowS);
  }

  async refresh() {
    if (this.isBusy || this.wanted === this.have) return;
    this.isBusy = true;
    const wanted = this.wanted;
    try {
      this.report = await fetchJson(`/v1/pools?past_days=${this.pastDays}`);
      this.have = wanted;
      this.drawTide();
      this.drawHandovers(this.report.now_s);
    } catch {
      // connection.js reports connection problems; the next status tries again.
    }
    setTimeout(() => {
      this.isBusy = false;
      this.refresh();
    }, REFRESH_MS);
  }

  drawTide() {
    if (this.report === null || byId("pools").hidden) return;
    this.scale = drawTide(byId("tide"), this.report);
    this.describe();
  }

  // While the pointer is over the chart, the line above it describes that moment.
  describe() {
    if (this.report === null) return;
    const text = this.pointerX === null || this.scale === null ? "" : describeMoment(this.scale.at(this.pointerX), this.report);
    setText(byId("tide-now"), text || describeForecast(this.report));
  }

  point(x) {
    this.pointerX = x;
    this.describe();
  }

  drawHandovers(nowS) {
    if (this.report === null) return;
    const newest = this.report.handovers.slice(-NUM_LINES).reverse();
    const keyOf = (handover) => `${handover.node_id}|${handover.demanded_at_s}|${handover.to_pool}`;
    this.rows.update(newest, keyOf, (row, handover) => fillHandoverRow(row, handover, nowS, this.report.wall_clock_offset_s));
    byId("handovers").hidden = newest.length === 0;
    byId("handovers-none").hidden = newest.length > 0;
  }
}
