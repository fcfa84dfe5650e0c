// Charts of the past: the samples that the broker keeps, as the API shows them.

import { lineChart } from "./charts.js";
import { h } from "./dom.js";
import * as format from "./format.js";

const SHORTEST_S = 5; // the broker takes a sample this often
const EVERY_MS = 5_000;

/** The spans to choose from: a label, and seconds of the span and between two samples. */
const SPANS = [
  ["Minute", 60, 5],
  ["10 minutes", 600, 5],
  ["Hour", 3_600, 60],
  ["8 hours", 28_800, 300],
  ["Day", 86_400, 300],
];
const DEFAULT = SPANS[1];
const PREFIXES = ["lengths", "msg_rates", "data_rates", "node_stats"];
let chosen = DEFAULT; // kept while views change

/** Buttons for the spans. `change()` is called when another one is chosen. */
export function spanChoice(change) {
  return h("fieldset", { class: "choices" }, h("legend", { class: "hidden" }, "The time that is shown"),
    SPANS.map((span) => h("label", null,
      h("input", { type: "radio", name: "span", value: span[1], checked: span === chosen, on: { change: () => change((chosen = span)) } }), h("span", null, span[0]))));
}

/** The seconds for which the broker keeps samples every 5 s, and those of longer spans of the broker itself. */
export const OBJECT_KEPT_S = 600;
export const BROKER_KEPT_S = 86_400;

/**
 * Return the query that asks for samples of the chosen span, as far as they are kept; at most about `most`. The first
 * rate needs one sample more.
 */
export function query(keptS, most = Infinity) {
  const age = Math.min(chosen[1], keptS);
  const incr = stepS(keptS, most);
  return Object.fromEntries(PREFIXES.flatMap((name) => [[`${name}_age`, age + incr], [`${name}_incr`, incr]]));
}

/** Return the seconds between two of these samples. */
export function stepS(keptS, most = Infinity) {
  const age = Math.min(chosen[1], keptS);
  return Math.max(age < chosen[1] ? SHORTEST_S : chosen[2], Math.ceil(age / most));
}

export function spanMs() {
  return chosen[1] * 1_000;
}

/**
 * Return [time (ms), value] of a number in a row, the oldest first; the last one is the number of now. `name` is a path
 * such as "message_stats.publish". With `isRate` the values are rates a second since the sample before. Where a counter
 * fell, because its process was restarted, the rate is NaN. `nowMs` is the time of the number of now, one for all that is
 * shown together.
 */
export function values(row, name, isRate, nowMs) {
  const at = (path) => path.split(".").reduce((found, part) => found?.[part], row);
  const samples = [...(at(`${name}_details`)?.samples ?? [])].reverse().map(({ timestamp, sample }) => [timestamp, sample]);
  const [last, now] = [samples.at(-1)?.[0], at(name)];
  // The clock of the browser may be wrong, but now is not later than the next sample.
  if (now !== undefined && nowMs - last > EVERY_MS) samples.push([Math.min(nowMs, last + chosen[2] * 1_000), now]);
  if (!isRate) return samples;
  return samples.slice(1).map(([at, now], i) => {
    const [earlier, before] = samples[i];
    return [at, now < before ? NaN : ((now - before) * 1_000) / (at - earlier)];
  });
}

/** Return samples {at, values by name} of some lines, {name, of, isRate}, of a row. */
function samplesOf(row, lines, nowMs) {
  const found = new Map();
  for (const { name, of, isRate } of lines) {
    for (const [at, value] of values(row, of, isRate, nowMs)) {
      if (!found.has(at)) found.set(at, { at, values: {} });
      found.get(at).values[name] = value;
    }
  }
  return [...found.values()].sort((a, b) => a.at - b.at);
}

/**
 * Charts of one thing, which ask for their samples until another view is shown.
 *
 * `where`: the path of the API. `charts`: {title, show, lines}, with lines {name, colour, of, isRate}. `keptS`: how long
 * the broker keeps samples of such a thing.
 */
export function pastCharts(page, where, charts, keptS) {
  const drawn = charts.map(({ title, lines, show }) => lineChart(title, lines.map(({ name, colour }) => ({ name, colour, of: (sample) => sample.values[name] })), show, page.signal));
  const note = h("p", { class: "faint kept", role: "status" });
  const columns = charts.flatMap(({ lines }) => lines.flatMap(({ of }) => [of, `${of}_details`])).join(",");
  const again = page.live(async () => {
    const [asked, row] = [chosen, await page.get(where, { ...query(keptS), columns })];
    if (asked !== chosen) return; // the choice of another span has asked again
    const nowMs = Date.now();
    const oldest = charts.map(({ lines }, i) => {
      const samples = samplesOf(row, lines, nowMs);
      drawn[i].draw(samples, spanMs());
      return samples[0]?.at ?? Infinity;
    });
    const text = noteOf(Math.min(...oldest), keptS);
    if (note.textContent !== text) note.textContent = text;
  }, EVERY_MS);
  return [spanChoice(() => again()), note, h("div", { class: "pair" }, drawn.map((chart) => h("div", { class: "card" }, chart)))];
}

/** Say what is not kept of the chosen span. */
export function noteOf(oldest, keptS) {
  const [, age, incr] = chosen;
  if (oldest === Infinity) return "No samples of this span are kept yet.";
  if (oldest - 3_000 * incr <= Date.now() - age * 1_000) return "";
  const kept = age > keptS ? `Samples are kept for ${keptS / 60} minutes. ` : "";
  return `${kept}Nothing is known before ${format.moment(oldest)}.`;
}
