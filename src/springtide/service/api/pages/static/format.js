// Formats numbers, durations and times. An unknown value is a dash, never a zero.

export const UNKNOWN = "–";
const isKnown = (value) => value !== null && value !== undefined && Number.isFinite(value);

// 0.14 ms, 41 ms, 7.5 s, 3m12, 2h05: the same format as on the command line.
export function duration(seconds) {
  if (!isKnown(seconds)) return UNKNOWN;
  const sign = seconds < 0 ? "-" : "";
  const size = Math.abs(seconds);
  if (size < 0.01) return `${sign}${Number((size * 1000).toPrecision(2))} ms`;
  if (size < 1) return `${sign}${Math.round(size * 1000)} ms`;
  if (size < 60) return `${sign}${size.toFixed(1)} s`;
  const minutes = Math.floor(Math.round(size) / 60);
  if (minutes < 60) return `${sign}${minutes}m${pad(Math.round(size) % 60)}`;
  return `${sign}${Math.floor(minutes / 60)}h${pad(minutes % 60)}`;
}

const pad = (value) => String(value).padStart(2, "0");

export function number(value, digits = 3) {
  if (!isKnown(value)) return UNKNOWN;
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(1);
  if (Math.abs(value) >= 1000) return Math.round(value).toLocaleString("en-US");
  return String(Number(value.toPrecision(digits)));
}

export function fixed(value, places) {
  if (!isKnown(value)) return UNKNOWN;
  return Math.abs(value) >= 1e6 ? value.toExponential(2) : value.toFixed(places);
}

export function percent(fraction) {
  return isKnown(fraction) ? `${Math.floor(fraction * 100)} %` : UNKNOWN;
}

export function plural(count, word) {
  return `${count} ${word}${count === 1 ? "" : "s"}`;
}

// A time of the platform's clock, in the reader's time zone.
export function clock(atS, offsetS, withSeconds = true) {
  if (!isKnown(atS)) return UNKNOWN;
  const moment = new Date((atS + offsetS) * 1000);
  const text = `${pad(moment.getHours())}:${pad(moment.getMinutes())}`;
  return withSeconds ? `${text}:${pad(moment.getSeconds())}` : text;
}
