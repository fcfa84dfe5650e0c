// Logs: the last lines of all processes, and new lines.

import { h, update } from "../dom.js";
import { empty, section } from "../widgets.js";

const EVERY_MS = 2_000;
const ROWS_MAX = 1_000;
const LEVELS = ["debug", "info", "warning", "error"];

export function logs(page) {
  const lines = h("ol", { class: "log", tabindex: "0", "aria-label": "Log lines, the newest first" });
  const told = h("p", { class: "count", role: "status" });
  const level = h("select", { "aria-label": "Least level" }, LEVELS.map((one) => h("option", { value: one, selected: one === "info" }, `${one} and above`)));
  const text = h("input", { type: "search", placeholder: "Search", "aria-label": "Search in log lines", spellcheck: "false" });
  let rows = [];
  const draw = () => {
    const wanted = rows.filter(isWanted(level.value, text.value));
    update(lines, wanted.length ? wanted.map(line) : empty("Nothing to show."));
    told.textContent = `${wanted.length} of ${rows.length} lines`;
  };
  page.show("Logs", section(null, h("div", { class: "tools" }, text, level, told), lines));
  level.addEventListener("change", draw);
  text.addEventListener("input", draw);
  page.live(async () => {
    const more = await page.get("logs", { since: rows[0]?.time });
    rows = [...more.reverse(), ...rows].slice(0, ROWS_MAX);
    draw();
  }, EVERY_MS);
}

function isWanted(level, text) {
  const least = LEVELS.indexOf(level);
  const part = text.toLowerCase();
  return (row) => rank(row.level) >= least && (!part || `${row.process} ${row.logger} ${row.message}`.toLowerCase().includes(part));
}

function rank(level) {
  return level === "critical" ? LEVELS.length : LEVELS.indexOf(level);
}

function line(row) {
  return h("li", { class: row.level, data: { key: `${row.time} ${row.process} ${row.message}` } },
    h("time", { datetime: new Date(row.time * 1000).toISOString() }, new Date(row.time * 1000).toLocaleString(undefined, { dateStyle: "short", timeStyle: "medium" })),
    h("span", null, row.level), h("span", null, row.process), h("span", { class: "text" }, row.exception ? `${row.message}\n${row.exception}` : row.message));
}
