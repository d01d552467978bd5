// The Gantt chart: one row per device, a bar for every allocation, deadlines, marks and a forecast.

import { KeyedList, setAttributes, setText, svgElement } from "./dom.js";
import { clock, duration, plural } from "./format.js";

const ROW = 30;
const BAR = 20;
const TOP = 34;
const LABEL_LANES = [11, 24];
const AXIS = 24;
const RIGHT = 12;
const FUTURE_FRACTION = 0.15;
const STEPS_S = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
const SHAPES = {
  resize: "M0-5.5 5.5 0 0 5.5-5.5 0z",
  crash: "M-4.5-4.5 4.5 4.5M4.5-4.5-4.5 4.5",
  end: "M-4-4H4V4H-4z",
  reclaim: "M0-6 5.5 4.5H-5.5z",
  loan: "M0 6 5.5-4.5H-5.5z",
};

// The mark kinds of the journal, as the shapes of the legend.
export function shapeOf(kind) {
  if (/reclaim|^label/i.test(kind)) return "reclaim";
  if (/loan/i.test(kind)) return "loan";
  if (/crash|lost|broken|fail/i.test(kind)) return "crash";
  if (/end|finish|succe|cancel|stopped|reject/i.test(kind)) return "end";
  // Where a bar begins says of itself that its workload started or was resumed there.
  if (/resiz|grow|shrink|recover|replace|preempt|pause|batch/i.test(kind)) return "resize";
  return null;
}

export class Gantt {
  constructor(svg) {
    this.svg = svg;
    const layer = (name) => svg.appendChild(svgElement("g", { class: name }));
    const list = (name, tags) => new KeyedList(layer(name), () => {
      const group = svgElement("g");
      for (const tag of tags) group.append(svgElement(tag));
      return group;
    });
    svg.append(this.defineHatch());
    this.rows = list("rows", ["rect", "text"]);
    this.grid = list("grid", ["line", "text"]);
    this.forecasts = list("forecasts", ["rect"]);
    this.loans = list("loans", ["rect", "rect"]);
    this.planned = list("planned-layer", ["rect", "rect", "text"]);
    this.bars = list("bars", ["rect", "rect", "text"]);
    this.now = layer("now").appendChild(svgElement("line", { class: "now" }));
    this.deadlines = list("deadlines", ["line", "text"]);
    this.marks = list("marks", ["path"]);
    this.note = layer("notes").appendChild(svgElement("text", { class: "note" }));
  }

  // Services are hatched, so that a bar's kind does not depend on its colour.
  defineHatch() {
    const defs = svgElement("defs");
    const pattern = svgElement("pattern", {
      id: "hatch", width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)",
    });
    pattern.append(svgElement("rect", { class: "hatch-line", width: 2, height: 7 }));
    const loan = svgElement("pattern", { id: "hatch-loan", width: 6, height: 6, patternUnits: "userSpaceOnUse", patternTransform: "rotate(-45)" });
    loan.append(svgElement("rect", { class: "hatch-loan-line", width: 1.2, height: 6 }));
    defs.append(pattern, loan);
    return defs;
  }

  // `hueOf(workload_id)` is a colour class. `windowS` is seconds of past to show, or null for everything.
  draw({ status, timeline, nowS, windowS, hueOf }) {
    const intervals = timeline.intervals;
    const devices = rowIds(status, intervals);
    const box = { width: Math.max(320, this.svg.clientWidth), left: labelWidth(devices) };
    box.height = TOP + Math.max(1, devices.length) * ROW + AXIS;
    setAttributes(this.svg, { viewBox: `0 0 ${box.width} ${box.height}`, height: box.height });
    const range = rangeOf({ status, intervals, planned: timeline.planned ?? [], nowS, windowS });
    const scale = (atS) => box.left + ((atS - range.from) / (range.to - range.from)) * (box.width - box.left - RIGHT);
    const lanes = lanesOf(intervals, nowS);
    const context = { status, nowS, hueOf, box, range, scale, lanes, rowOf: new Map(devices.map((id, row) => [id, row])) };
    this.drawRows(context, devices);
    this.drawGrid(context);
    this.drawLoans(context, timeline.loans ?? []);
    this.drawBars(context, intervals);
    this.drawForecasts(context, intervals, timeline.planned ?? []);
    this.drawPlanned(context, intervals, timeline.planned ?? []);
    this.drawDeadlines(context);
    this.drawMarks(context, intervals, timeline.marks);
    const nowX = scale(nowS);
    setAttributes(this.now, { x1: nowX, x2: nowX, y1: TOP - 2, y2: box.height - AXIS });
    setAttributes(this.note, { x: box.left + 10, y: TOP + ROW / 2 + 4 });
    setText(this.note, intervals.length === 0 ? "No device has been held yet." : "");
    setAttributes(this.svg, { "aria-label": describe(context, devices, intervals) });
  }

  drawRows({ box }, devices) {
    this.rows.update(devices, (id) => id, (group, id) => {
      const y = TOP + devices.indexOf(id) * ROW;
      const [rect, text] = group.children;
      setAttributes(rect, { class: "row", x: box.left, y: y + 2, width: box.width - box.left - RIGHT, height: ROW - 4, rx: 4 });
      setAttributes(text, { class: "row-label", x: box.left - 8, y: y + ROW / 2 + 4, "text-anchor": "end" });
      setText(text, id);
    });
  }

  drawGrid({ box, range, scale, status }) {
    const span = range.to - range.from;
    const step = STEPS_S.find((candidate) => span / candidate <= Math.max(3, box.width / 130)) ?? 86400;
    const offset = status.wall_clock_offset_s;
    const ticks = [];
    for (let at = Math.ceil((range.from + offset) / step) * step - offset; at <= range.to; at += step) ticks.push(at);
    this.grid.update(ticks, (at) => Math.round((at + offset) * 10), (group, at) => {
      const x = scale(at);
      const [line, text] = group.children;
      setAttributes(line, { class: "grid-line", x1: x, x2: x, y1: TOP - 2, y2: box.height - AXIS + 4 });
      setAttributes(text, { class: "tick", x, y: box.height - 6, "text-anchor": "middle" });
      setText(text, x > box.width - 30 ? "" : clock(at, offset, step < 60));
    });
  }

  drawBars({ nowS, hueOf, range, rowOf, scale, status, lanes }, intervals) {
    const shown = [];
    const lastPixel = new Map();
    for (const interval of intervals) {
      const row = rowOf.get(interval.device_id);
      const endS = interval.end_s ?? nowS;
      if (row === undefined || endS < range.from || interval.start_s > range.to) continue;
      const x = scale(Math.max(interval.start_s, range.from));
      const width = Math.max(1.5, scale(Math.min(endS, range.to)) - x - 1);
      // Of several bars within one pixel only one is drawn.
      const pixel = Math.round(x);
      const lane = lanes.get(interval);
      const strip = `${row}|${lane.index}`;
      if (width < 2 && lastPixel.get(strip) === pixel) continue;
      lastPixel.set(strip, pixel);
      shown.push({ interval, x, width, lane, ...stripOf(row, lane) });
    }
    const keyOf = ({ interval }) => `${interval.device_id}|${interval.replica_id}|${interval.start_s}`;
    this.bars.update(shown, keyOf, (group, { interval, x, width, lane, y, height }) => {
      const [bar, hatch, text] = group.children;
      const isOpen = interval.end_s === null;
      const size = { x, y, width, height, rx: Math.min(4, width / 2, height / 2) };
      setAttributes(bar, { class: `bar ${hueOf(interval.workload_id)}${isOpen ? " open" : ""}`, ...size });
      setAttributes(hatch, { class: interval.workload_kind === "service" ? "hatch" : "gone", ...size });
      setAttributes(text, { class: lane.count > 1 ? "bar-label in-lane" : "bar-label", x: x + 12, y: y + height / 2 + (lane.count > 1 ? 3 : 4) });
      setText(text, lane.count > 2 ? "" : fit(interval.workload_name, width - 16));
      setTitle(group, describeInterval(interval, nowS, status.wall_clock_offset_s));
    });
  }

  // A row has a hatched strip at its bottom while its node is labelled for another pool than its owner.
  drawLoans({ nowS, range, rowOf, scale, status }, loans) {
    const feet = [];
    for (const loan of loans) {
      const endS = loan.end_s ?? nowS;
      if (endS < range.from || loan.start_s > range.to) continue;
      for (const [id, row] of rowOf) if (nodeOf(id) === loan.node_id) feet.push({ loan, row, endS });
    }
    this.loans.update(feet, ({ loan, row }) => `${loan.node_id}|${row}|${loan.start_s}`, (group, { loan, row, endS }) => {
      const x = scale(Math.max(loan.start_s, range.from));
      const width = Math.max(1.5, scale(Math.min(endS, range.to)) - x);
      setAttributes(group.children[0], { class: "loan-hatch", x, y: TOP + row * ROW + 2, width, height: ROW - 4, rx: 3 });
      // The strip stays visible beneath a bar.
      setAttributes(group.children[1], { class: `loan-row pool-${loan.pool}`, x, y: TOP + (row + 1) * ROW - 4, width, height: 3, rx: 1 });
      const until = loan.end_s === null ? "now" : clock(loan.end_s, status.wall_clock_offset_s);
      setTitle(group, `${loan.node_id} of ${loan.owner}, on loan to ${loan.pool} from ${clock(loan.start_s, status.wall_clock_offset_s)} to ${until} (${duration(endS - loan.start_s)})`);
    });
  }

  drawForecasts({ status, nowS, hueOf, range, rowOf, scale, lanes }, intervals, planned) {
    // If the policy has a plan for the workload, the plan is drawn instead.
    const isPlanned = new Set(planned.map((stretch) => stretch.workload_id));
    const remaining = new Map(status.jobs.filter((job) => job.state === "RUNNING" && job.eta_s > 0 && !isPlanned.has(job.job_id)).map((job) => [job.job_id, job]));
    const open = intervals.filter((interval) => interval.end_s === null && remaining.has(interval.workload_id));
    this.forecasts.update(open, (interval) => `${interval.device_id}|${interval.replica_id}`, (group, interval) => {
      const job = remaining.get(interval.workload_id);
      const x = scale(nowS);
      const strip = stripOf(rowOf.get(interval.device_id) ?? 0, lanes.get(interval));
      const width = Math.max(0, scale(Math.min(nowS + job.eta_s, range.to)) - x);
      setAttributes(group.firstChild, { class: `forecast ${hueOf(interval.workload_id)}`, x, width, rx: 4, ...strip });
      setTitle(group, `${job.name}: about ${duration(job.eta_s)} left at the present speed`);
    });
  }

  drawPlanned({ status, nowS, hueOf, range, rowOf, scale }, intervals, planned) {
    const placed = placePlanned(planned, intervals, rowOf, nowS).filter(({ stretch }) => stretch.start_s < range.to);
    this.planned.update(placed, ({ stretch, row }) => `${stretch.workload_id}|${row}|${stretch.start_s}`, (group, { stretch, row }) => {
      const x = scale(Math.max(stretch.start_s, nowS));
      const width = Math.max(0, scale(Math.min(stretch.end_s, range.to)) - x - 1);
      const size = { x, y: TOP + row * ROW + (ROW - BAR) / 2, width, height: BAR, rx: Math.min(4, width / 2) };
      const [bar, hatch, text] = group.children;
      setAttributes(bar, { class: `planned ${hueOf(stretch.workload_id)}`, ...size });
      setAttributes(hatch, { class: "hatch", ...size });
      setAttributes(text, { class: "planned-label", x: x + 5, y: size.y + BAR / 2 + 4 });
      setText(text, fit(stretch.workload_name, width - 8));
      const when = `${clock(stretch.start_s, status.wall_clock_offset_s)} to ${clock(stretch.end_s, status.wall_clock_offset_s)}`;
      setTitle(group, `planned: ${stretch.workload_name} on ${plural(stretch.num_devices, "device")}, ${when} (which ones is not decided yet)`);
    });
  }

  drawDeadlines({ status, nowS, hueOf, range, scale, box }) {
    // A deadline of an unfinished job beyond the window is shown at the edge.
    const isShown = (job) => job.deadline_at_s !== null && !/REJECTED|CANCELLED/.test(job.state)
      && job.deadline_at_s >= range.from && (job.deadline_at_s <= range.to || job.ended_at_s === null);
    const jobs = status.jobs.filter(isShown);
    const taken = LABEL_LANES.map(() => []);
    this.deadlines.update(jobs, (job) => job.job_id, (group, job) => {
      const isAhead = job.deadline_at_s > range.to;
      const x = isAhead ? box.width - RIGHT : scale(job.deadline_at_s);
      const [line, text] = group.children;
      setAttributes(line, { class: isAhead ? "gone" : `deadline ${hueOf(job.job_id)}`, x1: x, x2: x, y1: TOP - 4, y2: box.height - AXIS });
      const left = job.deadline_at_s - nowS;
      const label = isAhead ? `${job.name} deadline in ${duration(left)} →` : `${job.name} deadline`;
      const width = label.length * 6.2;
      const isLeft = x + width > box.width - RIGHT;
      const start = isLeft ? x - width : x;
      const lane = taken.findIndex((spans) => spans.every(([from, to]) => start > to + 6 || start + width < from - 6));
      if (lane >= 0) taken[lane].push([start, start + width]);
      // The line reaches up to its own label and crosses no other.
      if (lane >= 0) setAttributes(line, { y1: LABEL_LANES[lane] - 9 });
      setAttributes(text, { class: "deadline-label", x: x + (isLeft ? -3 : 3), y: LABEL_LANES[Math.max(0, lane)], "text-anchor": isLeft ? "end" : "start" });
      setText(text, lane >= 0 ? label : "");
      const when = left >= 0 ? `in ${duration(left)}` : `${duration(-left)} ago`;
      setTitle(group, `${job.name}: deadline ${clock(job.deadline_at_s, status.wall_clock_offset_s)}, ${when}`);
    });
  }

  drawMarks({ status, hueOf, nowS, range, rowOf, scale }, intervals, marks) {
    const placed = [];
    for (const [index, mark] of marks.entries()) {
      const shape = shapeOf(mark.kind);
      if (shape === null || mark.at_s < range.from || mark.at_s > range.to) continue;
      for (const row of rowsOf(mark, shape, intervals, rowOf, nowS)) placed.push({ mark, shape, row, key: `${index}|${row}` });
    }
    // Rarer and more severe marks are drawn on top.
    const order = ["resize", "end", "loan", "reclaim", "crash"];
    placed.sort((one, other) => order.indexOf(one.shape) - order.indexOf(other.shape));
    this.marks.update(placed, (place) => place.key, (group, { mark, shape, row }) => {
      const y = TOP + row * ROW + ROW / 2;
      setAttributes(group, { transform: `translate(${scale(mark.at_s).toFixed(1)} ${y})` });
      setAttributes(group.firstChild, { class: `mark ${shape} ${mark.workload_id ? hueOf(mark.workload_id) : ""}`, d: SHAPES[shape] });
      setTitle(group, `${clock(mark.at_s, status.wall_clock_offset_s)}  ${mark.text || mark.kind}`);
    });
  }
}

// Workloads that share a device are drawn in lanes of its row. Each gapless stretch has as many lanes as it needs.
export function lanesOf(intervals, nowS) {
  const lanes = new Map();
  const ofDevice = new Map();
  for (const interval of intervals) {
    if (!ofDevice.has(interval.device_id)) ofDevice.set(interval.device_id, []);
    ofDevice.get(interval.device_id).push(interval);
  }
  for (const mine of ofDevice.values()) {
    let stretch = [];
    let ends = [];
    const close = () => stretch.forEach((lane) => { lane.count = ends.length; });
    for (const interval of mine.sort((one, other) => one.start_s - other.start_s)) {
      if (ends.every((endS) => endS <= interval.start_s)) {
        close();
        stretch = [];
        ends = [];
      }
      const free = ends.findIndex((endS) => endS <= interval.start_s);
      const lane = { index: free < 0 ? ends.length : free, count: 1 };
      ends[lane.index] = interval.end_s ?? Math.max(nowS, interval.start_s) + 1e-9;
      stretch.push(lane);
      lanes.set(interval, lane);
    }
    close();
  }
  return lanes;
}

// Where a lane of a row is drawn.
function stripOf(row, lane) {
  const height = BAR / lane.count;
  return { y: TOP + row * ROW + (ROW - BAR) / 2 + lane.index * height, height: lane.count > 1 ? height - 1 : height };
}

// A plan says how many devices, not which: use the job's present rows first, then rows that are free all the time.
export function placePlanned(planned, intervals, rowOf, nowS) {
  const rows = [...new Set(rowOf.values())];
  const taken = new Map(rows.map((row) => [row, []]));
  const ownRows = new Map();
  for (const interval of intervals) {
    if (interval.end_s !== null || !rowOf.has(interval.device_id)) continue;
    ownRows.set(interval.workload_id, [...(ownRows.get(interval.workload_id) ?? []), rowOf.get(interval.device_id)]);
  }
  const placed = [];
  // Workloads that hold rows now are placed first, so that they stay on them.
  const order = [...planned].sort((one, other) => one.start_s - other.start_s || ownRows.has(other.workload_id) - ownRows.has(one.workload_id));
  for (const stretch of order) {
    const own = ownRows.get(stretch.workload_id) ?? [];
    const candidates = [...own, ...rows.filter((row) => !own.includes(row))];
    const isFree = (row) => taken.get(row).every(([from, to]) => stretch.start_s >= to || stretch.end_s <= from);
    const chosen = candidates.filter(isFree).slice(0, stretch.num_devices);
    for (const row of chosen) {
      taken.get(row).push([stretch.start_s, stretch.end_s]);
      placed.push({ stretch, row });
    }
    ownRows.set(stretch.workload_id, chosen);
  }
  return placed.filter(({ stretch }) => stretch.end_s > nowS);
}

const nodeOf = (deviceId) => deviceId.slice(0, deviceId.lastIndexOf("/"));

// Present devices first, then devices of the past that the timeline still contains.
function rowIds(status, intervals) {
  const ids = status.devices.map((device) => device.device_id);
  const known = new Set(ids);
  for (const interval of intervals) {
    if (!known.has(interval.device_id)) {
      known.add(interval.device_id);
      ids.push(interval.device_id);
    }
  }
  return ids;
}

function rangeOf({ status, intervals, planned, nowS, windowS }) {
  let from = windowS === null ? Math.min(nowS - 30, ...intervals.slice(0, 1).map((interval) => interval.start_s)) : nowS - windowS;
  if (windowS === null) for (const interval of intervals) from = Math.min(from, interval.start_s);
  const past = nowS - from;
  let future = past * FUTURE_FRACTION;
  // Extend the window to a deadline or a forecast that is a little further ahead.
  for (const job of status.jobs) {
    for (const ahead of [job.eta_s, job.deadline_at_s === null || job.ended_at_s !== null ? null : job.deadline_at_s - nowS]) {
      if (ahead !== null && ahead > 0 && ahead <= past * 0.6) future = Math.max(future, ahead * 1.08);
    }
  }
  for (const stretch of planned) {
    const ahead = stretch.end_s - nowS;
    if (ahead > 0) future = Math.max(future, Math.min(ahead * 1.05, past * 0.6));
  }
  return { from, to: nowS + future };
}

// A resize is marked on the rows that its workload still holds, a crash or an end only on rows where a bar ended.
function rowsOf(mark, shape, intervals, rowOf, nowS) {
  // A loan or a reclaim concerns a node and is marked on the first of its rows.
  if (mark.node_id) return [...rowOf].filter(([id]) => nodeOf(id) === mark.node_id).slice(0, 1).map(([, row]) => row);
  const near = 0.5;
  const held = intervals.filter((interval) =>
    interval.workload_id === mark.workload_id && interval.start_s - near <= mark.at_s && (interval.end_s ?? nowS + near) + near >= mark.at_s);
  const ended = held.filter((interval) => interval.end_s !== null && Math.abs(interval.end_s - mark.at_s) <= near);
  const lasting = held.filter((interval) => !ended.includes(interval));
  const [first, second] = shape === "resize" ? [lasting, ended] : [ended, held];
  const chosen = first.length > 0 ? first : second;
  return new Set(chosen.map((interval) => rowOf.get(interval.device_id)).filter((row) => row !== undefined));
}

function setTitle(group, text) {
  let title = group.querySelector("title");
  if (title === null) {
    title = svgElement("title");
    group.append(title);
  }
  setText(title, text);
}

function describeInterval(interval, nowS, offsetS) {
  const until = interval.end_s === null ? "now" : clock(interval.end_s, offsetS);
  const length = duration((interval.end_s ?? nowS) - interval.start_s);
  return `${interval.workload_kind} ${interval.workload_name} on ${interval.device_id}\n${clock(interval.start_s, offsetS)} to ${until} (${length})\nreplica ${interval.replica_id}`;
}

function describe({ status, nowS, range }, devices, intervals) {
  const held = intervals.filter((interval) => interval.end_s === null).map((interval) => `${interval.workload_name} on ${interval.device_id}`);
  const span = `from ${clock(range.from, status.wall_clock_offset_s)} to ${clock(nowS, status.wall_clock_offset_s)}`;
  return `Allocations of ${plural(devices.length, "device")} ${span}. Held now: ${held.join(", ") || "nothing"}.`;
}

const labelWidth = (devices) => Math.min(180, 24 + 7 * Math.max(6, ...devices.map((id) => id.length)));

function fit(text, width) {
  const most = Math.floor(width / 6.8);
  if (most < 2) return "";
  return text.length <= most ? text : `${text.slice(0, most - 1)}…`;
}
