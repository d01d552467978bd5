// The cluster of a platform on Kubernetes: its leader, the state of the connection, and the pods, waiting ones first.

import { KeyedList, byId, element, setAttributes, setText } from "./dom.js";
import { duration, plural } from "./format.js";

const MOST_PODS = 40;
// Even without changes the API server sends something about once a minute.
const SILENT_S = 150;
const ORDER = ["waiting", "creating", "binding", "starting", "ending", "running"];

// Every pod with the name of its workload, waiting pods before running ones.
export function podsOf(status) {
  const owners = [...status.jobs.map((job) => [job.name, job.job_id, job.pods]), ...status.services.map((service) => [service.name, service.service_id, service.pods])];
  const pods = owners.flatMap(([name, id, own]) => (own ?? []).map((pod) => ({ ...pod, name, id })));
  const rank = (pod) => (pod.reason ? 0 : 1 + ORDER.indexOf(pod.phase));
  return pods.sort((one, other) => rank(one) - rank(other) || (one.replica_id < other.replica_id ? -1 : 1));
}

export const problemOf = (cluster) =>
  cluster.problem || (cluster.watch_age_s > SILENT_S ? `nothing has been heard of the API server for ${duration(cluster.watch_age_s)}` : "");

export class ClusterSection {
  constructor() {
    this.section = byId("cluster");
    this.rows = new KeyedList(byId("pods").tBodies[0], () => element("tr", {}, element("td"), element("td"), element("td"), element("td"), element("td", { class: "number" }), element("td")));
  }

  draw(status, hueOf) {
    const cluster = status.cluster ?? null;
    this.section.hidden = cluster === null;
    if (cluster === null) return;
    const writes = cluster.pending_writes ? `, ${plural(cluster.pending_writes, "write")} under way` : "";
    setText(byId("cluster-summary"), `${cluster.server}: ${plural(cluster.num_nodes, "node")}, ${plural(cluster.num_pods, "pod")}; led by ${cluster.leader} in term ${cluster.term}${writes}`);
    const problem = problemOf(cluster);
    byId("cluster-problem").hidden = problem === "";
    setText(byId("cluster-problem"), problem);
    const pods = podsOf(status);
    byId("pods").hidden = pods.length === 0;
    this.rows.update(pods.slice(0, MOST_PODS), (pod) => pod.replica_id, (row, pod) => {
      const [owner, name, node, phase, since, reason] = row.children;
      if (owner.firstChild === null) owner.append(element("span"));
      setAttributes(owner.firstChild, { class: `tag ${hueOf(pod.id)}` });
      setText(owner.firstChild, pod.name);
      setText(name, `${pod.namespace}/${pod.pod}`);
      setText(node, pod.node_id);
      setText(phase, pod.phase);
      setText(since, duration(pod.since_s));
      setText(reason, pod.reason);
    });
    const more = byId("pods-more");
    more.hidden = pods.length <= MOST_PODS;
    setText(more, `and ${plural(pods.length - MOST_PODS, "pod")} more: springtide status ID shows those of one workload`);
  }
}
