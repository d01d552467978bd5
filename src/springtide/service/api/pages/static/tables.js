// The tables of jobs and services: one definition per column, rows updated in place.

import { KeyedList, element, setAttributes, setText } from "./dom.js";
import { UNKNOWN, clock, duration, fixed, number, percent, plural } from "./format.js";

const ENDED = new Set(["SUCCEEDED", "FAILED", "CANCELLED", "REJECTED"]);
export const isEnded = (job) => ENDED.has(job.state);

class Table {
  constructor(table, caption, columns) {
    this.columns = columns;
    const head = element("tr");
    for (const column of columns) head.append(element("th", { scope: "col", class: column.class, title: column.help }, column.title));
    const body = element("tbody");
    table.append(element("caption", { class: "unseen" }, caption), element("thead", {}, head), body);
    this.list = new KeyedList(body, () => {
      const row = element("tr");
      for (const column of columns) row.append(element(column.isRowTitle ? "th" : "td", { class: column.class, scope: column.isRowTitle ? "row" : null }));
      return row;
    });
  }

  update(items, keyOf, context) {
    this.list.update(items, keyOf, (row, item) => {
      setAttributes(row, { "data-state": item.state });
      this.columns.forEach((column, index) => column.fill(row.children[index], item, context));
    });
  }
}

// The first line of a cell is its value, the second, smaller one explains it.
function setLines(cell, first, second = "", title = null) {
  if (cell.children.length === 0) cell.append(element("div", { class: "first" }), element("div", { class: "second" }));
  setText(cell.children[0], first);
  setText(cell.children[1], second);
  setAttributes(cell, { title });
}

function setName(cell, name, id, hue) {
  if (cell.children.length === 0) {
    const lines = element("div", {}, element("div", { class: "first" }), element("div", { class: "second" }));
    cell.append(element("div", { class: "owner" }, element("span", { "aria-hidden": "true" }), lines));
  }
  const [swatch, lines] = cell.firstChild.children;
  setAttributes(swatch, { class: `swatch ${hue}` });
  setText(lines.children[0], name);
  setText(lines.children[1], id === name ? "" : id);
}

// `badges` are pairs of a word and a title: what is the matter beside the state.
function setState(cell, id, state, reason, { alternatives = [], badges = [] }) {
  if (cell.children.length === 0) {
    const button = element("button", { type: "button", class: "ask", "data-why": id }, "why?");
    cell.append(element("span"), element("span"), button, element("div", { class: "second" }));
  }
  const shown = cell.children[1];
  while (shown.children.length < badges.length) shown.append(element("span"));
  while (shown.children.length > badges.length) shown.lastChild.remove();
  badges.forEach(([word, title], index) => {
    setAttributes(shown.children[index], { class: "state badge", title });
    setText(shown.children[index], word);
  });
  setAttributes(cell.children[2], { "aria-label": `why is ${id} ${state}` });
  setAttributes(cell.children[0], { class: `state ${state.toLowerCase()}` });
  setText(cell.children[0], state);
  const advice = alternatives.length > 0 ? `would work: ${alternatives.join(" | ")}` : "";
  setText(cell.children[3], [reason, advice].filter(Boolean).join(" · "));
}

// While a job goes without a step for too long, and where its loss is no number: whether it runs or has ended.
function badgesOf(job, nowS) {
  const badges = [];
  if (job.stalled_since_s !== null) badges.push([`STALLED ${duration(nowS - job.stalled_since_s)}`, `no step since; the last was ${number(job.step, 6)}`]);
  if (job.is_diverged) badges.push(["LOSS NOT FINITE", "the newest loss is NaN or infinite"]);
  return badges;
}

// The first two metrics that the training function reported.
function metricsOf(job) {
  return Object.entries(job.metrics ?? {}).slice(0, 2).map(([name, value]) => `${name} ${number(value)}`).join(", ");
}

function setProgress(cell, job) {
  if (cell.children.length === 0) cell.append(element("progress", { max: 1 }), element("div", { class: "second" }));
  const fraction = job.progress_fraction;
  const text = percent(fraction);
  setAttributes(cell.children[0], { value: fraction === null ? null : fraction, hidden: fraction === null, "aria-label": `progress of ${job.name}: ${text}` });
  const steps = job.total_steps === null ? `step ${number(job.step)}` : `${number(job.step, 6)} / ${number(job.total_steps, 6)}`;
  const epochs = job.started_at_s === null ? plural(job.num_epochs, "epoch") : `epoch ${Math.min(job.epoch + 1, job.num_epochs)} / ${job.num_epochs}`;
  // The epochs of a script are its own.
  setText(cell.children[1], fraction === null ? "" : job.kind === "script" ? `${text} · ${steps}` : `${text} · ${epochs}`);
  if (cell.children.length === 2) cell.append(element("button", { type: "button", class: "ask", "data-series": job.job_id, "data-name": job.name }, "over time"));
  setAttributes(cell.children[2], { hidden: fraction === null, "aria-label": `how ${job.name} trains over time` });
  setAttributes(cell, { title: steps });
}

// What the deadline of a job that has not ended is.
function promiseOf(job, offsetS) {
  if ((job.given_up_at_s ?? null) !== null) return `promised, missed by its plan\nsince ${clock(job.given_up_at_s, offsetS)}`;
  return job.is_promised ? "promised" : "aimed at";
}

function setDeadline(cell, job, { offsetS }) {
  if (job.deadline_at_s === null) {
    setLines(cell, UNKNOWN, "");
    setAttributes(cell, { class: "deadline-cell" });
    return;
  }
  let slack = "";
  let verdict = "";
  if (job.ended_at_s !== null) {
    const early = job.deadline_at_s - job.ended_at_s;
    verdict = early >= 0 && job.state === "SUCCEEDED" ? "met" : "missed";
    slack = `${verdict}, ${duration(Math.abs(early))} ${early >= 0 ? "early" : "late"}`;
    if (job.state !== "SUCCEEDED") slack = job.state.toLowerCase();
  } else if (job.slack_s !== null) {
    verdict = job.slack_s >= 0 ? "met" : "missed";
    slack = job.slack_s >= 0 ? `slack +${duration(job.slack_s)}` : `late by ${duration(-job.slack_s)}`;
  }
  if (job.ended_at_s === null) slack = [promiseOf(job, offsetS), slack].filter(Boolean).join("\n");
  setLines(cell, clock(job.deadline_at_s, offsetS), slack);
  setAttributes(cell, { class: `deadline-cell ${verdict}` });
}

function setSpeed(cell, job) {
  const isFixed = (job.batch_bounds ?? null) === null;
  if (isFixed) {
    setLines(cell, number(job.samples_per_s), `batch ${job.global_batch_size}`, "the global batch stays the same whatever the number of workers");
    return;
  }
  const [low, high] = job.batch_bounds;
  const noise = job.noise_scale === null ? "noise not known yet" : `noise ${number(job.noise_scale)}, ${percent(job.efficiency_fraction)} efficient`;
  const title = `batch ${job.global_batch_size} of ${low} to ${high}; ${number(job.goodput_samples_per_s)} samples/s as of the first batch; learning rate x${number(job.learning_rate_factor)}`;
  setLines(cell, number(job.samples_per_s), `batch ${job.global_batch_size} of ${low}..${high}\n${noise}`, title);
}

// The number of workers and its bounds; for a job on functions, their number in stages and replicas.
function setWorkers(cell, job) {
  if ((job.functions ?? null) === null) {
    const bounds = job.min_workers === job.max_workers ? "" : `${job.min_workers}..${job.max_workers}`;
    const each = (job.devices_each ?? 1) > 1 ? `${job.devices_each} devices each` : "";
    setLines(cell, isEnded(job) ? UNKNOWN : String(job.num_workers), [bounds, each].filter(Boolean).join("\n"));
    return;
  }
  const { stages, num_replicas: replicas } = job.functions.plan;
  setLines(cell, plural(stages.length * replicas, "function"), `${stages.length} × ${replicas} at ${job.on}`, "stages times replicas");
}

const JOB_COLUMNS = [
  { title: "Job", isRowTitle: true, class: "name", fill: (cell, job, { hueOf }) => setName(cell, job.name, job.job_id, hueOf(job.job_id)) },
  { title: "State and reason", class: "why", fill: (cell, job, { nowS }) => setState(cell, job.job_id, job.state, job.reason, { alternatives: job.alternatives, badges: badgesOf(job, nowS) }) },
  { title: "Progress", class: "progress", fill: setProgress },
  {
    title: "Workers", class: "number", help: "now, and the bounds in force",
    fill: (cell, job) => setWorkers(cell, job),
  },
  { title: "Loss", class: "number", help: "and what the function reported with ctx.metrics()", fill: (cell, job) => setLines(cell, job.is_diverged ? "not finite" : fixed(job.loss, 4), metricsOf(job)) },
  { title: "Samples/s", class: "number", help: "and the global batch; where it may change, what the gradient's noise leaves of the speed", fill: setSpeed },
  {
    title: "ETA", class: "number", help: "predicted time left at the present speed",
    fill: (cell, job, { nowS, offsetS }) => {
      if (job.state === "REJECTED") setLines(cell, UNKNOWN, `refused ${clock(job.ended_at_s, offsetS)}`);
      else if (job.ended_at_s !== null) setLines(cell, `took ${duration(job.ended_at_s - job.submitted_at_s)}`, `ended ${clock(job.ended_at_s, offsetS)}`);
      else if (job.eta_s === null && job.planned_start_at_s > nowS) setLines(cell, UNKNOWN, `planned start ${clock(job.planned_start_at_s, offsetS)}`);
      else {
        // One that has run waits for less time than it is here, or runs and does not know its length.
        const since = job.started_at_s === null ? `waiting ${duration(nowS - job.submitted_at_s)}` : `started ${clock(job.started_at_s, offsetS)}`;
        setLines(cell, duration(job.eta_s), job.eta_s === null ? since : `at ${clock(nowS + job.eta_s, offsetS)}`);
      }
    },
  },
  { title: "Deadline", class: "deadline-cell", fill: setDeadline },
  {
    title: "Resizes", class: "number", help: "changes of the number of workers, and how long training stood still at the last one",
    fill: (cell, job) => setLines(cell, String(job.num_resizes), job.last_pause_s === null ? "" : `pause ${duration(job.last_pause_s)}`),
  },
  {
    title: "Restarts", class: "number", help: "returns to the last checkpoint because every worker was lost",
    fill: (cell, job) => setLines(cell, String(job.num_restarts), job.checkpoint_step === null ? "" : `saved at ${number(job.checkpoint_step, 6)}`),
  },
];

// Refusals are those since the gateway started; the notes say how many of them are of the last minute, and why.
function setQueue(cell, service) {
  const admission = service.admission ?? null;
  const isRefusing = admission !== null && admission.refused_lately > 0;
  const refused = isRefusing ? `${admission.refused_lately} refused in 1 min` : admission?.refused > 0 ? `${admission.refused} refused` : "";
  setLines(cell, String(service.queued), refused, admission?.notes.join("; ") || null);
  setAttributes(cell, { class: isRefusing ? "number missed" : "number" });
}

const SERVICE_COLUMNS = [
  { title: "Service", isRowTitle: true, class: "name", fill: (cell, service, { hueOf }) => setName(cell, service.name, service.url, hueOf(service.service_id)) },
  { title: "State and reason", class: "why", fill: (cell, service) => setState(cell, service.service_id, service.state, service.reason, { badges: service.rolled_back ? [["ROLLED BACK", service.rolled_back]] : [] }) },
  {
    title: "Replicas", class: "number", help: "ready, and the bounds in force",
    fill: (cell, service) => setLines(cell, `${service.num_ready}${service.num_starting > 0 ? ` + ${service.num_starting} starting` : ""}`, [`${service.min_replicas}..${service.max_replicas}`, service.devices_each > 1 ? `${service.devices_each} devices each` : ""].filter(Boolean).join("\n")),
  },
  { title: "Requests/s", class: "number", fill: (cell, service) => setLines(cell, number(service.arrivals_per_s), `${plural(service.in_flight, "request")} in flight`) },
  { title: "p50", class: "number", help: "half of the answers of the last window were faster", fill: (cell, service) => setLines(cell, duration(service.latency_p50_s)) },
  {
    title: "p99", class: "number", help: "99 of 100 answers of the last window were faster",
    fill: (cell, service) => {
      const isLate = service.slo_s !== null && service.latency_p99_s !== null && service.latency_p99_s > service.slo_s;
      setLines(cell, duration(service.latency_p99_s), service.slo_s === null ? "" : `${isLate ? "over" : "goal"} ${duration(service.slo_s)}`);
      setAttributes(cell, { class: isLate ? "number missed" : "number" });
    },
  },
  { title: "Queue", class: "number", help: "waiting now, and the requests that were refused so that the others keep the SLO", fill: setQueue },
  { title: "Revision", class: "number", fill: (cell, service, { offsetS }) => setLines(cell, String(service.revision), `since ${clock(service.deployed_at_s, offsetS)}`) },
];

export const makeJobTable = (table) => new Table(table, "Training jobs", JOB_COLUMNS);
export const makeServiceTable = (table) => new Table(table, "Inference services", SERVICE_COLUMNS);
