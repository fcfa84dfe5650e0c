// Policies and operator policies: rules by name for queues and exchanges.

import { has, path, put, remove } from "../api.js";
import { APPLY_TO, OPERATOR_POLICY_KEYS, POLICY_KEYS } from "../arguments.js";
import { h } from "../dom.js";
import { listTable } from "../table.js";
import { adder, attempt, badge, button, dangerous, entries, form, formDialog, linesOf, notice, section } from "../widgets.js";
import { vhostOptions } from "./vhosts.js";

export function policies(page) {
  page.show("Policies",
    h("p", { class: "lead" }, "A policy sets arguments of all queues and exchanges whose names match its pattern. If several match, the one with the highest priority counts. An operator policy limits what policies and clients may set: the stricter limit counts."),
    has("policymaker") ? adder("Add a policy", addForm(page, "policies", POLICY_KEYS)) : null,
    section("Policies", list(page, "Policies", "policies", has("policymaker") ? POLICY_KEYS : null)),
    has("administrator") ? adder("Add an operator policy", addForm(page, "operator-policies", OPERATOR_POLICY_KEYS)) : null,
    section("Operator policies", list(page, "Operator policies", "operator-policies", has("administrator") ? OPERATOR_POLICY_KEYS : null)));
}

/** `keys`: those that the user may set, or null. */
function list(page, caption, kind, keys) {
  return listTable(page, {
    caption,
    where: () => kind,
    search: null,
    key: (row) => `${row.vhost}\n${row.name}\n${JSON.stringify(row)}`,
    columns: [
      { label: "Name", sort: "name", cell: (row) => row.name },
      { label: "Virtual host", sort: "vhost", cell: (row) => row.vhost },
      { label: "Pattern", cell: (row) => h("code", null, row.pattern) },
      { label: "Applies to", cell: (row) => badge(row["apply-to"]) },
      { label: "Definition", cell: (row) => entries(row.definition) },
      { label: "Priority", sort: "priority", number: true, cell: (row) => String(row.priority) },
      { label: "", cell: (row) => (keys ? h("div", { class: "actions" }, editButton(page, kind, keys, row), deleteButton(page, kind, row)) : null) },
    ],
  });
}

function deleteButton(page, kind, row) {
  return dangerous("Delete", `Delete ${row.name}? Its queues and exchanges lose these settings at once.`, async () => {
    if (await attempt(() => remove(path(kind, row.vhost, row.name)), `${row.name} is deleted.`)) page.refresh();
  }, `Delete ${row.name}`);
}

function fieldsOf(keys, row = null) {
  return [
    { name: "pattern", label: "Pattern", required: true, value: row?.pattern, help: "A regular expression. ^ and $ stand for the ends of the name: ^orders$ matches orders alone" },
    { name: "apply", label: "Applies to", type: "select", options: APPLY_TO, value: row?.["apply-to"] },
    { name: "priority", label: "Priority", type: "number", value: row?.priority ?? 0 },
    { name: "definition", label: "Definition", type: "arguments", hints: keys, value: row ? linesOf(row.definition) : "", help: "One setting in each line: name = value" },
  ];
}

async function store(page, kind, vhost, name, { pattern, apply, priority, definition }) {
  await put(path(kind, vhost, name), { pattern, definition, priority: priority ?? 0, "apply-to": apply });
  page.refresh();
}

function editButton(page, kind, keys, row) {
  const edit = () => formDialog(`Edit ${row.name}`, fieldsOf(keys, row), {
    label: "Save",
    done: `${row.name} is saved and in effect.`,
    submit: (values) => store(page, kind, row.vhost, row.name, values),
  });
  return button("Edit", edit, "", `Edit ${row.name}`);
}

function addForm(page, kind, keys) {
  return form([vhostOptions(page), { name: "name", label: "Name", required: true }, ...fieldsOf(keys)], {
    label: "Add policy",
    submit: async ({ vhost, name, ...values }) => {
      await store(page, kind, vhost, name, values);
      notice(`${name} is in effect.`);
    },
  });
}
