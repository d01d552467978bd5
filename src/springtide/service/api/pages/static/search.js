// The search for a job's functions: a map of workers and memory with what was tried, and speed, batch and functions over time.

import { fetchJson } from "./connection.js";
import { element, setAttributes, setText, svgElement } from "./dom.js";
import { UNKNOWN, clock, duration, number, plural } from "./format.js";

const MAP = { width: 460, height: 236, left: 62, right: 8, top: 8, bottom: 34 };
const TIME = { width: 460, left: 62, right: 12, top: 14, row: 66, gap: 14, bottom: 20 };
const RADIUS = 8.5;
const EVERY_MS = 2000;
const MOST_TRIED = 8;
const MEASURES = {
  step: { name: "step time", of: (cell) => cell.step_s, format: duration },
  cost: { name: "step cost", of: (cell) => cell.step_usd, format: (usd) => dollars(usd) },
};
// The values that are drawn together over time, as in figure 13 of SMLT.
const ROWS = [
  { name: "samples a second", of: (point) => point.samples_per_s },
  { name: "global batch", of: (point) => point.global_batch_size || null, isStepped: true },
  { name: "functions", of: (point) => point.num_workers || null, isStepped: true },
];

const isKnown = (value) => value !== null && value !== undefined && Number.isFinite(value);
const ascending = (values) => [...new Set(values)].sort((one, other) => one - other);

// $4.20, $0.0123, $0.00046: the same format as on the command line.
export function dollars(usd) {
  if (usd === 0 || usd >= 0.1) return `$${usd.toFixed(2)}`;
  if (usd < 1e-6) return "< $0.000001";
  const [whole, digits] = usd.toFixed(2 - Math.floor(Math.log10(usd))).split(".");
  return `$${whole}.${digits.replace(/0+$/, "").padEnd(2, "0")}`;
}

const configuration = (one) => `${one.num_workers} × ${one.memory_mb} MB`;

function phaseText(search) {
  const words = { waiting: "begins with", searching: "searching, now", settled: "settled on", over: "ended with" };
  return `${words[search.phase]} ${configuration(search)}`;
}

function costText(search) {
  if (search.num_left === 0) return "nothing beyond training itself";
  return `${duration(search.search_s)} and ${dollars(search.search_usd)} beyond the best known, in ${plural(search.num_left, "configuration")} left again`;
}

function errorText(search) {
  const percent = (fraction) => `${Math.round(100 * fraction)} %`;
  const facts = [];
  if (isKnown(search.model_error_fraction)) facts.push(`model alone off by ${percent(search.model_error_fraction)}`);
  if (isKnown(search.error_fraction)) facts.push(`corrected ${percent(search.error_fraction)}`);
  if (search.num_earlier > 0) facts.push(`${plural(search.num_earlier, "measurement")} from earlier runs`);
  return facts.join(", ") || UNKNOWN;
}

function scheduleText(job) {
  const phases = job.batch_schedule ?? [];
  if (phases.length === 0) return `${job.global_batch_size} samples a step`;
  return `${job.global_batch_size} now; ${phases.map((phase) => `${phase.global_batch_size} from epoch ${phase.from_epoch}`).join(", ")}`;
}

function streamText(stream) {
  if ((stream ?? null) === null) return "";
  const counts = `${plural(stream.num_waiting, "sample")} waiting, ${number(stream.num_used, 9)} used`;
  if (stream.is_closed) return `${stream.name}: ${counts}; closed, the rest is trained`;
  const rate = `${number(stream.arrivals_per_s)} a second arrive`;
  return `${stream.name}: ${counts}, ${rate}${stream.is_idle ? "; idle: no function runs, nothing is charged" : ""}`;
}

function label(words, attributes) {
  const text = svgElement("text", { class: "tick", ...attributes });
  setText(text, words);
  return text;
}

function titled(node, words) {
  const title = svgElement("title");
  setText(title, words);
  node.append(title);
  return node;
}

// The labels of an axis that are drawn, chosen so that they do not overlap.
function thinned(values, most) {
  const every = Math.ceil(values.length / most);
  return values.map((value, index) => (index % every === 0 ? value : null));
}

function cellWords(cell) {
  const spread = cell.error_fraction > 0 ? ` ± ${Math.round(100 * cell.error_fraction)} %` : "";
  const model = isKnown(cell.model_step_s) ? `; the model alone: ${duration(cell.model_step_s)}` : "";
  const misses = cell.meets_goal === false ? "; is expected to miss the goal" : "";
  return `${configuration(cell)}: ${duration(cell.step_s)}${spread} and ${dollars(cell.step_usd)} a step${model}${misses}`;
}

function triedWords(one, order) {
  const model = isKnown(one.model_step_s) ? `, the model said ${duration(one.model_step_s)}` : "";
  const now = one.is_running ? "; runs now" : one.is_left ? "; left again" : "";
  return `${order}: ${configuration(one)} with batch ${one.global_batch_size}: ${duration(one.step_s)} measured over ${plural(one.num_steps, "step")}${model}, ${dollars(one.step_usd)} a step${now}`;
}

export function drawMap(svg, search, batch, measure) {
  const cells = search.expected;
  const here = search.tried.map((one, index) => ({ ...one, order: index + 1 })).filter((one) => one.global_batch_size === batch);
  const workers = ascending([...cells, ...here, search].map((one) => one.num_workers));
  const sizes = ascending([...cells, ...here, search].map((one) => one.memory_mb));
  const [width, height] = [(MAP.width - MAP.left - MAP.right) / workers.length, (MAP.height - MAP.top - MAP.bottom) / sizes.length];
  const x = (count) => MAP.left + workers.indexOf(count) * width;
  const y = (memory) => MAP.height - MAP.bottom - (sizes.indexOf(memory) + 1) * height;
  const values = cells.map(measure.of).filter((value) => isKnown(value) && value > 0);
  const [low, high] = [Math.log(Math.min(...values)), Math.log(Math.max(...values))];
  const parts = [];
  for (const cell of cells) {
    const far = high > low ? (Math.log(measure.of(cell)) - low) / (high - low) : 0;
    const box = svgElement("rect", { class: "map-cell", x: x(cell.num_workers), y: y(cell.memory_mb), width: width + 0.4, height: height + 0.4 });
    box.style.fill = `color-mix(in oklch, var(--map-far) ${(100 * far).toFixed(1)}%, var(--map-near))`;
    parts.push(titled(box, cellWords(cell)));
    if (cell.meets_goal === false) {
      const [left, top] = [x(cell.num_workers), y(cell.memory_mb)];
      parts.push(svgElement("path", { class: "map-misses", d: `M${left.toFixed(1)} ${(top + height).toFixed(1)}L${(left + width).toFixed(1)} ${top.toFixed(1)}` }));
    }
  }
  thinned(workers, 14).forEach((count) => count === null || parts.push(label(count, { x: x(count) + width / 2, y: MAP.height - MAP.bottom + 14, "text-anchor": "middle" })));
  thinned(sizes, 10).forEach((memory) => memory === null || parts.push(label(`${memory} MB`, { x: MAP.left - 5, y: y(memory) + height / 2 + 4, "text-anchor": "end" })));
  parts.push(label("workers", { x: MAP.left + (MAP.width - MAP.left - MAP.right) / 2, y: MAP.height - 4, "text-anchor": "middle" }));
  for (const one of here) {
    const kind = one.is_running ? "running" : one.is_left ? "left" : "kept";
    const group = svgElement("g", { class: `tried ${kind}` });
    const [cx, cy] = [x(one.num_workers) + width / 2, y(one.memory_mb) + height / 2];
    group.append(svgElement("circle", { cx, cy, r: RADIUS }), label(one.order, { x: cx, y: cy + 4, "text-anchor": "middle" }));
    parts.push(titled(group, triedWords(one, one.order)));
  }
  const isShown = here.some((one) => one.is_running);
  if (!isShown && sizes.includes(search.memory_mb)) {
    const [cx, cy] = [x(search.num_workers) + width / 2, y(search.memory_mb) + height / 2];
    parts.push(titled(svgElement("circle", { class: "map-now", cx, cy, r: RADIUS }), `runs now: ${configuration(search)}, not measured yet`));
  }
  setAttributes(svg, { viewBox: `0 0 ${MAP.width} ${MAP.height}`, "aria-label": `${measure.name} by workers and memory, from ${plural(cells.length, "configuration")}; ${here.length} tried at a batch of ${batch}; ${phaseText(search)}` });
  svg.replaceChildren(...parts);
  return values.length === 0 ? null : { low: measure.format(Math.exp(low)), high: measure.format(Math.exp(high)) };
}

function lineOf(points, row, x, y) {
  let path = "";
  let isDown = false;
  for (const point of points) {
    const value = row.of(point);
    if (!isKnown(value)) {
      isDown = false;
      continue;
    }
    const [px, py] = [x(point.at_s).toFixed(1), y(value).toFixed(1)];
    path += !isDown ? `M${px} ${py}` : row.isStepped ? `H${px}V${py}` : `L${px} ${py}`;
    isDown = true;
  }
  return path;
}

export function drawOverTime(svg, points, changes, offsetS) {
  const height = TIME.top + ROWS.length * (TIME.row + TIME.gap) - TIME.gap + TIME.bottom;
  setAttributes(svg, { viewBox: `0 0 ${TIME.width} ${height}` });
  const known = points.filter((point) => ROWS.some((row) => isKnown(row.of(point))));
  if (known.length === 0) {
    svg.replaceChildren(label("nothing has been reported yet", { x: TIME.left, y: height / 2 }));
    return;
  }
  const [from, to] = [known[0].at_s, Math.max(known.at(-1).at_s, known[0].at_s + 1)];
  const x = (atS) => TIME.left + ((atS - from) / (to - from)) * (TIME.width - TIME.left - TIME.right);
  const parts = [];
  for (const change of changes) {
    if (change.at_s < from || change.at_s > to) continue;
    const at = x(change.at_s);
    const words = `${clock(change.at_s, offsetS)}: another plan after step ${change.step}, standstill ${duration(change.pause_s)}, ${plural(change.num_stayed, "function")} went on`;
    parts.push(titled(svgElement("line", { class: "change", x1: at, x2: at, y1: TIME.top, y2: height - TIME.bottom }), words));
  }
  ROWS.forEach((row, index) => {
    const top = TIME.top + index * (TIME.row + TIME.gap);
    const values = known.map(row.of).filter(isKnown);
    const highest = Math.max(1e-9, ...values) * 1.05;
    const y = (value) => top + TIME.row - (value / highest) * TIME.row;
    for (const part of [0, 1]) {
      parts.push(svgElement("line", { class: "grid-line", x1: TIME.left, x2: TIME.width - TIME.right, y1: top + TIME.row * (1 - part), y2: top + TIME.row * (1 - part) }));
    }
    const most = Math.max(...values);
    parts.push(label(number(most), { x: TIME.left - 5, y: y(most) + 4, "text-anchor": "end" }), label("0", { x: TIME.left - 5, y: top + TIME.row + 4, "text-anchor": "end" }));
    parts.push(label(row.name, { class: "tick row-name", x: TIME.left, y: top - 3 }));
    parts.push(svgElement("path", { class: `line row-${index}`, d: lineOf(known, row, x, y) }));
  });
  parts.push(label(clock(from, offsetS), { x: TIME.left, y: height - 6 }), label(clock(to, offsetS), { x: TIME.width - TIME.right, y: height - 6, "text-anchor": "end" }));
  const last = known.at(-1);
  setAttributes(svg, { "aria-label": `over time: ${ROWS.map((row) => `${row.name} ${number(row.of(last))} now`).join(", ")}` });
  svg.replaceChildren(...parts);
}

function fillTried(body, search) {
  const numbered = search.tried.map((one, index) => [index + 1, one]).slice(-MOST_TRIED);
  const rows = numbered.map(([order, one]) => {
    const state = one.is_running ? "runs now" : one.is_left ? "left" : "";
    const model = isKnown(one.model_step_s) ? `${duration(one.model_step_s)} (${one.model_step_s >= one.step_s ? "+" : "−"}${Math.round(100 * Math.abs(one.model_step_s / one.step_s - 1))} %)` : UNKNOWN;
    const cells = [order, one.num_workers, `${one.memory_mb} MB`, one.global_batch_size, one.num_steps, duration(one.step_s), model, dollars(one.step_usd)];
    return element("tr", { class: one.is_running ? "running" : null }, ...cells.map((cell) => element("td", { class: "number" }, String(cell))), element("td", {}, state));
  });
  body.replaceChildren(...rows);
}

function makeFacts() {
  const facts = element("dl", { class: "run-facts" });
  for (const name of ["Goal", "Search", "Searching cost", "Prediction of a step", "Batch", "Stream"]) facts.append(element("div", {}, element("dt", {}, name), element("dd")));
  return facts;
}

export function makeSearch() {
  const zoom = element("div", { class: "zoom", role: "group", "aria-label": "What the map shows" });
  for (const [key, measure] of Object.entries(MEASURES)) zoom.append(element("button", { type: "button", "data-measure": key }, measure.name));
  const map = element("figure", {}, element("figcaption", {}, element("span", {}, "workers × memory"), zoom), svgElement("svg", { class: "map", role: "img" }), element("p", { class: "second map-legend" }));
  const time = element("figure", {}, element("figcaption", {}, "over time"), svgElement("svg", { class: "over-time", role: "img" }), element("p", { class: "second" }, "dashed: another plan"));
  const head = element("thead", {}, element("tr", {}, ...["", "Workers", "Memory", "Batch", "Steps", "Step", "Model said", "A step costs"].map((name) => element("th", { scope: "col", class: "number" }, name)), element("th", { scope: "col" })));
  const table = element("table", { class: "tried-table" }, element("caption", { class: "unseen" }, "What was tried"), head, element("tbody"));
  const node = element("section", { class: "search" }, makeFacts(), element("div", { class: "search-parts" }, map, time), element("div", { class: "scroll" }, table));
  node.shown = { measure: "step", detail: null, points: [], key: "", askedMs: -Infinity, isBusy: false, job: null, offsetS: 0 };
  zoom.addEventListener("click", (event) => {
    const chosen = event.target.closest("[data-measure]");
    if (chosen === null) return;
    node.shown.measure = chosen.dataset.measure;
    redraw(node);
  });
  return node;
}

// The map and the points are not in the stream: they are fetched after a measurement, and at intervals.
async function refresh(node) {
  const { shown } = node;
  const { job } = shown;
  const key = `${job.job_id} ${job.search === null ? "" : job.search.tried.map((one) => one.num_steps).join()} ${job.global_batch_size} ${job.state}`;
  const isDue = performance.now() - shown.askedMs > EVERY_MS;
  if (shown.isBusy || !isDue || (key === shown.key && job.state !== "RUNNING")) return;
  shown.isBusy = true;
  shown.askedMs = performance.now();
  try {
    const path = `/v1/jobs/${encodeURIComponent(job.job_id)}`;
    if (key !== shown.key && job.search !== null) shown.detail = (await fetchJson(path)).search ?? null;
    shown.points = (await fetchJson(`${path}/series`)).points;
    shown.key = key;
    redraw(node);
  } catch {
    // connection.js reports connection problems; the next status tries again.
  }
  shown.isBusy = false;
}

function redraw(node) {
  const { job, detail, points, measure, offsetS } = node.shown;
  const [, parts] = node.children;
  const [map, time] = parts.children;
  for (const button of map.querySelectorAll("[data-measure]")) setAttributes(button, { "aria-pressed": String(button.dataset.measure === measure) });
  const hasMap = detail !== null && detail.expected.length > 0;
  setAttributes(map, { hidden: !hasMap });
  if (hasMap) {
    const range = drawMap(map.children[1], { ...job.search, expected: detail.expected }, job.global_batch_size, MEASURES[measure]);
    const misses = detail.expected.some((cell) => cell.meets_goal === false) ? "; struck through: is expected to miss the goal" : "";
    setText(map.children[2], range === null ? "" : `light ${range.low} … dark ${range.high} expected at a batch of ${job.global_batch_size}; numbers: tried, in order; filled: runs now; dashed: left again${misses}`);
  }
  drawOverTime(time.children[1], points, job.functions?.changes ?? [], offsetS);
}

export function fillSearch(node, job, { offsetS }) {
  const search = job.search ?? null;
  const stream = job.stream ?? null;
  const isShown = search !== null || stream !== null || (job.batch_schedule ?? []).length > 0;
  setAttributes(node, { hidden: !isShown });
  if (!isShown) return;
  Object.assign(node.shown, { job: { ...job, search }, offsetS });
  const texts = search === null ? ["", "", "", ""] : [search.goal, [phaseText(search), search.reason].filter(Boolean).join(": "), costText(search), errorText(search)];
  texts.push(scheduleText(job), streamText(stream));
  const [facts, , table] = node.children;
  texts.forEach((text, index) => {
    setAttributes(facts.children[index], { hidden: text === "" });
    setText(facts.children[index].children[1], text);
  });
  setAttributes(table, { hidden: search === null || search.tried.length === 0 });
  if (search !== null) fillTried(table.querySelector("tbody"), search);
  redraw(node);
  refresh(node);
}
