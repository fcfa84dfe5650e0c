// Charts: lines over time by uPlot (index.html loads it); heat maps, rings and bars as SVG, coloured by classes of the theme.

/* global uPlot */

import { h, svg, fill } from "./dom.js";
import * as format from "./format.js";

const HEIGHT = 190;
const LEFT = 66; // for labels such as "1,023 KiB/s"
const RIGHT = 10;
const TOP = 10;
const BELOW = 26; // for the times
const TICK_WIDTH = 110; // of a time below the lines
const TICK_HEIGHT = 40;
const EMPTY_TOP = 4; // the top of a chart whose values are all 0, and the lowest top of numbers: there are no half messages
const FONT = "11.5px system-ui, sans-serif";
const TIP_PAD = 8;
export const COLOURS = 8;
const HEAT_STEPS = 8;

/**
 * Lines over time, which uPlot draws until `signal` is aborted. `series`: {name, colour, of(sample)}; `show(value)` a text.
 * Returns an element with `draw(samples, spanMs)`. Samples are {at (ms), ...}, the oldest first; those of the last
 * `spanMs` before the newest one are shown. The pointer, or a finger, shows the values of one time.
 */
export function lineChart(title, series, show, signal) {
  const plot = h("div", { class: "plot", role: "img", "aria-label": `${title}: no data yet` });
  const tip = h("div", { class: "tip", "aria-hidden": "true" });
  const swatches = series.map((one) => h("i", { class: `swatch c${one.colour}` }));
  const values = series.map(() => h("output", null, "–"));
  const legend = h("ul", { class: "legend" }, series.map((one, i) => h("li", null, swatches[i], one.name, " ", values[i])));
  const element = h("figure", { class: "chart" }, h("figcaption", null, h("h2", null, title), legend), plot);
  const lowestTop = show === format.compact ? EMPTY_TOP : 0;
  let drawn = null;
  let last = [];
  let spanMs = 1;

  const tell = (sample) => series.forEach((one, i) => (values[i].textContent = sample ? show(one.of(sample)) : "–"));
  const point = (u) => {
    const sample = u.cursor.left >= 0 ? last[u.cursor.idx] : undefined;
    tell(sample ?? last.at(-1));
    tip.hidden = !sample;
    if (sample) showTip(tip, u, sample, series, show);
  };
  // A canvas knows no colours of a theme: those of the elements are read at each drawing.
  const colour = (of, property) => () => getComputedStyle(of)[property];
  const options = () => ({
    ...{ width: plot.clientWidth, height: HEIGHT, padding: [TOP, RIGHT, 0, 0], legend: { show: false }, hooks: { setCursor: [point] } },
    cursor: { y: false, drag: { x: false, y: false } },
    scales: { x: { range: () => rangeOf(last, spanMs) }, y: { range: (u, low, high) => [0, uPlot.rangeNum(0, Math.max(high, lowestTop) || EMPTY_TOP, 0.05, true)[1]] } },
    axes: [
      { ...axis(colour(plot, "color"), BELOW, TICK_WIDTH), grid: { show: false }, values: (u, splits, at, space, step) => splits.map((s) => format.clock(s * 1_000, step < 60)) },
      { ...axis(colour(plot, "color"), LEFT, TICK_HEIGHT), grid: { stroke: colour(plot, "borderTopColor"), width: 1 }, values: (u, splits) => splits.map(show) },
    ],
    series: [{}, ...series.map((one, i) => ({ label: one.name, stroke: colour(swatches[i], "backgroundColor"), width: 2, points: { size: 4, fill: colour(swatches[i], "backgroundColor") } }))],
  });

  element.draw = (samples, span = spanMs) => {
    [last, spanMs] = [samples, span];
    if (signal.aborted || plot.clientWidth < 2 * LEFT) return;
    const columns = columnsOf(samples, series);
    if (drawn) drawn.setData(columns);
    else drawn = new uPlot(options(), columns, plot);
    if (!tip.isConnected) drawn.over.append(tip);
    const now = samples.at(-1);
    plot.setAttribute("aria-label", `${title}: ${now ? series.map((one) => `${one.name} ${show(one.of(now))}`).join(", ") : "no data yet"}`);
    plot.dataset.points = columns[1]?.filter((value) => value !== null).length ?? 0;
    point(drawn);
  };
  const sized = new ResizeObserver(() => {
    if (drawn && plot.clientWidth) drawn.setSize({ width: plot.clientWidth, height: HEIGHT });
    else element.draw(last);
  });
  sized.observe(plot);
  const repaint = () => drawn?.redraw(false, true);
  document.addEventListener("theme", repaint, { signal });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", repaint, { signal });
  signal.addEventListener("abort", () => {
    sized.disconnect();
    drawn?.destroy();
  });
  return element;
}

function axis(stroke, size, space) {
  return { stroke, size, space, font: FONT, ticks: { show: false } };
}

/** The first and the last second that are shown. */
function rangeOf(samples, spanMs) {
  const end = samples.at(-1)?.at ?? Date.now();
  return [(end - spanMs) / 1_000, end / 1_000];
}

/** Samples as uPlot takes them: seconds, then the values of each line; null is a gap. */
function columnsOf(samples, series) {
  const known = (value) => (Number.isFinite(value) ? value : null);
  return [samples.map(({ at }) => at / 1_000), ...series.map((one) => samples.map((sample) => known(one.of(sample))))];
}

/** Fill a box with the time and the values of a sample, and put it beside the pointer. */
function showTip(tip, u, sample, series, show) {
  fill(tip, h("span", null, format.clock(sample.at, true)),
    series.map((one) => h("span", { class: "tiptext" }, h("i", { class: `swatch c${one.colour}` }), `${one.name} ${show(one.of(sample))}`)));
  const x = u.valToPos(sample.at / 1_000, "x");
  const fits = x + TIP_PAD + tip.offsetWidth < u.over.clientWidth;
  tip.style.setProperty("left", `${fits ? x + TIP_PAD : Math.max(0, x - TIP_PAD - tip.offsetWidth)}px`);
}

/** A heat map, darker for larger values. `rows`: {name, href, values (oldest first), now}. */
export function heatMap(title, rows, show, columns) {
  const most = Math.max(0, ...rows.flatMap((row) => row.values.filter(Number.isFinite)));
  const heat = (value) => (!Number.isFinite(value) ? "unknown" : value <= 0 || most <= 0 ? "h0" : `h${Math.max(1, Math.ceil((value / most) * HEAT_STEPS))}`);
  const cells = (row) => {
    const values = [...Array(Math.max(0, columns - row.values.length)).fill(NaN), ...row.values.slice(-columns)];
    return svg("svg", { class: "heat", viewBox: `0 0 ${columns} 1`, preserveAspectRatio: "none", role: "img", "aria-label": `${row.name}: ${row.now}` },
      values.map((value, i) => svg("rect", { class: heat(value), x: i + 0.06, y: 0, width: 0.88, height: 1 })));
  };
  return h("div", { class: "heatmap", role: "group", "aria-label": title },
    rows.map((row) => h("div", { class: "heatrow", data: { key: row.name } },
      row.href ? h("a", { href: row.href }, row.name) : h("span", null, row.name), cells(row), h("output", null, row.now))),
    h("div", { class: "heatkey" }, h("span", null, "0"), Array.from({ length: HEAT_STEPS + 1 }, (_, i) => h("i", { class: `h${i}` })), h("span", null, show(most))));
}

/** A ring of shares. `arcs`: {name, share (0..1), colour}. */
export function ring(title, arcs, middle) {
  const size = 260;
  const centre = size / 2;
  const radius = 98;
  let at = 0;
  const drawn = arcs.map((arc) => {
    const from = at;
    at += arc.share;
    return svg("path", { class: `arc c${arc.colour % COLOURS}`, d: arcPath(centre, radius, from, at) }, svg("title", null, `${arc.name}: ${(arc.share * 100).toFixed(1)} %`));
  });
  const said = arcs.map((arc) => `${arc.name} ${(arc.share * 100).toFixed(1)} %`).join(", ");
  return svg("svg", { class: "ring", viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": `${title}: ${said}` }, drawn,
    svg("text", { class: "middle", x: centre, y: centre - 2, "text-anchor": "middle" }, middle[0]),
    svg("text", { class: "tick", x: centre, y: centre + 20, "text-anchor": "middle" }, middle[1]));
}

function arcPath(centre, radius, from, to) {
  const gap = to - from > 0.01 ? 0.0025 : 0;
  const end = Math.min(to - gap, from + 0.9999);
  const point = (turn) => [centre + radius * Math.sin(turn * 2 * Math.PI), centre - radius * Math.cos(turn * 2 * Math.PI)].map((one) => one.toFixed(2)).join(" ");
  return `M${point(from + gap)}A${radius} ${radius} 0 ${end - from > 0.5 ? 1 : 0} 1 ${point(Math.max(end, from + gap + 0.0005))}`;
}

/** A bar filled to `part`, 0..1. Above `warn` it has another colour. */
export function bar(label, part, text, warn = 0.9) {
  const filled = Math.min(1, Math.max(0, Number.isFinite(part) ? part : 0));
  const kind = filled >= warn ? "bar full" : "bar";
  return h("div", { class: "meter" }, h("span", { class: "label" }, label), h("span", { class: "value" }, text),
    svg("svg", { class: kind, viewBox: "0 0 100 1", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("rect", { class: "track", width: 100, height: 1 }), svg("rect", { class: "fill", width: Math.max(filled * 100, filled > 0 ? 0.6 : 0), height: 1 })));
}
