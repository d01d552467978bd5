// Shared devices: the share of each workload, and what it is granted and uses, now and in the last minutes.

import { fetchJson } from "./connection.js";
import { KeyedList, byId, element, setAttributes, setText, svgElement } from "./dom.js";
import { duration, fixed, number, plural } from "./format.js";

const EVERY_MS = 1000;
// The chart shows the values received since the page was opened, up to some minutes.
const LEAST_S = 30;
const MOST_S = 180;
const WIDTH = 300;
const HEIGHT = 56;
const STATES = {
  EMERGENCY: "its work takes far longer than usual: it has its limit at once, others their requests",
  RECOVERY: "what others gave up for it is given back step by step",
  CONTENTION: "its work begins to take longer: no sharer is granted more for now",
  NONE: "nothing is the matter",
};

const sum = (tenants, of) => tenants.reduce((total, tenant) => total + of(tenant), 0);
const width = (fraction) => `${(Math.max(0, Math.min(1, fraction)) * 100).toFixed(2)}%`;

// A device is shared if a replica holds a part of it, even if that is the only replica.
export const isShared = (device) => (device.holders ?? []).length > 0;

// The replicas on each device: those that the share daemon reports, and those that were just placed.
export function sharersOf(devices, sharing) {
  const names = new Map();
  const rows = new Map();
  for (const device of devices) {
    for (const holder of device.holders ?? []) names.set(holder.replica_id, holder.workload_name);
    if (isShared(device)) rows.set(device.device_id, []);
  }
  for (const tenant of sharing?.tenants ?? []) {
    if (!rows.has(tenant.device_id)) rows.set(tenant.device_id, []);
    rows.get(tenant.device_id).push({ ...tenant, name: names.get(tenant.replica_id) ?? tenant.workload_id, isKnown: true });
  }
  for (const device of devices) {
    for (const holder of device.holders ?? []) {
      const mine = rows.get(device.device_id);
      if (mine.some((tenant) => tenant.replica_id === holder.replica_id)) continue;
      const { request, limit } = holder.share;
      mine.push({ workload_id: holder.workload_id, replica_id: holder.replica_id, name: holder.workload_name, request, limit, granted: 0, used: 0, state: "NONE", throttled_s: 0, reason: "starting", isKnown: false });
    }
  }
  return [...rows].map(([id, tenants]) => ({ id, tenants }));
}

function makeBar() {
  const bar = element("div", { class: "share-bar", role: "img" });
  for (const name of ["share-limit", "share-granted", "share-used", "share-request"]) bar.append(element("div", { class: name }));
  return bar;
}

function fillBar(bar, tenant) {
  const [limit, granted, used, request] = bar.children;
  limit.style.width = width(tenant.limit);
  granted.style.width = width(tenant.granted);
  used.style.width = width(tenant.used);
  request.style.left = width(tenant.request);
  const text = `request ${number(tenant.request, 2)}, limit ${number(tenant.limit, 2)}, granted ${fixed(tenant.granted, 2)}, used ${fixed(tenant.used, 2)} of the device`;
  setAttributes(bar, { "aria-label": text, title: text });
}

function makeSharer() {
  const row = element("li", { class: "sharer" });
  const head = element("div", { class: "sharer-head" });
  head.append(element("span", { class: "swatch" }), element("span", { class: "first" }), element("span", { class: "state" }), element("span", { class: "second figures" }));
  const chart = svgElement("svg", { class: "share-chart", role: "img", preserveAspectRatio: "none", viewBox: `0 0 ${WIDTH} ${HEIGHT}` });
  for (const name of ["emergency", "granted", "used", "request", "limit"]) chart.append(svgElement("path", { class: `share-${name}-path` }));
  row.append(head, makeBar(), chart, element("p", { class: "second share-reason" }));
  return row;
}

function fillSharer(row, tenant, history, context) {
  const [head, bar, chart, reason] = row.children;
  const isUrgent = tenant.state === "EMERGENCY";
  setAttributes(row, { class: `sharer ${context.hueOf(tenant.workload_id)}${isUrgent ? " is-emergency" : ""}`, "data-state": tenant.state });
  setText(head.children[1], tenant.name);
  setAttributes(head.children[2], { class: `state ${isUrgent ? "failed" : ""}`, title: STATES[tenant.state], hidden: tenant.state === "NONE" });
  setText(head.children[2], isUrgent ? "▲ EMERGENCY" : tenant.state);
  const now = tenant.isKnown ? `, granted ${fixed(tenant.granted, 2)}, used ${fixed(tenant.used, 2)}` : "";
  setText(head.children[3], `${number(tenant.request, 2)} to ${number(tenant.limit, 2)}${now}`);
  fillBar(bar, tenant);
  fillChart(chart, tenant, history);
  // The counters of a sharer of a GPU; CPU devices have none.
  const onGpu = [];
  if (tenant.num_launches > 0 || tenant.memory_used_mb > 0) {
    const limit = tenant.memory_mb > 0 ? ` of ${tenant.memory_mb}` : "";
    onGpu.push(`${tenant.num_launches} ${tenant.num_launches === 1 ? "launch" : "launches"}, ${tenant.memory_used_mb}${limit} MB of its memory`);
  }
  if (tenant.num_open > 0) onGpu.push(`${tenant.num_open} let through unheld`);
  if (tenant.num_denied > 0) onGpu.push(`${plural(tenant.num_denied, "allocation")} refused for its memory`);
  const heldBack = tenant.throttled_s > 0 ? `held back for ${duration(tenant.throttled_s)} so far` : "";
  setText(reason, [tenant.reason, ...onGpu, heldBack].filter(Boolean).join(" · "));
}

function seenS(history) {
  const span = history.length > 1 ? (history.at(-1).atMs - history[0].atMs) / 1000 : 0;
  return Math.max(LEAST_S, Math.min(MOST_S, span));
}

// The last minutes, newest on the right: the area is what was used, the line what was granted, hatching an emergency.
function fillChart(chart, tenant, history) {
  const windowS = seenS(history);
  const points = [];
  for (const sample of history) {
    const found = sample.tenants.get(tenant.replica_id);
    if (found !== undefined) points.push({ x: WIDTH - ((history.at(-1).atMs - sample.atMs) / 1000 / windowS) * WIDTH, ...found });
  }
  const y = (fraction) => (HEIGHT - Math.max(0, Math.min(1, fraction)) * HEIGHT).toFixed(1);
  const [emergency, granted, used, request, limit] = chart.children;
  const steps = (of) => points.map((point, index) => `${index === 0 ? "M" : "L"}${point.x.toFixed(1)} ${y(of(point))}`).join("");
  const isDrawn = points.length > 1;
  setAttributes(granted, { d: isDrawn ? steps((point) => point.granted) : "" });
  setAttributes(used, { d: isDrawn ? `${steps((point) => point.used)}L${points.at(-1).x.toFixed(1)} ${HEIGHT}L${points[0].x.toFixed(1)} ${HEIGHT}Z` : "" });
  setAttributes(request, { d: `M0 ${y(tenant.request)}H${WIDTH}` });
  setAttributes(limit, { d: `M0 ${y(tenant.limit)}H${WIDTH}` });
  const urgent = points.filter((point) => point.state === "EMERGENCY");
  const lookWidth = ((EVERY_MS / 1000 / windowS) * WIDTH).toFixed(1);
  setAttributes(emergency, { d: urgent.map((point) => `M${(point.x - lookWidth).toFixed(1)} 0h${lookWidth}V${HEIGHT}h-${lookWidth}Z`).join("") });
  const spent = urgent.length > 0 ? `, ${urgent.length} of ${plural(points.length, "look")} in EMERGENCY` : "";
  setAttributes(chart, { "aria-label": `What ${tenant.name} was granted and used over the last ${duration(windowS)}${spent}` });
}

function makeDevice() {
  const card = element("section", { class: "shared-device" });
  const head = element("div", { class: "heading" });
  head.append(element("h3"), element("span", { class: "second" }));
  card.append(head, element("div", { class: "share-stack", role: "img" }), element("ul", { class: "sharers" }));
  card.sharers = new KeyedList(card.children[2], makeSharer);
  card.parts = new KeyedList(card.children[1], () => element("div", { class: "stack-part" }));
  return card;
}

function fillDevice(card, device, history, context) {
  const [head, stack] = card.children;
  const { tenants } = device;
  setText(head.children[0], device.id);
  const used = sum(tenants, (tenant) => tenant.used);
  setText(head.children[1], `${plural(tenants.length, "sharer")} · requests ${number(sum(tenants, (tenant) => tenant.request), 3)} of 1 · limits ${number(sum(tenants, (tenant) => tenant.limit), 3)} · ${fixed(used, 2)} used`);
  setAttributes(stack, { "aria-label": tenants.map((tenant) => `${tenant.name} uses ${fixed(tenant.used, 2)}`).join(", ") });
  card.parts.update(tenants, (tenant) => tenant.replica_id, (part, tenant) => {
    setAttributes(part, { class: `stack-part ${context.hueOf(tenant.workload_id)}`, title: `${tenant.name}: ${fixed(tenant.used, 2)} used` });
    part.style.width = width(tenant.used / Math.max(1, used));
  });
  card.sharers.update(tenants, (tenant) => tenant.replica_id, (row, tenant) => fillSharer(row, tenant, history, context));
}

function enforcedText(sharing) {
  const parts = [sharing.enforced];
  if (sharing.mechanism !== "none") {
    parts.push(`by ${sharing.mechanism}`);
    if (sharing.device_cpus > 0) parts.push(sharing.device_cpus === 1 ? "a device is a core" : `a device is ${number(sharing.device_cpus)} of a core`);
    if (sharing.tick_s > 0) parts.push(`control every ${duration(sharing.tick_s)}`);
    if (sharing.reaction_p99_s > 0) parts.push(`a grant is in force after ${duration(sharing.reaction_p99_s)} (p99)`);
  }
  return parts.join(" · ");
}

export class SharingSection {
  constructor() {
    this.sharing = null;
    this.devices = [];
    this.history = [];
    this.isBusy = false;
    this.askedMs = -Infinity;
    this.context = null;
    this.cards = new KeyedList(byId("shared-devices"), makeDevice);
  }

  draw(status, hueOf) {
    this.devices = status.devices;
    this.context = { hueOf };
    const isThere = status.devices.some(isShared) || (this.sharing?.tenants ?? []).length > 0;
    byId("sharing").hidden = !isThere;
    if (!isThere) return;
    this.refresh();
    this.show();
  }

  show() {
    if (this.context === null) return;
    this.cards.update(sharersOf(this.devices, this.sharing), (device) => device.id, (card, device) => fillDevice(card, device, this.history, this.context));
    if (this.sharing === null) return;
    setText(byId("sharing-enforced"), enforcedText(this.sharing));
    setText(byId("sharing-window"), `the last ${duration(Math.round(seenS(this.history)))}`);
  }

  // Grants change every few milliseconds and are not in the journal, so the page polls for them.
  async refresh() {
    if (this.isBusy || performance.now() - this.askedMs < EVERY_MS * 0.9) return;
    this.isBusy = true;
    this.askedMs = performance.now();
    try {
      this.sharing = await fetchJson("/v1/sharing");
      const atMs = performance.now();
      this.history.push({ atMs, tenants: new Map(this.sharing.tenants.map((tenant) => [tenant.replica_id, tenant])) });
      while (this.history.length > 0 && atMs - this.history[0].atMs > MOST_S * 1000) this.history.shift();
      this.show();
    } catch {
      // connection.js reports connection problems; the next poll tries again.
    } finally {
      this.isBusy = false;
    }
  }
}
