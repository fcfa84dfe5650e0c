// Lists: the server makes pages, sorts and searches, so that 100,000 rows are as quick as ten.

import { columnChoice } from "./columns.js";
import { fill, h, update } from "./dom.js";
import * as format from "./format.js";
import { remember } from "./router.js";

const PAGE_ROWS = 50;
const TYPING_MS = 300;

/**
 * A table of the given rows. `columns`: {label, cell(row), number, minor, name}; minor ones are hidden on a phone, and
 * names may take two lines. `key(row)` identifies a row.
 */
export function plainTable(caption, columns, rows, key = (row) => JSON.stringify(row), nothing = "none") {
  if (!rows.length) return h("p", { class: "faint", data: { key: `none ${caption}` } }, nothing);
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption, data: { key: `table ${caption}` } },
    h("table", null, h("caption", { class: "hidden" }, caption),
      h("thead", null, h("tr", null, columns.map(({ label, number, minor }) => (label ? h("th", { scope: "col", class: classes({ number, minor }) }, label) : h("td"))))),
      h("tbody", null, rows.map((row) => line(columns, row, key)))));
}

function classes({ number, minor, name }) {
  return [number && "number", minor && "minor", name && "name"].filter(Boolean).join(" ") || null;
}

function line(columns, row, key) {
  const cell = (column, i) => {
    const props = { class: classes(column) };
    return i === 0 ? h("th", { ...props, scope: "row" }, column.cell(row)) : h("td", props, column.cell(row));
  };
  return h("tr", { data: { key: key(row) } }, columns.map(cell));
}

/**
 * A list of the API at `where()`, fetched page by page. Columns may have `sort`, the field that the server sorts by.
 * `search`: what is searched for, or null for a list without tools. With `choose`, a name, the columns can be chosen.
 * Returns the element, which is updated as long as `page` is shown.
 */
export function listTable(page, { caption, where, columns, key, nothing = "There are none.", search = "name", choose = null, tools = null }) {
  const shown = {
    page: Number(page.query.get("page")) || 1,
    name: page.query.get("name") ?? "",
    sort: page.query.get("sort") ?? "",
    reverse: page.query.get("reverse") === "true",
  };
  const head = h("tr");
  const body = h("tbody");
  const pager = h("nav", { class: "pager", "aria-label": `Pages of ${caption}` });
  const said = h("p", { class: "count", role: "status" });
  const input = h("input", { type: "search", value: shown.name, placeholder: `Search by ${search}`, "aria-label": `Search ${caption} by ${search}`, spellcheck: "false" });

  const change = (values) => {
    Object.assign(shown, { page: 1 }, values);
    remember({ ...shown, page: shown.page > 1 ? shown.page : "" });
    drawHead();
    drawPager();
    again();
  };
  let last = null;
  const draw = () => {
    drawHead();
    fill(body); // a kept cell would keep the buttons of another column
    if (last) drawBody();
  };
  const choice = choose ? columnChoice(choose, columns, draw) : { shown: () => columns, element: null };
  const drawHead = () => update(head, choice.shown().map((column) => heading(column, shown, change)));
  const drawBody = () => {
    const seen = choice.shown();
    update(body, last.items.length ? last.items.map((row) => line(seen, row, key)) : h("tr", null, h("td", { colspan: seen.length, class: "faint" }, shown.name ? `No ${search} contains "${shown.name}".` : nothing)));
  };
  const drawPager = () => update(pager, last ? pages(shown.page, last.page_count, (step) => change({ page: step(shown.page, last.page_count) })) : []);
  const again = page.live(async () => {
    const asked = { where: where(), ...shown };
    const isStill = () => asked.where === where() && Object.entries(shown).every(([name, value]) => asked[name] === value);
    let found;
    try {
      found = await page.get(asked.where, { page: asked.page, page_size: PAGE_ROWS, name: asked.name, sort: asked.sort, sort_reverse: asked.reverse ? "true" : "", pagination: "true" });
    } catch (error) {
      if ([400, 404].includes(error.status) && !isStill()) return; // the change has asked again
      if (error.status === 404 && tools?.value) return chooseVhost(tools, ""); // the chosen one was deleted
      if (error.status === 400 && asked.page > 1) return change({}); // rows were removed, and this page is behind the last
      throw error;
    }
    if (!isStill()) return;
    last = found;
    drawBody();
    update(said, counted(found));
    drawPager();
  });

  let typing = 0;
  input.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => change({ name: input.value }), TYPING_MS);
  });
  page.signal.addEventListener("abort", () => clearTimeout(typing)); // the address is that of another view then
  drawHead();
  return h("div", { class: "list" },
    search ? h("div", { class: "tools" }, input, tools, choice.element, said) : null,
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      h("table", null, h("caption", { class: "hidden" }, caption), h("thead", null, head), body)),
    pager);
}

function heading({ label, sort, number, minor }, shown, change) {
  const data = { key: `head ${label}` };
  if (!label) return h("td", { data }); // above buttons
  const props = { scope: "col", class: classes({ number, minor }), data };
  if (!sort) return h("th", props, label);
  const isThis = shown.sort === sort;
  const order = !isThis ? "none" : shown.reverse ? "descending" : "ascending";
  // Numbers are sorted in descending order at first: users look for the largest.
  const click = () => change(shown.sort === sort ? { reverse: !shown.reverse } : { sort, reverse: Boolean(number) });
  return h("th", { ...props, "aria-sort": order }, h("button", { type: "button", class: "sort", on: { click } }, label));
}

function counted({ filtered_count: found, total_count: total }) {
  return found === total ? format.count(total) : `${format.count(found)} of ${format.count(total)}`;
}

// The buttons are kept while the page changes, so each says how far it goes from the page of that moment.
const TO_FIRST = () => 1;
const TO_PREVIOUS = (page) => page - 1;
const TO_NEXT = (page) => page + 1;
const TO_LAST = (page, last) => last;

/** The buttons below a list. `go(step)` is called with the step to another page. */
function pages(page, last, go) {
  if (last <= 1) return [];
  const button = (text, step, label) => {
    const to = step(page, last);
    return h("button", { type: "button", disabled: to < 1 || to > last || to === page, "aria-label": label(to), on: { click: () => go(step) } }, text);
  };
  return [
    h("span", null, button("«", TO_FIRST, () => `First page of ${last}`), button("‹", TO_PREVIOUS, (to) => `Previous page, ${to}`)),
    h("span", { "aria-current": "page" }, `${format.count(page)} / ${format.count(last)}`),
    h("span", null, button("›", TO_NEXT, (to) => `Next page, ${to}`), button("»", TO_LAST, (to) => `Last page, ${to}`)),
  ];
}

/** A field to choose a vhost for all lists of this tab. */
export function vhostChoice(page, onChange) {
  const select = h("select", { "aria-label": "Virtual host" });
  const offer = (names) => {
    const chosen = chosenVhost();
    fill(select, h("option", { value: "" }, "All virtual hosts"), names.map((name) => h("option", { value: name, selected: name === chosen }, name)));
  };
  offer([chosenVhost()].filter(Boolean)); // until all are known
  page.get("vhosts", { columns: "name" }).then((vhosts) => {
    offer(vhosts.map(({ name }) => name));
    if (select.value !== chosenVhost()) chooseVhost(select, "");
  }, () => {});
  select.addEventListener("change", () => {
    sessionStorage.setItem("shardmq.vhost", select.value);
    onChange();
  });
  return select;
}

function chooseVhost(select, name) {
  select.value = name;
  select.dispatchEvent(new Event("change"));
}

export function chosenVhost() {
  return sessionStorage.getItem("shardmq.vhost") ?? "";
}
