// Charts as SVG: lines over time, heat maps, rings, bars. Colours are classes of the theme.

import { h, svg, fill } from "./dom.js";
import * as format from "./format.js";

const HEIGHT = 190;
const LEFT = 66; // for labels such as "1,023 KiB/s"
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 22;
const TICKS = 4;
export const COLOURS = 8;
const HEAT_STEPS = 8;
const TIME_WIDTH = 110; // of a time below the lines
const TIP_PAD = 8;
const TIP_LINE = 17;
const TIP_CHAR = 6.6; // about the width of a character

/** Return a round number that is at least `most`, and the step between `TICKS` lines. */
function scale(most) {
  const rough = Math.max(most, 1e-9) / TICKS;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough - 1e-12);
  return { step, top: step * TICKS };
}

/**
 * Lines over time. `series`: {name, colour, of(sample)}; `show(value)` a text.
 * Returns an element with `draw(samples, spanMs)`. Samples are {at (ms), ...}, the oldest first; those of the last
 * `spanMs` before the newest one are shown. The pointer, or a finger, shows the values of one time.
 */
export function lineChart(title, series, show) {
  const plot = h("div", { class: "plot" });
  const values = series.map(() => h("output", null, "–"));
  const legend = h("ul", { class: "legend" }, series.map((one, i) => h("li", null, h("i", { class: `swatch c${one.colour}` }), one.name, " ", values[i])));
  const element = h("figure", { class: "chart" }, h("figcaption", null, h("h2", null, title), legend), plot);
  let last = [];
  let spanMs = 1;
  let pointed = null; // the x of the pointer
  const tell = (sample) => series.forEach((one, i) => (values[i].textContent = sample ? show(one.of(sample)) : "–"));

  element.draw = (samples, span = spanMs) => {
    [last, spanMs] = [samples, span];
    const width = plot.clientWidth;
    if (width < 2 * LEFT) return;
    fill(plot, lines(title, series, samples, show, spanMs, width));
    tell(samples.at(-1));
    if (pointed !== null) point();
  };
  const point = () => {
    const drawn = plot.firstChild;
    if (!drawn || !last.length) return;
    const width = plot.clientWidth;
    const place = xOf(last, spanMs, width);
    const sample = last.reduce((a, b) => (Math.abs(place(b) - pointed) < Math.abs(place(a) - pointed) ? b : a));
    tell(sample);
    drawn.querySelector(".cross").setAttribute("transform", `translate(${place(sample)} 0)`);
    fill(drawn.querySelector(".tip"), tip(series, sample, show, place(sample), width));
    drawn.classList.add("pointed");
  };
  const follow = (event) => {
    pointed = event.clientX - plot.getBoundingClientRect().left;
    point();
  };
  plot.addEventListener("pointerdown", follow);
  plot.addEventListener("pointermove", follow);
  plot.addEventListener("pointerleave", () => {
    pointed = null;
    element.draw(last);
  });
  new ResizeObserver(() => element.draw(last)).observe(plot);
  return element;
}

function xOf(samples, spanMs, width) {
  const end = samples.at(-1)?.at ?? 0;
  return (sample) => width - RIGHT - ((end - sample.at) / spanMs) * (width - LEFT - RIGHT);
}

function lines(title, series, samples, show, spanMs, width) {
  const known = samples.flatMap((sample) => series.map((one) => one.of(sample))).filter(Number.isFinite);
  const { step, top } = scale(Math.max(...known, 0) || TICKS);
  const bottom = HEIGHT - BOTTOM;
  const x = xOf(samples, spanMs, width);
  const y = (value) => bottom - (value / top) * (bottom - TOP);
  const now = samples.at(-1);
  const said = now ? series.map((one) => `${one.name} ${show(one.of(now))}`).join(", ") : "no data yet";
  return svg("svg", { width, height: HEIGHT, viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${said}` },
    Array.from({ length: TICKS + 1 }, (_, i) => [
      svg("line", { class: i ? "grid" : "grid base", x1: LEFT, x2: width - RIGHT, y1: y(i * step), y2: y(i * step) }),
      svg("text", { class: "tick", x: LEFT - 8, y: y(i * step) + 4, "text-anchor": "end" }, show(i * step)),
    ]),
    now ? times(now.at, spanMs, x, width) : null,
    series.map((one) => svg("path", { class: `line c${one.colour}`, d: pathOf(samples, x, (sample) => y(one.of(sample)), (sample) => Number.isFinite(one.of(sample))) })),
    svg("line", { class: "cross", x1: 0, x2: 0, y1: TOP, y2: bottom }),
    svg("g", { class: "tip", "aria-hidden": "true" }));
}

/** Times below the lines, the newest one at the right end. */
function times(end, spanMs, x, width) {
  const count = Math.max(1, Math.min(TICKS, Math.floor((width - LEFT) / TIME_WIDTH)));
  return Array.from({ length: count + 1 }, (_, i) => {
    const at = end - (spanMs * i) / count;
    const anchor = i === 0 ? "end" : i === count ? "start" : "middle";
    return svg("text", { class: "tick", x: x({ at }), y: HEIGHT - 5, "text-anchor": anchor }, format.clock(at, spanMs));
  });
}

/** The time and the values of a sample in a box beside the pointer. */
function tip(series, sample, show, x, width) {
  const rows = series.map((one) => [one, `${one.name} ${show(one.of(sample))}`]);
  const head = format.clock(sample.at, 0);
  const wide = TIP_PAD * 3 + TIP_CHAR * Math.max(head.length, ...rows.map(([, text]) => text.length + 2));
  const left = x + TIP_PAD + wide < width ? x + TIP_PAD : Math.max(0, x - TIP_PAD - wide);
  const line = (i) => TOP + TIP_PAD + TIP_LINE * (i + 0.6);
  return [
    svg("rect", { class: "tipbox", x: left, y: TOP, width: wide, height: 2 * TIP_PAD + TIP_LINE * (rows.length + 1) - 4, rx: 6 }),
    svg("text", { class: "tick", x: left + TIP_PAD, y: line(0) }, head),
    rows.map(([one, text], i) => [
      svg("rect", { class: `mark c${one.colour}`, x: left + TIP_PAD, y: line(i + 1) - 8, width: 8, height: 8, rx: 2 }),
      svg("text", { class: "tiptext", x: left + TIP_PAD + 13, y: line(i + 1) }, text),
    ]),
  ];
}

/** A path through the known samples, with gaps where samples are not known. */
function pathOf(samples, x, y, isKnown) {
  let pen = "M";
  return samples.map((sample) => {
    const drawn = isKnown(sample) ? `${pen}${x(sample).toFixed(1)} ${y(sample).toFixed(1)}${pen === "M" ? "h0" : ""}` : ""; // h0: a dot
    pen = drawn ? "L" : "M";
    return drawn;
  }).join("");
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
