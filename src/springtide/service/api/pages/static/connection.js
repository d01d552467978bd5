// The live connection to the platform: one event stream, its reconnects, and its state.

const SILENCE_MS = 15000;
const RETRY_MS = [500, 1000, 2000, 5000];

export async function fetchJson(path) {
  const response = await fetch(path, { headers: { Accept: "application/json" }, cache: "no-store" });
  if (!response.ok) {
    const error = new Error(`the platform answered ${response.status}`);
    error.status = response.status;
    throw error;
  }
  return response.json();
}

// `onStatus(status)` gets every PlatformStatus. `onState(state, detail)` gets "connecting", "live", "lost" or "refused".
export class Connection {
  constructor(onStatus, onState) {
    this.onStatus = onStatus;
    this.onState = onState;
    this.numFailures = 0;
    this.source = null;
    this.lastHeardMs = 0;
    this.probing = false;
    setInterval(() => this.checkSilence(), 2000);
    // Browsers allow six connections to one server, so a hidden page closes its stream.
    document.addEventListener("visibilitychange", () => {
      if (!document.hidden) this.open();
      else if (this.source !== null) {
        this.close();
        this.onState("connecting", "");
      }
    });
  }

  open() {
    this.close();
    if (document.hidden) return;
    const source = new EventSource("/v1/stream");
    this.source = source;
    const receive = (event) => this.receive(event.data);
    source.onmessage = receive;
    source.addEventListener("status", receive);
    source.onerror = () => {
      if (this.source === source) this.lose();
    };
  }

  close() {
    if (this.source !== null) this.source.close();
    this.source = null;
  }

  receive(data) {
    let status;
    try {
      status = JSON.parse(data);
    } catch {
      return;
    }
    this.numFailures = 0;
    this.lastHeardMs = performance.now();
    this.onState("live", "");
    this.onStatus(status);
  }

  // The stream broke. One plain HTTP request tells a refusal (401) from a platform that is gone.
  async lose() {
    this.close();
    const wait = RETRY_MS[Math.min(this.numFailures, RETRY_MS.length - 1)];
    this.numFailures += 1;
    try {
      const status = await fetchJson("/v1/status");
      this.onStatus(status);
      if (this.numFailures > 1) this.onState("lost", "the event stream breaks");
    } catch (error) {
      if (error.status === 401 || error.status === 403) this.onState("refused", "");
      else this.onState("lost", error.status ? error.message : "the platform does not answer");
    }
    setTimeout(() => this.open(), wait);
  }

  // A stream can die without an error, as on a laptop that slept, so a silent one is probed.
  async checkSilence() {
    if (this.source === null || this.lastHeardMs === 0 || this.probing) return;
    if (performance.now() - this.lastHeardMs < SILENCE_MS) return;
    this.probing = true;
    const giveUp = new AbortController();
    const timer = setTimeout(() => giveUp.abort(), 4000);
    try {
      const response = await fetch("/healthz", { signal: giveUp.signal, cache: "no-store" });
      if (!response.ok) throw new Error("unhealthy");
      this.lastHeardMs = performance.now();
    } catch {
      await this.lose();
    } finally {
      clearTimeout(timer);
      this.probing = false;
    }
  }
}
