// The course of one job's training: progress and its prediction, goodput, batch and gradient noise over time.

import { fetchJson } from "./connection.js";
import { byId, setAttributes, setText, svgElement } from "./dom.js";
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

// Rounds up to 1, 2, 4, 6 or 8 times a power of ten, so that half of it is a round number too.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 4, 6, 8, 10].find((digit) => digit * power >= value);
}

function pathOf(points, line, x, y) {
  let path = "";
  let isDown = false;
  for (const point of points) {
    const value = line.of(point);
    if (!isKnown(value)) {
      isDown = false;
      continue;
    }
    const [px, py] = [x(point.at_s).toFixed(1), y(value).toFixed(1)];
    path += !isDown ? `M${px} ${py}` : line.isStepped ? `H${px}V${py}` : `L${px} ${py}`;
    isDown = true;
  }
  return path;
}

function drawChart(chart, points, range, offsetS) {
  const svg = byId(chart.id);
  const values = points.flatMap((point) => chart.lines.map((line) => line.of(point))).filter(isKnown);
  const highest = chart.highest ?? roundUp(Math.max(1e-9, ...values) * 1.02);
  const x = (atS) => LEFT + ((atS - range.from) / (range.to - range.from)) * (WIDTH - LEFT - RIGHT);
  const y = (value) => HEIGHT - BOTTOM - (value / highest) * (HEIGHT - TOP - BOTTOM);
  const parts = [];
  for (const part of [0, 0.5, 1]) {
    const at = y(part * highest);
    parts.push(svgElement("line", { class: "grid-line", x1: LEFT, x2: WIDTH - RIGHT, y1: at, y2: at }));
    const label = svgElement("text", { class: "tick", x: LEFT - 6, y: at + 4, "text-anchor": "end" });
    setText(label, values.length > 0 || chart.highest !== undefined ? chart.format(part * highest) : "");
    parts.push(label);
  }
  for (const [at, anchor] of [[range.from, "start"], [range.to, "end"]]) {
    const label = svgElement("text", { class: "tick", x: x(at), y: HEIGHT - 5, "text-anchor": anchor });
    setText(label, clock(at, offsetS));
    parts.push(label);
  }
  if (chart.isPredicted) {
    for (const made of predictions(points)) {
      parts.push(svgElement("path", { class: "predicted", d: `M${x(made.fromS).toFixed(1)} ${y(made.from).toFixed(1)}L${x(made.toS).toFixed(1)} ${y(made.to).toFixed(1)}` }));
    }
  }
  for (const line of chart.lines) parts.push(svgElement("path", { class: line.class, d: pathOf(points, line, x, y) }));
  if (values.length === 0) {
    const none = svgElement("text", { class: "note", x: LEFT + 10, y: HEIGHT / 2 });
    setText(none, "not known yet");
    parts.push(none);
  }
  setAttributes(svg, { viewBox: `0 0 ${WIDTH} ${HEIGHT}` });
  svg.replaceChildren(...parts);
  const last = points.findLast((point) => isKnown(chart.lines.at(-1).of(point)));
  setText(byId(`${chart.id}-now`), last === undefined ? UNKNOWN : chart.format(chart.lines.at(-1).of(last)));
}

function rangeOf(points, nowS) {
  if (points.length === 0) return { from: nowS - 1, to: nowS };
  const last = points.at(-1);
  const isOver = last.progress_fraction === 1;
  const made = predictions(points).map((prediction) => prediction.toS);
  const to = Math.max(last.at_s, ...made, isOver ? 0 : nowS);
  return { from: points[0].at_s, to: Math.max(to, points[0].at_s + 1) };
}

class SeriesDialog {
  constructor(offsetS) {
    this.offsetS = offsetS;
    this.jobId = null;
    this.timer = null;
  }

  open(jobId, name) {
    this.jobId = jobId;
    setText(byId("series-title"), `How ${name} trains`);
    byId("series").showModal();
    this.refresh();
  }

  async refresh() {
    clearTimeout(this.timer);
    const jobId = this.jobId;
    if (jobId === null) return;
    try {
      const { points, now_s: nowS } = await fetchJson(`/v1/jobs/${encodeURIComponent(jobId)}/series`);
      if (jobId !== this.jobId) return;
      const range = rangeOf(points, nowS);
      for (const chart of CHARTS) drawChart(chart, points, range, this.offsetS());
      setText(byId("series-state"), points.length === 0 ? "Nothing has been reported yet." : "");
    } catch (error) {
      setText(byId("series-state"), `no answer: ${error.message}`);
    }
    this.timer = setTimeout(() => this.refresh(), EVERY_MS);
  }

  close() {
    this.jobId = null;
    clearTimeout(this.timer);
  }
}

// One listener for all rows, including later ones: a button's `data-series` holds the job's id.
export function listenForSeries(offsetS) {
  const dialog = new SeriesDialog(offsetS);
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-series]");
    if (button !== null) dialog.open(button.dataset.series, button.dataset.name);
  });
  byId("series-close").addEventListener("click", () => byId("series").close());
  byId("series").addEventListener("close", () => dialog.close());
}
