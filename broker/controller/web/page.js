// A view on the screen, and the calls that it repeats until another view is shown.

import * as api from "./api.js";
import { h, fill } from "./dom.js";
import { whenReleased } from "./press.js";
import { to } from "./router.js";

const RETRY_MS = 3_000;

export class Page {
  /** `main`: where it is shown. `query`: of the address. `onTrouble(reason or null)`: the broker is away, or back. */
  constructor(main, query, onTrouble) {
    this.main = main;
    this.query = query;
    this.onTrouble = onTrouble;
    this.end = new AbortController();
    this.again = new Set();
    this.isLeft = false;
  }

  get signal() {
    return this.end.signal;
  }

  /** End the view: another one is shown. */
  close() {
    this.isLeft = true;
    this.end.abort();
  }

  /** Go to another view, unless the user has gone to one already. */
  leave(...parts) {
    if (!this.isLeft) location.hash = to(...parts);
  }

  /** Heading, and what stands below it. */
  show(title, ...children) {
    document.title = `${typeof title === "string" ? title : title.textContent} · shardmq`;
    fill(this.main, h("h1", { tabindex: "-1" }, title), children);
  }

  /** Give the view another heading, when its name is known. */
  rename(title) {
    document.title = `${title} · shardmq`;
    const heading = this.main.querySelector("h1");
    if (heading.textContent !== title) heading.textContent = title;
  }

  /** Return the answer as soon as it may be drawn: nothing moves below a pointer that is pressed. */
  async get(where, query) {
    const found = await api.get(where, { query, signal: this.signal });
    await whenReleased();
    this.signal.throwIfAborted();
    return found;
  }

  /**
   * Call `ask` now and every `everyMs`, while the page can be seen. Return a function that asks at once, or, if an
   * answer is under way, as soon as it is there: what was asked before a change does not show it.
   */
  live(ask, everyMs = 5_000) {
    let timer = 0;
    let running = false;
    let missed = false;
    const turn = async () => {
      clearTimeout(timer);
      if (this.signal.aborted) return;
      missed = running;
      if (running) return;
      running = true;
      let waitMs = everyMs;
      try {
        if (!document.hidden) await ask();
        if (!this.signal.aborted) this.onTrouble(null);
      } catch (error) {
        if (this.signal.aborted) return;
        if (!(error instanceof api.ApiError)) throw error;
        if (this.isOver(error)) return;
        this.onTrouble(error.message);
        waitMs = Math.max(everyMs, RETRY_MS);
      } finally {
        running = false;
      }
      if (!this.signal.aborted) timer = setTimeout(turn, missed ? 0 : waitMs);
    };
    this.signal.addEventListener("abort", () => clearTimeout(timer));
    document.addEventListener("visibilitychange", turn, { signal: this.signal });
    this.again.add(turn);
    turn();
    return turn;
  }

  /** Ask for everything anew: something was changed. */
  refresh() {
    for (const turn of this.again) turn();
  }

  isOver(error) {
    if (error.status !== 404) return false;
    this.gone();
    return true;
  }

  /** What is shown is not there any more: nothing is asked for again. */
  gone() {
    this.end.abort();
    this.show("Not there", h("p", null, "What this address names does not exist, or does not exist any more."));
  }
}
