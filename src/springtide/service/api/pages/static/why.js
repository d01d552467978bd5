// The answer to "why": the reason for a workload's state, its evidence, possible changes, and its history.

import { fetchJson } from "./connection.js";
import { byId, element, setText } from "./dom.js";
import { clock } from "./format.js";

const NUM_LINES = 12;

function fillList(id, lines, tag) {
  const list = byId(id);
  list.replaceChildren(...lines.map((line) => element("li", {}, tag === null ? line : element(tag, {}, line))));
  byId(`${id}-part`).hidden = lines.length === 0;
}

async function ask(workloadId, offsetS) {
  setText(byId("why-title"), `Why: ${workloadId}`);
  setText(byId("why-reason"), "asking …");
  for (const id of ["why-evidence", "why-steps", "why-history"]) fillList(id, [], null);
  byId("why").showModal();
  try {
    const answer = await fetchJson(`/v1/workloads/${encodeURIComponent(workloadId)}/why`);
    setText(byId("why-title"), `Why: ${answer.name} is ${answer.state}`);
    setText(byId("why-reason"), answer.reason || "nothing is out of the ordinary");
    fillList("why-evidence", answer.evidence, null);
    fillList("why-steps", answer.next_steps, "code");
    const lines = answer.history.slice(-NUM_LINES).reverse();
    fillList("why-history", lines.map((entry) => `${clock(entry.at_s, offsetS)}  ${entry.text}`), null);
  } catch (error) {
    setText(byId("why-reason"), `no answer: ${error.message}`);
  }
}

// One listener for all rows, including later ones: a button's `data-why` holds the workload's id.
export function listenForWhy(offsetS) {
  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-why]");
    if (button !== null) ask(button.dataset.why, offsetS());
  });
  byId("why-close").addEventListener("click", () => byId("why").close());
}
