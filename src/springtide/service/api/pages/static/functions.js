// Jobs on functions: the function at each place of the pipeline, the parts of a step's time, and the cost so far.

import { KeyedList, byId, element, setAttributes, setText, svgElement } from "./dom.js";
import { UNKNOWN, duration, number, percent, plural } from "./format.js";
import { dollars, fillSearch, makeSearch } from "./search.js";
import { isEnded } from "./tables.js";

const NUM_ENDED_SHOWN = 1;
// Above this number of places, those without a problem are only counted.
const MOST_PLACES = 36;
const MIB = 1 << 20;
const RING = 2 * Math.PI * 9;
// The parts of a step, as in figure 6 of FuncPipe: computing, waiting for other functions, exchanging gradients.
const PARTS = [
  { name: "computation", class: "computation", of: (lanes) => lanes.forward_s + lanes.backward_s + lanes.update_s },
  { name: "flush", class: "flush", of: (lanes) => lanes.flush_s },
  { name: "synchronisation", class: "synchronisation", of: (lanes) => lanes.sync_s },
];
const BILL = [
  ["functions", "function_usd"],
  ["invocations", "invocation_usd"],
  ["object requests", "request_usd"],
  ["storage", "storage_usd"],
  ["parameter store", "parameter_store_usd"],
  ["profiling", "profiling_usd"],
  ["machines before", "machines_usd"],
];

const total = (bill) => BILL.reduce((sum, [, key]) => sum + bill[key], 0);

// For each stage, the mean over its replicas of the step and its parts, in seconds.
export function breakdown(places) {
  const stages = [];
  for (const place of places) {
    if (place.lanes.step_s > 0) (stages[place.stage] ??= []).push(place.lanes);
  }
  const mean = (lanes, of) => lanes.reduce((sum, each) => sum + of(each), 0) / lanes.length;
  return stages.map((lanes, stage) => ({ stage, stepS: mean(lanes, (each) => each.step_s), parts: PARTS.map((part) => mean(lanes, part.of)) })).filter(Boolean);
}

function planText(plan) {
  const sizes = plan.stages.map((stage) => stage.memory_mb);
  const memory = new Set(sizes).size === 1 ? `${sizes[0]} MB` : `${sizes.join("+")} MB`;
  const shape = `${plural(plan.stages.length, "stage")} × ${plural(plan.num_replicas, "replica")}`;
  return `${plural(plan.stages.length * plan.num_replicas, "function")} (${shape}), ${memory}, ${plan.num_micro_batches === 1 ? "1 micro-batch" : `${plan.num_micro_batches} micro-batches`} of ${plan.micro_batch_size}`;
}

function stepText(run) {
  const predicted = run.predicted_step_s === null ? "" : `${duration(run.predicted_step_s)} predicted`;
  if (run.step_s === null) return predicted;
  if (predicted === "") return `${duration(run.step_s)} measured`;
  const ratio = run.step_s / run.predicted_step_s;
  const off = ratio >= 2 ? `${ratio.toFixed(1)} times as long` : `${Math.round(Math.abs(ratio - 1) * 100)} % ${ratio >= 1 ? "more" : "less"}`;
  return `${duration(run.step_s)} measured, ${predicted} (${off})`;
}

function incidents(run) {
  const counts = [
    [run.num_handovers, "handed over in time"],
    [run.num_replaced, "replaced after they died"],
    [run.num_lost, "never began"],
    [run.num_throttled, "put off by the provider"],
  ];
  const facts = counts.filter(([count]) => count > 0).map(([count, what]) => `${count} ${what}`);
  if (run.num_redone_steps > 0) facts.push(`${plural(run.num_redone_steps, "step")} redone`);
  return [plural(Math.max(run.num_invocations, run.usage.num_invocations), "invocation"), ...facts].join(", ");
}

function makeRing() {
  const svg = svgElement("svg", { class: "life", viewBox: "0 0 24 24", width: 24, height: 24, "aria-hidden": "true" });
  const turn = "rotate(-90 12 12)";
  svg.append(svgElement("circle", { class: "life-all", cx: 12, cy: 12, r: 9 }), svgElement("circle", { class: "life-left", cx: 12, cy: 12, r: 9, transform: turn }));
  return svg;
}

function makePlace() {
  const head = element("div", { class: "place-head" }, element("span", { class: "place-name" }), element("span"));
  const memory = element("div", { class: "memory" }, element("div", { class: "memory-used" }));
  const foot = element("div", { class: "place-foot" }, makeRing(), element("div", { class: "second" }));
  return element("li", { class: "place" }, head, memory, element("div", { class: "second" }), foot);
}

function fillPlace(card, place, { nowS }) {
  const [head, memory, memoryText, foot] = card.children;
  const isHere = place.lifetime_left_s !== null;
  const lifetime = isHere ? place.lifetime_left_s + Math.max(0, nowS - place.invoked_at_s) : 0;
  const left = lifetime > 0 ? Math.min(1, Math.max(0, place.lifetime_left_s / lifetime)) : 0;
  const used = place.memory_used_bytes / MIB / place.memory_mb;
  setText(head.children[0], `${place.stage}.${place.replica}`);
  setAttributes(head.children[1], { class: `phase ${place.phase}` });
  setText(head.children[1], place.phase);
  setAttributes(memory.firstChild, { class: `memory-used${used > 0.9 ? " high" : ""}` });
  memory.firstChild.style.inlineSize = `${Math.min(100, used * 100).toFixed(1)}%`;
  setText(memoryText, `${place.memory_used_bytes > 0 ? number(place.memory_used_bytes / MIB) : UNKNOWN} of ${place.memory_mb} MB`);
  setAttributes(foot.children[0].children[1], { "stroke-dasharray": `${(left * RING).toFixed(2)} ${RING.toFixed(2)}`, class: `life-left${left < 0.2 ? " low" : ""}` });
  const changes = [place.num_handovers > 0 ? plural(place.num_handovers, "hand-over") : "", place.num_replaced > 0 ? `replaced ${place.num_replaced}×` : ""].filter(Boolean);
  const isOver = ["finished", "stopped", "left", "superseded"].includes(place.phase);
  const life = isHere ? `${duration(place.lifetime_left_s)} left` : isOver ? "no function any more" : "no function yet";
  setText(foot.children[1], [`${life}, step ${place.step}`, ...changes].join(" · "));
  const words = `stage ${place.stage}, replica ${place.replica}: ${place.phase}, ${memoryText.textContent}, ${foot.children[1].textContent}`;
  setAttributes(card, { "aria-label": words, title: place.error || `function number ${place.incarnation} at this place` });
}

// All places; if there are very many, those with a problem and the first of the others.
function placesToShow(places) {
  if (places.length <= MOST_PLACES) return [...places];
  const isTelling = (place) => place.phase !== "training" || place.error !== "";
  return [...places.filter(isTelling), ...places.filter((place) => !isTelling(place))].slice(0, MOST_PLACES);
}

// One bar for each stage, all on one scale: the parts of its step, and a mark at the predicted end.
function drawBars(list, run) {
  const stages = breakdown(run.places);
  const scale = Math.max(run.predicted_step_s ?? 0, ...stages.map((stage) => stage.stepS)) || 1;
  const rows = stages.map(({ stage, stepS, parts }) => {
    const text = PARTS.map((part, index) => `${part.name} ${percent(parts[index] / stepS)}`).join(", ");
    const bar = element("div", { class: "bars-bar", role: "img", "aria-label": `stage ${stage}: a step of ${duration(stepS)}: ${text}`, title: text });
    for (const [index, part] of PARTS.entries()) {
      const piece = element("span", { class: `part ${part.class}` });
      piece.style.inlineSize = `${((100 * Math.min(parts[index], stepS)) / scale).toFixed(2)}%`;
      bar.append(piece);
    }
    if (run.predicted_step_s !== null) {
      const mark = element("span", { class: "predicted-end" });
      mark.style.insetInlineStart = `${((100 * run.predicted_step_s) / scale).toFixed(2)}%`;
      bar.append(mark);
    }
    return element("li", {}, element("span", { class: "bars-name" }, `stage ${stage}`), bar, element("span", { class: "number" }, duration(stepS)));
  });
  list.replaceChildren(...rows);
}

function makeCard() {
  const facts = element("dl", { class: "run-facts" });
  for (const name of ["Runs as", "Step", "Functions", "Saved", "Cost"]) facts.append(element("div", {}, element("dt", {}, name), element("dd")));
  const card = element(
    "article",
    { class: "run" },
    element("div", { class: "heading" }, element("h3"), element("span"), element("span", { class: "second" })),
    facts,
    makeSearch(),
    element("div", { class: "run-parts" }, element("div", {}, element("ul", { class: "places" }), element("p", { class: "second" })), element("div", {}, element("ul", { class: "bars" }), element("p", { class: "second" }))),
    element("div", { class: "run-bill" }, element("progress", { max: 1 }), element("ul", { class: "bill" })),
  );
  card.places = new KeyedList(card.querySelector(".places"), makePlace);
  return card;
}

function fillCard(card, job, context) {
  const run = job.functions;
  const [heading, facts, search, parts, bill] = card.children;
  setText(heading.children[0], job.name);
  setAttributes(card, { "aria-label": `${job.name} on functions` });
  setAttributes(heading.children[1], { class: `state ${job.state.toLowerCase()}` });
  setText(heading.children[1], job.state);
  const at = job.total_steps === null ? `step ${job.step}` : `step ${job.step} of ${job.total_steps}`;
  setText(heading.children[2], `${job.job_id} at ${run.service}, ${at}${job.loss === null ? "" : `, loss ${number(job.loss, 4)}`}`);
  const spent = total(run.bill);
  const left = run.budget_usd === null ? "" : ` of ${dollars(run.budget_usd)}, ${dollars(Math.max(0, run.budget_usd - spent))} left`;
  const texts = [planText(run.plan), stepText(run) || UNKNOWN, incidents(run), `step ${run.saved_step}`, `${dollars(spent)}${left}`];
  texts.forEach((text, index) => setText(facts.children[index].children[1], text));
  fillSearch(search, job, context);
  const places = placesToShow(run.places).sort((one, other) => one.replica - other.replica || one.stage - other.stage);
  // Stages of a pipeline are columns; workers that hold the whole model fill up to four columns.
  const isWhole = run.plan.stages.length === 1;
  parts.children[0].firstChild.style.setProperty("--stages", isWhole ? Math.min(4, run.plan.num_replicas) : run.plan.stages.length);
  setText(parts.children[0].children[1], places.length < run.places.length ? `and ${run.places.length - places.length} more that are in order` : "");
  card.places.update(places, (place) => `${place.stage}.${place.replica}`, (node, place) => fillPlace(node, place, context));
  const isTimed = run.places.some((place) => place.lanes.step_s > 0);
  drawBars(parts.children[1].firstChild, run);
  setText(parts.children[1].children[1], isTimed ? "where the newest step's time went; the line is the predicted step" : "no step has been timed yet");
  setAttributes(parts, { hidden: run.places.length === 0 });
  setAttributes(bill.children[0], { hidden: run.budget_usd === null, value: run.budget_usd === null ? null : Math.min(1, spent / run.budget_usd), "aria-label": `budget of ${job.name}: ${texts[4]}` });
  const items = BILL.filter(([, key]) => run.bill[key] > 0).map(([name, key]) => element("li", {}, element("span", { class: "second" }, name), element("b", {}, dollars(run.bill[key]))));
  bill.children[1].replaceChildren(...items);
}

export class RunsSection {
  constructor() {
    this.list = new KeyedList(byId("runs"), makeCard);
  }

  draw(status, nowS) {
    const context = { nowS, offsetS: status.wall_clock_offset_s };
    const jobs = status.jobs.filter((job) => (job.functions ?? null) !== null);
    const ended = jobs.filter(isEnded).sort((one, other) => (other.ended_at_s ?? 0) - (one.ended_at_s ?? 0));
    const shown = [...jobs.filter((job) => !isEnded(job)), ...ended.slice(0, NUM_ENDED_SHOWN)];
    byId("functions").hidden = shown.length === 0;
    this.list.update(shown, (job) => job.job_id, (card, job) => fillCard(card, job, context));
  }
}
