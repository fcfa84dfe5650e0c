// Policies and operator policies: rules by name for queues and exchanges.

import { has, path, put, remove } from "../api.js";
import { APPLY_TO, OPERATOR_POLICY_KEYS, POLICY_KEYS } from "../arguments.js";
import { h } from "../dom.js";
import { listTable } from "../table.js";
import { attempt, badge, dangerous, entries, fold, form, notice, section } from "../widgets.js";
import { vhostOptions } from "./vhosts.js";

export function policies(page) {
  page.show("Policies",
    h("p", { class: "lead" }, "Of all policies whose pattern matches a name, the one with the highest priority holds; operator policies hold beside it, and the stricter limit wins."),
    section("Policies", list(page, "Policies", "policies", has("policymaker"))),
    has("policymaker") ? fold("Add a policy", addForm(page, "policies", POLICY_KEYS)) : null,
    section("Operator policies", list(page, "Operator policies", "operator-policies", has("administrator"))),
    has("administrator") ? fold("Add an operator policy", addForm(page, "operator-policies", OPERATOR_POLICY_KEYS)) : null);
}

function list(page, caption, kind, mayChange) {
  return listTable(page, {
    caption,
    where: () => kind,
    search: false,
    key: (row) => `${row.vhost}\n${row.name}\n${JSON.stringify(row)}`,
    columns: [
      { label: "Name", sort: "name", cell: (row) => row.name },
      { label: "Virtual host", sort: "vhost", cell: (row) => row.vhost },
      { label: "Pattern", cell: (row) => h("code", null, row.pattern) },
      { label: "Applies to", cell: (row) => badge(row["apply-to"]) },
      { label: "Definition", cell: (row) => entries(row.definition) },
      { label: "Priority", sort: "priority", number: true, cell: (row) => String(row.priority) },
      { label: "", cell: (row) => (mayChange ? deleteButton(page, kind, row) : null) },
    ],
  });
}

function deleteButton(page, kind, row) {
  return dangerous("Delete", `Delete ${row.name}? What it said holds no more, at once.`, async () => {
    if (await attempt(() => remove(path(kind, row.vhost, row.name)), `${row.name} is deleted.`)) page.refresh();
  }, `Delete ${row.name}`);
}

function addForm(page, kind, keys) {
  return form([
    vhostOptions(page),
    { name: "name", label: "Name", required: true },
    { name: "pattern", label: "Pattern", required: true, help: "A regular expression; ^ and $ for the whole name" },
    { name: "apply", label: "Applies to", type: "select", options: APPLY_TO },
    { name: "priority", label: "Priority", type: "number", value: 0 },
    { name: "definition", label: "Definition", type: "arguments", hints: keys, help: "A line each: name = value" },
  ], {
    label: "Add policy",
    submit: async ({ vhost, name, pattern, apply, priority, definition }) => {
      await put(path(kind, vhost, name), { pattern, definition, priority: priority ?? 0, "apply-to": apply });
      notice(`${name} holds.`);
      page.refresh();
    },
  });
}
