// The course of one job's training over time: progress and its prediction, loss, the job's own metrics, goodput, batch and
// gradient noise. Beside another run, both are drawn over their steps.

import { fetchJson } from "./connection.js";
import { KeyedList, byId, element, setAttributes, setText, svgElement } from "./dom.js";
import { UNKNOWN, clock, number, percent } from "./format.js";

const WIDTH = 660;
const HEIGHT = 98;
const LEFT = 58;
const RIGHT = 14;
const TOP = 10;
const BOTTOM = 20;
const EVERY_MS = 1000;

// The lines of each chart, with the name of their style.
const CHARTS = [
  { id: "series-progress", format: percent, lines: [{ class: "line", of: (point) => point.progress_fraction }], highest: 1, isPredicted: true },
  { id: "series-loss", format: (value) => number(value, 4), lines: [{ class: "line", of: (point) => point.loss }] },
  {
    id: "series-goodput", format: (value) => number(value), lines: [
      { class: "line faint", of: (point) => point.samples_per_s },
      { class: "line", of: (point) => point.goodput_samples_per_s },
    ],
  },
  { id: "series-batch", format: (value) => number(value, 6), lines: [{ class: "line", of: (point) => point.global_batch_size, isStepped: true }] },
  { id: "series-noise", format: (value) => number(value), lines: [{ class: "line", of: (point) => point.noise_scale }] },
];

// A chart for each metric that one of the runs reports.
function metricChart(name) {
  return { id: `series-metric-${name}`, name, format: (value) => number(value, 4), lines: [{ class: "line", of: (point) => point.metrics[name] }] };
}

const isKnown = (value) => value !== null && value !== undefined && Number.isFinite(value);

// A prediction is drawn from a change of workers or batch to the next one; the newest is drawn to its end.
export function predictions(points) {
  const made = [];
  for (const [index, point] of points.entries()) {
    if (!isKnown(point.predicted_finish_at_s) || !isKnown(point.progress_fraction) || point.predicted_finish_at_s <= point.at_s) continue;
    const last = made.at(-1);
    const isChange = last === undefined || last.point.num_workers !== point.num_workers || last.point.global_batch_size !== point.global_batch_size;
    if (!isChange) continue;
    if (last !== undefined) last.untilS = point.at_s;
    made.push({ point, untilS: Infinity, index });
  }
  return made.map(({ point, untilS }) => {
    const endS = Math.min(untilS, point.predicted_finish_at_s);
    const speed = (1 - point.progress_fraction) / (point.predicted_finish_at_s - point.at_s);
    return { fromS: point.at_s, from: point.progress_fraction, toS: endS, to: point.progress_fraction + speed * (endS - point.at_s) };
  });
}

// Points by time, or by step where two runs are compared.
const OVER_TIME = { of: (point) => point.at_s, format: (atS, offsetS) => clock(atS, offsetS) };
const OVER_STEPS = { of: (point) => point.step, format: (step) => `step ${number(step, 6)}` };

// Rounds up to 1, 2, 4, 6 or 8 times a power of ten, so that half of it is a round number too.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 6, 8, 10].find((digit) => digit * power >= value);
}

function pathOf(points, line, axis, x, y) {
  let path = "";
  let isDown = false;
  for (const point of points) {
    const value = line.of(point);
    if (!isKnown(value)) {
      isDown = false;
      continue;
    }
    const [px, py] = [x(axis.of(point)).toFixed(1), y(value).toFixed(1)];
    path += !isDown ? `M${px} ${py}` : line.isStepped ? `H${px}V${py}` : `L${px} ${py}`;
    isDown = true;
  }
  return path;
}

// `runs` are the points of one run, or of two; `axis` is what they are drawn over, in `range`.
function drawChart(chart, runs, axis, range, offsetS) {
  const svg = byId(chart.id);
  const values = runs.flatMap((points) => points.flatMap((point) => chart.lines.map((line) => line.of(point)))).filter(isKnown);
  const most = Math.max(0, ...values);
  const least = Math.min(0, ...values);
  const lowest = least < 0 ? -roundUp(-least) : 0;
  const highest = chart.highest ?? (most > 0 || lowest === 0 ? roundUp(Math.max(1e-9, most)) : 0);
  const x = (value) => LEFT + ((value - range.from) / (range.to - range.from)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - ((value - lowest) / (highest - lowest)) * (HEIGHT - TOP - BOTTOM);
  const parts = [];
  for (const part of [0, 0.5, 1]) {
    const value = lowest + part * (highest - lowest);
    parts.push(svgElement("line", { class: "grid-line", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value) }));
    const label = svgElement("text", { class: "tick", x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" });
    setText(label, values.length > 0 || chart.highest !== undefined ? chart.format(value) : "");
    parts.push(label);
  }
  for (const [at, anchor] of [[range.from, "start"], [range.to, "end"]]) {
    const label = svgElement("text", { class: "tick", x: x(at), y: HEIGHT - 5, "text-anchor": anchor });
    setText(label, axis.format(at, offsetS));
    parts.push(label);
  }
  if (chart.isPredicted && axis === OVER_TIME) {
    for (const made of predictions(runs[0])) {
      parts.push(svgElement("path", { class: "predicted", d: `M${x(made.fromS).toFixed(1)} ${y(made.from).toFixed(1)}L${x(made.toS).toFixed(1)} ${y(made.to).toFixed(1)}` }));
    }
  }
  for (const [index, points] of runs.entries()) {
    // Of a run that another one is compared with, the main line of each chart is drawn.
    for (const line of index === 0 ? chart.lines : chart.lines.slice(-1)) {
      parts.push(svgElement("path", { class: index === 0 ? line.class : "line other", d: pathOf(points, line, axis, x, y) }));
    }
  }
  if (values.length === 0) {
    const none = svgElement("text", { class: "note", x: LEFT + 10, y: HEIGHT / 2 });
    setText(none, "not known yet");
    parts.push(none);
  }
  setAttributes(svg, { viewBox: `0 0 ${WIDTH} ${HEIGHT}` });
  svg.replaceChildren(...parts);
  const newest = runs.map((points) => points.findLast((point) => isKnown(chart.lines.at(-1).of(point))));
  setText(byId(`${chart.id}-now`), newest.map((point) => (point === undefined ? UNKNOWN : chart.format(chart.lines.at(-1).of(point)))).join(" / "));
}

function timeRange(points, nowS) {
  if (points.length === 0) return { from: nowS - 1, to: nowS };
  const last = points.at(-1);
  const isOver = last.progress_fraction === 1;
  const made = predictions(points).map((prediction) => prediction.toS);
  const to = Math.max(last.at_s, ...made, isOver ? 0 : nowS);
  return { from: points[0].at_s, to: Math.max(to, points[0].at_s + 1) };
}

const stepRange = (runs) => ({ from: 0, to: Math.max(1, ...runs.flatMap((points) => points.map((point) => point.step))) });

const seriesOf = (jobId) => fetchJson(`/v1/jobs/${encodeURIComponent(jobId)}/series`);

class SeriesDialog {
  constructor(offsetS, jobs) {
    this.offsetS = offsetS;
    this.jobs = jobs;
    this.jobId = null;
    this.timer = null;
    this.choices = new KeyedList(byId("series-beside"), () => element("option"));
    this.metrics = new KeyedList(byId("series-metrics"), ({ id, name }) => element("section", {},
      element("h3", {}, `${name} `, element("b", { id: `${id}-now` })),
      svgElement("svg", { id, class: "chart", role: "img", "aria-label": `${name} over time` })));
  }

  open(jobId, name) {
    this.jobId = jobId;
    setText(byId("series-title"), `How ${name} trains`);
    this.offerOthers(jobId, name);
    byId("series").showModal();
    this.refresh();
  }

  // Runs of the same name first, the newest of each before the older ones.
  offerOthers(jobId, name) {
    const others = this.jobs().filter((job) => job.job_id !== jobId);
    others.sort((one, other) => (other.name === name) - (one.name === name) || other.submitted_at_s - one.submitted_at_s);
    this.choices.update([{ job_id: "" }, ...others], (job) => job.job_id, (node, job) => {
      node.value = job.job_id;
      setText(node, job.job_id === "" ? "no other run" : job.job_id);
    });
    byId("series-beside").value = "";
  }

  async refresh() {
    clearTimeout(this.timer);
    const jobId = this.jobId;
    if (jobId === null) return;
    const besideId = byId("series-beside").value;
    try {
      const found = await Promise.all([jobId, besideId].filter((id) => id !== "").map(seriesOf));
      if (jobId !== this.jobId || besideId !== byId("series-beside").value) return;
      this.draw(found.map((series) => series.points), found[0].now_s, jobId, besideId);
    } catch (error) {
      setText(byId("series-state"), `no answer: ${error.message}`);
    }
    this.timer = setTimeout(() => this.refresh(), EVERY_MS);
  }

  draw(runs, nowS, jobId, besideId) {
    const names = [...new Set(runs.flatMap((points) => points.flatMap((point) => Object.keys(point.metrics))))].sort();
    const metrics = names.map(metricChart);
    this.metrics.update(metrics, (chart) => chart.id, () => {});
    const axis = runs.length > 1 ? OVER_STEPS : OVER_TIME;
    const range = runs.length > 1 ? stepRange(runs) : timeRange(runs[0], nowS);
    for (const chart of [...CHARTS, ...metrics]) drawChart(chart, runs, axis, range, this.offsetS());
    byId("series-legend").hidden = besideId === "";
    setText(byId("series-this"), jobId);
    setText(byId("series-other"), besideId);
    const silent = [jobId, besideId].filter((id, index) => runs[index]?.length === 0);
    setText(byId("series-state"), silent.length === 0 ? "" : silent.length < runs.length ? `${silent[0]} has reported nothing yet.` : "Nothing has been reported yet.");
  }

  close() {
    this.jobId = null;
    clearTimeout(this.timer);
  }
}

// One listener for all rows, including later ones: a button's `data-series` holds the job's id. `jobs` gives all jobs now.
export function listenForSeries(offsetS, jobs) {
  const dialog = new SeriesDialog(offsetS, jobs);
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-series]");
    if (button !== null) dialog.open(button.dataset.series, button.dataset.name);
  });
  byId("series-beside").addEventListener("change", () => dialog.refresh());
  byId("series-close").addEventListener("click", () => byId("series").close());
  byId("series").addEventListener("close", () => dialog.close());
}
