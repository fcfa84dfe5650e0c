// Pieces that all views share: notes, badges, lists of facts, buttons with confirmation, forms.

import { has, isCluster } from "./api.js";
import { h } from "./dom.js";
import * as format from "./format.js";
import { to } from "./router.js";

const NOTICE_MS = 6_000;
const NOTICES_MAX = 4;

/** Show a notice, which screen readers read out. */
export function notice(text) {
  say("notices", "notice", text, NOTICE_MS);
}

export function failure(error) {
  say("errors", "notice bad", error?.message ?? String(error), 0);
}

function say(where, kind, text, forMs) {
  const place = document.getElementById(where);
  const box = h("div", { class: kind }, h("span", null, text));
  box.append(h("button", { type: "button", class: "plain", "aria-label": "Dismiss", on: { click: () => box.remove() } }, "×"));
  place.append(box);
  while (place.childElementCount > NOTICES_MAX) place.firstChild.remove();
  if (forMs) setTimeout(() => box.remove(), forMs);
}

/** Do something that may be refused, and show the reason. Return whether it was done. */
export async function attempt(act, done = "", refused = failure) {
  try {
    await act();
  } catch (error) {
    refused(error);
    return false;
  }
  if (done) notice(done);
  return true;
}

export function section(title, ...children) {
  return h("section", { class: "card" }, title ? h("h2", null, title) : null, children);
}

export function badge(text, kind = "") {
  return h("span", { class: `badge ${kind}` }, text);
}

/** A list of [name, value] pairs; a value may be an element. */
export function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== null && value !== undefined);
  return h("dl", { class: "facts" }, shown.map(([name, value]) => h("div", null, h("dt", null, name), h("dd", null, value))));
}

/** A table of the fields of an object, such as arguments or properties. */
export function entries(object) {
  const rows = Object.entries(object ?? {});
  if (!rows.length) return h("span", { class: "faint" }, "none");
  return h("ul", { class: "entries" }, rows.map(([name, value]) => h("li", null, h("code", null, name), " = ", h("code", null, format.value(value)))));
}

/** Large numbers beside each other: [label, value, detail]. */
export function figures(rows) {
  return h("dl", { class: "figures" }, rows.map(([label, value, detail]) =>
    h("div", null, h("dt", null, label), h("dd", null, value, detail ? h("small", null, detail) : null))));
}

export function link(text, ...parts) {
  return h("a", { href: to(...parts) }, text === "" ? "(default)" : text);
}

export function queueLink(vhost, name) {
  return link(name, "queues", vhost, name);
}

export function exchangeLink(vhost, name) {
  return link(name, "exchanges", vhost, name);
}

/** A link to the page of a node, for users who may see it. */
export function nodeLink(name, text = name) {
  return has("monitoring") ? link(text, "nodes", name) : text;
}

/** A column with the node, in a cluster. Lists have little room, and most names begin alike. */
export function nodeColumn(more) {
  return isCluster ? [{ label: "Node", ...more, cell: ({ node }) => nodeLink(node, node.replace(/^shardmq@/, "")) }] : [];
}

/** A fact about a thing that lies on a node, in a cluster. */
export function nodeFact({ node }) {
  return ["Node", isCluster ? nodeLink(node) : null];
}

export function state(name) {
  return badge(name === "uncalled" ? "starts when needed" : name, ["running", "ready", "flow", "done", "serving"].includes(name) ? "good" : ["down", "error", "exited", "failed", "terminated"].includes(name) ? "bad" : "warn");
}

export function button(text, click, kind = "", label = null) {
  return h("button", { type: "button", class: kind, "aria-label": label, on: { click } }, text);
}

/** A button that asks for confirmation before `act`. */
export function dangerous(text, question, act, label = null) {
  return h("button", { type: "button", class: "danger", "aria-label": label, on: { click: async () => (await confirmed(question, text)) && act() } }, text);
}

/** Ask a question in a dialog. Escape means no. */
export function confirmed(question, yes) {
  return new Promise((resolve) => {
    const dialog = h("dialog", { "aria-labelledby": "question" },
      h("form", { method: "dialog" },
        h("p", { id: "question" }, question),
        h("div", { class: "actions" },
          h("button", { value: "no", autofocus: true }, "Cancel"),
          h("button", { value: "yes", class: "danger solid" }, yes))));
    dialog.addEventListener("close", () => {
      dialog.remove();
      resolve(dialog.returnValue === "yes");
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}

/**
 * A form. `fields`: {name, label, type, value, options, help, required, hints, when}; types: text, password, number,
 * textarea, checkbox, select, arguments (lines of name = value), json, file, datetime-local. A field with
 * `when: [name, value]` is asked for only while the field `name` has this value. `submit(values)` may throw what is then
 * told to `refused`.
 */
export function form(fields, { label, submit, done = "", stays = false, refused = failure }) {
  const inputs = fields.map((field) => [field, input(field)]);
  const sends = h("button", { type: "submit", class: "solid" }, label);
  const made = h("form", { class: "form" },
    inputs.map(([field, control]) => labelled(field, control)), h("div", { class: "actions" }, sends));
  const ask = () => {
    for (const [{ when }, control] of inputs.filter(([field]) => field.when)) {
      const isAsked = inputs.some(([{ name }, { value }]) => name === when[0] && value === when[1]);
      control.disabled = !isAsked; // a browser does not insist on a value of a disabled field
      control.closest(".field").hidden = !isAsked;
    }
  };
  made.addEventListener("change", ask);
  ask();
  made.addEventListener("submit", async (event) => {
    event.preventDefault();
    sends.disabled = true;
    const went = await attempt(async () => submit(Object.fromEntries(inputs.map(([field, control]) => [field.name, read(field, control)]))), done, refused);
    sends.disabled = false;
    if (!went || stays) return;
    made.reset();
    ask();
  });
  return made;
}

/** A form in a dialog. The dialog closes when `submit` has gone well, or at Escape; it shows what was refused. */
export function formDialog(title, fields, { label, submit, done = "" }) {
  const wrong = h("p", { class: "wrong", role: "alert" });
  const asks = form(fields, {
    label,
    done,
    stays: true,
    refused: (error) => (wrong.textContent = error?.message ?? String(error)),
    submit: async (values) => {
      wrong.textContent = "";
      await submit(values);
      dialog.close();
    },
  });
  asks.querySelector(".actions").prepend(button("Cancel", () => dialog.close()));
  const heading = h("h2", { id: `dialog-${(ids += 1)}` }, title);
  const dialog = h("dialog", { class: "wide", "aria-labelledby": heading.id }, heading, asks, wrong);
  dialog.addEventListener("close", () => dialog.remove());
  document.body.append(dialog);
  dialog.showModal();
}

let ids = 0;

function labelled(field, control) {
  const help = field.help ? h("small", { id: `${control.id}-help` }, field.help) : null;
  if (help) control.setAttribute("aria-describedby", help.id);
  if (field.type === "checkbox") return h("div", { class: "field check" }, h("label", { for: control.id }, control, " ", field.label), help);
  const wide = ["textarea", "arguments", "json"].includes(field.type) ? " wide" : "";
  return h("div", { class: `field${wide}` }, h("label", { for: control.id }, field.label), control, hints(field, control), help);
}

function input({ name, type = "text", value = "", options = [], required = false, autocomplete = "off", min = null }) {
  const props = { id: `field-${(ids += 1)}`, name, required, autocomplete };
  switch (type) {
    case "select":
      return h("select", props, options.map((one) => {
        const [key, text] = Array.isArray(one) ? one : [one, one];
        return h("option", { value: key, selected: key === value }, text);
      }));
    case "textarea":
    case "json":
    case "arguments": {
      const area = h("textarea", { ...props, rows: type === "arguments" ? 3 : 4, spellcheck: "false" });
      area.defaultValue = value;
      return area;
    }
    case "checkbox":
      return h("input", { ...props, type, checked: value === true });
    default:
      return h("input", { ...props, type, value: type === "file" ? null : value, min, step: type === "datetime-local" ? 1 : null, spellcheck: "false" });
  }
}

/** Buttons that insert the names of known arguments. */
function hints({ hints: names = [] }, control) {
  if (!names.length) return null;
  const write = (name) => () => {
    control.value = `${control.value.trimEnd()}${control.value.trim() ? "\n" : ""}${name} = `;
    control.focus();
  };
  return h("div", { class: "hints" }, names.map((name) => button(name, write(name), "plain")));
}

function read({ type = "text", label }, control) {
  if (type === "checkbox") return control.checked;
  if (type === "number") return control.value === "" ? null : Number(control.value);
  if (type === "file") return control.files[0] ?? null;
  if (type === "json") return valueOf(control.value, label);
  return type === "arguments" ? argumentsOf(control.value, label) : control.value;
}

/** Parse lines "name = value" into an object; each value is what `valueOf` returns. */
function argumentsOf(text, label) {
  const found = {};
  for (const line of text.split("\n").filter((one) => one.trim())) {
    const at = line.indexOf("=");
    if (at < 1) throw new Error(`${label}: "${line.trim()}" is not name = value`);
    found[line.slice(0, at).trim()] = valueOf(line.slice(at + 1).trim(), label);
  }
  return found;
}

const JSON_BEGINS = /^\s*[{["]/;

/** Return the value that a text says: JSON, or else the text itself. What begins like JSON and is none has a mistake. */
function valueOf(text, label) {
  try {
    return JSON.parse(text);
  } catch (error) {
    if (JSON_BEGINS.test(text)) throw new Error(`${label}: ${text.trim()} begins like JSON and has a mistake: ${error.message}. To store it as a text, put it between double quotes.`);
    return text;
  }
}

/** Return the text that a form reads as this value. */
export function textOf(value) {
  return typeof value === "string" && !JSON_BEGINS.test(value) && valueOf(value) === value ? value : JSON.stringify(value);
}

/** Return the lines "name = value" that a form reads as this object. */
export function linesOf(object) {
  return Object.entries(object).map(([name, value]) => `${name} = ${textOf(value)}`).join("\n");
}

/** A section that can be opened. */
export function fold(title, ...children) {
  return h("details", { class: "card fold" }, h("summary", null, h("h2", null, title)), children);
}

/** A section at the head of a list that can be opened to add something. */
export function adder(title, ...children) {
  return h("details", { class: "card fold add" }, h("summary", null, h("h2", null, title)), children);
}

/** A section that is made by `make()` when it is opened for the first time. */
export function foldOnDemand(title, make) {
  const made = fold(title);
  made.addEventListener("toggle", () => made.append(make()), { once: true });
  return made;
}

/** A section inside a section, which can be opened. */
export function inner(title, ...children) {
  return h("details", { class: "inner" }, h("summary", null, title), children);
}

export function empty(text) {
  return h("p", { class: "faint" }, text);
}
