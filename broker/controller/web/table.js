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
  const again = page.live(async () => {
    const asked = { page: shown.page, page_size: PAGE_ROWS, name: shown.name, sort: shown.sort, sort_reverse: shown.reverse ? "true" : "", pagination: "true" };
    const found = await askFor(page, where(), asked, shown);
    if (!isStill(asked, shown)) return; // the change has asked again
    last = found;
    drawBody();
    update(said, counted(found));
    update(pager, pages(found, (number) => change({ page: number })));
  });

  let typing = 0;
  input.addEventListener("input", () => {
    clearTimeout(typing);
    typing = setTimeout(() => change({ name: input.value }), TYPING_MS);
  });
  drawHead();
  return h("div", { class: "list" },
    search ? h("div", { class: "tools" }, input, tools, choice.element, said) : null,
    h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
      h("table", null, h("caption", { class: "hidden" }, caption), h("thead", null, head), body)),
    pager);
}

/** Go to the first page if this one is behind the last, as rows were removed. */
async function askFor(page, where, asked, shown) {
  try {
    return await page.get(where, asked);
  } catch (error) {
    if (error.status !== 400 || asked.page === 1) throw error;
    shown.page = asked.page = 1;
    return page.get(where, asked);
  }
}

function isStill(asked, shown) {
  return asked.page === shown.page && asked.name === shown.name && asked.sort === shown.sort && (asked.sort_reverse === "true") === shown.reverse;
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

function pages({ page, page_count: last }, go) {
  if (last <= 1) return [];
  const step = (text, to, label) => h("button", { type: "button", data: { key: label }, disabled: to < 1 || to > last || to === page, "aria-label": label, on: { click: () => go(to) } }, text);
  return [
    h("span", { data: { key: `at ${page}` } }, step("«", 1, `First page of ${last}`), step("‹", page - 1, `Previous page, ${page - 1}`)),
    h("span", { "aria-current": "page" }, `${format.count(page)} / ${format.count(last)}`),
    h("span", { data: { key: `on ${page}` } }, step("›", page + 1, `Next page, ${page + 1}`), step("»", last, `Last page, ${last}`)),
  ];
}

/** A field to choose a vhost for all lists of this tab. */
export function vhostChoice(page, onChange) {
  const chosen = sessionStorage.getItem("shardmq.vhost") ?? "";
  const select = h("select", { "aria-label": "Virtual host" }, h("option", { value: "" }, "All virtual hosts"));
  page.get("vhosts", { columns: "name" }).then((vhosts) => {
    fill(select, h("option", { value: "" }, "All virtual hosts"), vhosts.map(({ name }) => h("option", { value: name, selected: name === chosen }, name)));
    if (select.value !== chosen) choose("");
  }, () => {});
  const choose = (name) => {
    sessionStorage.setItem("shardmq.vhost", name);
    onChange();
  };
  select.addEventListener("change", () => choose(select.value));
  return select;
}

export function chosenVhost() {
  return sessionStorage.getItem("shardmq.vhost") ?? "";
}
