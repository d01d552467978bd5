// The page's state and when it draws: every status of the stream, and once a second for the growing edge.

import { ClusterSection } from "./cluster.js";
import { Connection, fetchJson } from "./connection.js";
import { SharingSection, isShared } from "./devices.js";
import { KeyedList, byId, element, setAttributes, setText } from "./dom.js";
import { clock, number, plural } from "./format.js";
import { RunsSection } from "./functions.js";
import { Gantt, shapeOf } from "./gantt.js";
import { isEnded, makeJobTable, makeServiceTable } from "./tables.js";
import { PoolsSection } from "./pools.js";
import { listenForSeries } from "./series.js";
import { listenForWhy } from "./why.js";

const NUM_HUES = 10;
const NUM_ENDED_SHOWN = 8;
const NUM_STORY_LINES = 14;
const TIMELINE_EVERY_MS = 1000;

const view = {
  status: null,
  timeline: { intervals: [], marks: [], planned: [], now_s: 0 },
  receivedMs: 0,
  isLive: false,
  windowS: 600,
  isChosen: false,
  showsAllEnded: false,
  hues: new Map(),
};
const gantt = new Gantt(byId("gantt"));
const pools = new PoolsSection();
const functions = new RunsSection();
const sharing = new SharingSection();
const cluster = new ClusterSection();
const jobTable = makeJobTable(byId("jobs"));
const serviceTable = makeServiceTable(byId("services"));
const deviceCards = new KeyedList(byId("devices"), makeDeviceCard);
const story = new KeyedList(byId("story"), () => element("li", {}, element("time"), element("span"), element("span", { class: "text" })));

// The colour depends only on the order of arrival, so that a workload keeps it after a reload.
function assignHues(status) {
  const workloads = [
    ...status.jobs.map((job) => [job.submitted_at_s, job.job_id]),
    ...status.services.map((service) => [service.deployed_at_s, service.service_id]),
  ].sort((one, other) => one[0] - other[0] || (one[1] < other[1] ? -1 : 1));
  for (const [, id] of workloads) if (!view.hues.has(id)) view.hues.set(id, view.hues.size % NUM_HUES);
}

const hueOf = (id) => `hue-${view.hues.get(id) ?? 0}`;

// The platform's clock now: the last status plus the time since. It stops while the connection is lost.
function nowS() {
  if (view.status === null) return 0;
  return view.isLive ? view.status.now_s + (performance.now() - view.receivedMs) / 1000 : view.frozenNowS;
}

function makeDeviceCard() {
  return element("li", { class: "device" }, element("div", { class: "device-id" }), element("div", { class: "holder" }), element("div", { class: "second" }));
}

function fillDeviceCard(card, device) {
  const [id, holder, detail] = card.children;
  const isFree = device.workload_id === null;
  setAttributes(card, { class: `device ${isFree ? "free" : hueOf(device.workload_id)}` });
  if (isShared(device)) {
    setText(id, `${device.device_id} · ${device.kind}`);
    setText(holder, device.holders.map((each) => each.workload_name).join(" + "));
    const request = device.holders.reduce((total, each) => total + each.share.request, 0);
    setText(detail, `${plural(device.holders.length, "sharer")}, requests ${number(request, 3)} of 1`);
    return;
  }
  setText(id, `${device.device_id} · ${device.kind === "function" ? "place for a job" : device.kind}`);
  setText(holder, isFree ? "free" : device.workload_name);
  const owner = [...view.status.jobs, ...view.status.services].find((workload) => (workload.job_id ?? workload.service_id) === device.workload_id);
  const replica = owner?.replicas.find((candidate) => candidate.replica_id === device.replica_id);
  const rank = replica === undefined ? "" : replica.rank === null ? replica.state.toLowerCase() : `rank ${replica.rank}, ${replica.state.toLowerCase()}`;
  setText(detail, isFree ? "waiting for work" : [rank, replica?.device_seen].filter(Boolean).join(", "));
}

function drawHeader(status) {
  setText(byId("version"), status.version);
  setText(byId("policy"), status.policy);
  setText(byId("seq"), status.seq.toLocaleString("en-US"));
  const machines = status.devices.filter((device) => device.kind !== "function");
  const held = machines.filter((device) => device.workload_id !== null).length;
  setText(byId("devices-held"), `${held} of ${machines.length}`);
  const running = status.jobs.filter((job) => job.state === "RUNNING").length;
  const waiting = status.jobs.filter((job) => !isEnded(job)).length - running;
  setText(byId("jobs-summary"), `${running} running, ${waiting} waiting, ${status.jobs.length - running - waiting} ended`);
  document.title = running > 0 ? `(${running}) Springtide` : "Springtide";
}

function drawTables(status) {
  const context = { hueOf, nowS: nowS(), offsetS: status.wall_clock_offset_s };
  const active = status.jobs.filter((job) => !isEnded(job));
  const ended = status.jobs.filter(isEnded).sort((one, other) => (other.ended_at_s ?? 0) - (one.ended_at_s ?? 0));
  const shown = view.showsAllEnded ? ended : ended.slice(0, NUM_ENDED_SHOWN);
  jobTable.update([...active, ...shown], (job) => job.job_id, context);
  serviceTable.update(status.services, (service) => service.service_id, context);
  const more = byId("jobs-more");
  more.hidden = ended.length <= NUM_ENDED_SHOWN;
  setText(more, view.showsAllEnded ? "show fewer" : `show all ${plural(ended.length, "ended job")}`);
  byId("jobs").hidden = status.jobs.length === 0;
  byId("services").hidden = status.services.length === 0;
  byId("jobs-none").hidden = status.jobs.length > 0;
  byId("services-none").hidden = status.services.length > 0;
  byId("empty").hidden = status.jobs.length + status.services.length > 0;
}

function drawStory(status) {
  const names = new Map([...status.jobs.map((job) => [job.job_id, job.name]), ...status.services.map((service) => [service.service_id, service.name])]);
  const lines = view.timeline.marks.map((mark, index) => ({ mark, index })).filter(({ mark }) => mark.at_s <= nowS() && mark.kind !== "deadline");
  lines.sort((one, other) => other.mark.at_s - one.mark.at_s || other.index - one.index);
  story.update(lines.slice(0, NUM_STORY_LINES), ({ index }) => index, (line, { mark }) => {
    const [time, name, text] = line.children;
    setText(time, clock(mark.at_s, status.wall_clock_offset_s));
    setAttributes(name, { class: `tag ${mark.workload_id ? hueOf(mark.workload_id) : "of-node"}` });
    setText(name, names.get(mark.workload_id) ?? (mark.workload_id || mark.node_id));
    setText(text, mark.text || mark.kind);
    setAttributes(line, { class: shapeOf(mark.kind) ?? "other" });
  });
  byId("story-none").hidden = lines.length > 0;
}

function drawGantt() {
  if (view.status === null) return;
  gantt.draw({ status: view.status, timeline: view.timeline, nowS: nowS(), windowS: view.windowS, hueOf });
}

function draw() {
  const status = view.status;
  if (status === null) return;
  assignHues(status);
  drawHeader(status);
  deviceCards.update(status.devices, (device) => device.device_id, fillDeviceCard);
  sharing.draw(status, hueOf);
  cluster.draw(status, hueOf);
  functions.draw(status, nowS());
  pools.draw(status, nowS());
  drawTables(status);
  drawGantt();
  drawStory(status);
}

// The timeline can only have changed if one of these values did.
const shapeOfStatus = (status) => JSON.stringify([
  status.devices.map((device) => [device.device_id, device.replica_id]),
  (status.nodes ?? []).map((node) => [node.node_id, node.pool, node.drain]),
  status.jobs.map((job) => [job.job_id, job.state, job.generation, job.num_resizes, job.num_restarts, job.num_preemptions, job.deadline_at_s, job.global_batch_size, Math.round(job.planned_finish_at_s ?? 0)]),
  status.services.map((service) => [service.service_id, service.state, service.revision]),
]);

const timelineLoader = {
  wanted: "",
  have: null,
  isBusy: false,
  async refresh() {
    if (this.isBusy || this.wanted === this.have) return;
    this.isBusy = true;
    const wanted = this.wanted;
    try {
      view.timeline = await fetchJson("/v1/timeline");
      this.have = wanted;
      draw();
    } catch {
      // connection.js reports connection problems; the next status tries again.
    }
    setTimeout(() => {
      this.isBusy = false;
      this.refresh();
    }, TIMELINE_EVERY_MS);
  },
};

function receiveStatus(status) {
  view.status = status;
  view.receivedMs = performance.now();
  view.frozenNowS = status.now_s;
  suggestWindow();
  timelineLoader.wanted = shapeOfStatus(status);
  timelineLoader.refresh();
  showTrouble();
  draw();
}

// Why the platform makes no decisions now (what is shown stays as it is until it does), that its control plane died, and
// what is wrong with the machine's clock.
function showTrouble() {
  const { trouble = "", restarted = "", clock = "" } = view.status ?? {};
  const sentences = [];
  if (trouble !== "") sentences.push(`No decisions are made: ${trouble}. What runs goes on.`);
  if (restarted !== "") sentences.push(`The control plane was started again: the one before ${restarted}.`);
  if (clock !== "") sentences.push(`${clock[0].toUpperCase()}${clock.slice(1)}.`);
  const alert = byId("alert");
  alert.hidden = sentences.length === 0;
  if (sentences.length > 0) setText(alert, sentences.join(" "));
}

function showState(state, detail) {
  view.frozenNowS = nowS();
  view.isLive = state === "live";
  byId("live").className = `live is-${state}`;
  setText(byId("live-text"), { connecting: "connecting", live: "live", lost: "connection lost", refused: "not signed in" }[state]);
  document.body.classList.toggle("stale", state === "lost" || state === "refused");
  const alert = byId("alert");
  if (state === "live" || state === "connecting") showTrouble();
  else alert.hidden = false;
  if (state === "refused") {
    setText(alert, "This browser has no access to the platform. Type springtide dashboard in a terminal; it opens this page signed in.");
  } else if (state === "lost") {
    const since = view.status === null ? "" : ` What you see is from ${clock(view.frozenNowS, view.status.wall_clock_offset_s)}.`;
    setText(alert, `Connection lost: ${detail}.${since} Trying again; if the platform was stopped, start it with springtide up.`);
  }
}

// Until the user chooses a window, it fits the age of a young platform.
function suggestWindow() {
  if (view.isChosen || view.status === null) return;
  const choice = view.status.now_s < 110 ? "120" : "600";
  if (String(view.windowS) !== choice) chooseWindow(choice);
}

function chooseWindow(choice) {
  view.windowS = choice === "all" ? null : Number(choice);
  for (const button of document.querySelectorAll("[data-window]")) setAttributes(button, { "aria-pressed": String(button.dataset.window === choice) });
  drawGantt();
}

for (const button of document.querySelectorAll("[data-window]")) button.addEventListener("click", () => {
  view.isChosen = true;
  chooseWindow(button.dataset.window);
});
byId("jobs-more").addEventListener("click", () => {
  view.showsAllEnded = !view.showsAllEnded;
  draw();
});
new ResizeObserver(drawGantt).observe(byId("gantt"));
setInterval(() => {
  if (view.isLive && !document.hidden) draw();
}, 1000);
const asked = new URLSearchParams(location.search).get("window");
view.isChosen = asked !== null;
chooseWindow(asked ?? "600");
listenForWhy(() => view.status?.wall_clock_offset_s ?? 0);
listenForSeries(() => view.status?.wall_clock_offset_s ?? 0, () => view.status?.jobs ?? []);
new Connection(receiveStatus, showState).open();
