// Numbers, sizes and times as texts; "–" for an unknown value.

const NONE = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const short = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const fine = new Intl.NumberFormat("en", { maximumSignificantDigits: 2 });

export function count(value) {
  return Number.isFinite(value) ? whole.format(value) : NONE;
}

/** Return a number as a text of about five characters at the most. */
export function compact(value) {
  if (!Number.isFinite(value)) return NONE;
  return Math.abs(value) < 10_000 ? (Math.abs(value) < 10 ? fine.format(value) : whole.format(value)) : short.format(value);
}

/** Return host and port, with IPv6 in brackets as in URLs. */
export function address(ip, port) {
  return ip.includes(":") ? `[${ip}]:${port}` : `${ip}:${port}`;
}

export function rate(value) {
  return Number.isFinite(value) ? `${compact(value)}/s` : NONE;
}

const UNITS = ["B", "KiB", "MiB", "GiB", "TiB"];

export function bytes(value) {
  if (!Number.isFinite(value)) return NONE;
  let size = value;
  let unit = 0;
  while (Math.abs(size) >= 1024 && unit < UNITS.length - 1) {
    size /= 1024;
    unit += 1;
  }
  return `${size < 10 && unit > 0 ? size.toFixed(1) : Math.round(size)} ${UNITS[unit]}`;
}

export function percent(part) {
  return Number.isFinite(part) ? `${Number((part * 100).toFixed(1))} %` : NONE;
}

export function duration(seconds) {
  if (!Number.isFinite(seconds)) return NONE;
  const s = Math.floor(seconds);
  if (s < 60) return `${s} s`;
  if (s < 3600) return `${Math.floor(s / 60)} min ${s % 60} s`;
  if (s < 86400) return `${Math.floor(s / 3600)} h ${Math.floor((s % 3600) / 60)} min`;
  return `${Math.floor(s / 86400)} d ${Math.floor((s % 86400) / 3600)} h`;
}

export function moment(milliseconds) {
  return Number.isFinite(milliseconds) ? new Date(milliseconds).toLocaleString() : NONE;
}

const seconds = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit", second: "2-digit" });
const minutes = new Intl.DateTimeFormat([], { hour: "2-digit", minute: "2-digit" });

/** Return the time of day, to the second or to the minute. */
export function clock(milliseconds, hasSeconds) {
  return (hasSeconds ? seconds : minutes).format(milliseconds);
}

/** Return a value in a table of arguments or properties as a text. */
export function value(any) {
  if (any === null || any === undefined || any === "") return NONE;
  return typeof any === "object" ? JSON.stringify(any) : String(any);
}
