// Parameters: settings that plugins and the broker keep by component and name, and global ones.

import { path, put, remove } from "../api.js";
import { h } from "../dom.js";
import { listTable } from "../table.js";
import { adder, attempt, button, dangerous, form, formDialog, section, textOf } from "../widgets.js";
import { vhostOptions } from "./vhosts.js";

const VALUE = { name: "value", label: "Value", type: "json", required: true, help: 'JSON, such as {"number": 4}, 10, true or "a text". Anything else is taken as a text, unless it begins with {, [ or "' };

export function parameters(page) {
  const name = { name: "name", label: "Name", required: true };
  page.show("Parameters",
    h("p", { class: "lead" }, "Parameters are settings that are stored in the broker. Those of a component, such as the number of shard queues of stream exchanges (component shards), belong to a virtual host; global parameters hold for the whole broker."),
    adder("Add a parameter", addForm(page, [vhostOptions(page), { name: "component", label: "Component", required: true }, name], "Add parameter")),
    section("Parameters of components", list(page, "Parameters of components", "parameters", [
      { label: "Component", sort: "component", cell: (row) => row.component },
      { label: "Virtual host", sort: "vhost", minor: true, cell: (row) => row.vhost },
    ])),
    adder("Add a global parameter", addForm(page, [name], "Add global parameter")),
    section("Global parameters", list(page, "Global parameters", "global-parameters", [])));
}

const whereOf = ({ component, vhost, name }) => (component === undefined ? path("global-parameters", name) : path("parameters", component, vhost, name));

function list(page, caption, kind, more) {
  return listTable(page, {
    caption,
    where: () => kind,
    search: null,
    key: (row) => JSON.stringify(row),
    columns: [
      { label: "Name", sort: "name", cell: (row) => row.name },
      ...more,
      { label: "Value", cell: (row) => h("code", null, JSON.stringify(row.value)) },
      { label: "", cell: (row) => h("div", { class: "actions" }, editButton(page, row), deleteButton(page, row)) },
    ],
  });
}

function editButton(page, row) {
  const edit = () => formDialog(`Edit ${row.name}`, [{ ...VALUE, value: textOf(row.value) }], {
    label: "Save",
    done: `${row.name} is saved.`,
    submit: async ({ value }) => {
      await put(whereOf(row), { value });
      page.refresh();
    },
  });
  return button("Edit", edit, "", `Edit ${row.name}`);
}

function deleteButton(page, row) {
  return dangerous("Delete", `Delete the parameter ${row.name}? Its component then does without it.`, async () => {
    if (await attempt(() => remove(whereOf(row)), `${row.name} is deleted.`)) page.refresh();
  }, `Delete ${row.name}`);
}

function addForm(page, fields, label) {
  return form([...fields, VALUE], {
    label,
    done: "The parameter is stored.",
    submit: async ({ value, ...key }) => {
      await put(whereOf(key), { value });
      page.refresh();
    },
  });
}
