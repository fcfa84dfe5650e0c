// The numbers of the last minutes, for charts. They are kept while views change.

import * as api from "./api.js";

export const EVERY_MS = 2_000;
export const SPAN_MS = 600_000;

/** Samples, the oldest first: `at` in ms, and `said`, the response. */
export const overviews = [];
export const loads = [];
const listeners = new Set();
let timer = 0;
let life = 0;

export function begin() {
  stop();
  tick(life);
}

export function stop() {
  clearTimeout(timer);
  life += 1;
  overviews.length = loads.length = 0;
}

/** Call a function after each new sample, until `signal` is aborted. */
export function follow(listener, signal) {
  listeners.add(listener);
  signal.addEventListener("abort", () => listeners.delete(listener));
  listener();
}

async function tick(mine) {
  if (!document.hidden) await Promise.all([sample("overview", overviews, mine), api.has("monitoring") && sample("shards/load", loads, mine)]);
  if (mine !== life) return;
  for (const listener of listeners) listener();
  timer = setTimeout(tick, EVERY_MS, mine);
}

async function sample(where, into, mine) {
  try {
    const said = await api.get(where);
    if (mine !== life) return;
    const at = Date.now();
    into.push({ at, said });
    while (into.length && into[0].at < at - SPAN_MS) into.shift();
  } catch (error) {
    // The chart gets a gap; the views show the error.
    if (!(error instanceof api.ApiError)) throw error;
  }
}
