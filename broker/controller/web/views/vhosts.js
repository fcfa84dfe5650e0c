// Virtual hosts: the list, and one with its permissions and limits.

import { has, path, put, remove } from "../api.js";
import { h, update } from "../dom.js";
import * as format from "../format.js";
import { chosenVhost, listTable, plainTable } from "../table.js";
import { adder, attempt, dangerous, empty, facts, form, inner, link, notice, section } from "../widgets.js";
import { permissionsOf } from "./permissions.js";

/** A field of a form to choose a vhost. */
export function vhostOptions(page) {
  const field = { name: "vhost", label: "Virtual host", type: "select", options: [chosenVhost() || "/"] };
  page.get("vhosts", { columns: "name" }).then((vhosts) => {
    for (const select of page.main.querySelectorAll('form select[name="vhost"]')) {
      const chosen = select.value;
      select.replaceChildren(...vhosts.map(({ name }) => h("option", { value: name, selected: name === chosen }, name)));
    }
  }, () => {});
  return field;
}

export function vhosts(page) {
  const list = listTable(page, {
    caption: "Virtual hosts",
    where: () => "vhosts",
    key: (row) => row.name,
    columns: [
      { label: "Name", sort: "name", cell: (row) => link(row.name, "vhosts", row.name) },
      { label: "Description", cell: (row) => row.description || "–" },
      { label: "Tags", cell: (row) => row.tags.join(", ") || "–" },
      { label: "Ready", sort: "messages_ready", number: true, cell: (row) => format.count(row.messages_ready) },
      { label: "Unacked", sort: "messages_unacknowledged", number: true, cell: (row) => format.count(row.messages_unacknowledged) },
    ],
  });
  const add = () => form([
    { name: "name", label: "Name", required: true },
    { name: "description", label: "Description" },
  ], {
    label: "Add virtual host",
    submit: async ({ name, description }) => {
      await put(path("vhosts", name), { description });
      notice(`Virtual host ${name} is added. Give its users permissions on its page.`);
      page.refresh();
    },
  });
  page.show("Virtual hosts", has("administrator") ? adder("Add a virtual host", add()) : null, section(null, list));
}

export function vhost(page, name) {
  const about = h("div", null, empty("…"));
  const limited = h("div", null, empty("…"));
  const again = page.live(async () => {
    const [found, limits] = await Promise.all([page.get(path("vhosts", name)), page.get(path("vhost-limits", name))]);
    update(about, facts([
      ["Description", found.description || "–"],
      ["Tags", found.tags.join(", ") || "–"],
      ["Default queue type", found.default_queue_type],
      ["Copies asked for", found.metadata.replicas ? format.count(found.metadata.replicas) : null],
      ["Nodes in sync for a confirm", found.metadata.min_in_sync ? format.count(found.metadata.min_in_sync) : null],
      ["Messages ready", format.count(found.messages_ready)],
      ["Messages unacknowledged", format.count(found.messages_unacknowledged)],
      ["Tracing", found.tracing ? "on" : "off"],
    ]));
    update(limited, limitTable(limits[0]?.value ?? {}, (limit) => path("vhost-limits", name, limit), again));
  });
  page.show(name, section(null, about),
    has("administrator") ? [
      permissionsOf(page, { vhost: name }, { name: "user", label: "User", required: true }),
      section("Limits", inner("Set a limit", limitForm(["max-connections", "max-queues"], (limit) => path("vhost-limits", name, limit), again)), limited),
      section("Delete it", dangerous("Delete", `Delete virtual host ${name} with everything in it: queues, messages, exchanges?`, async () => {
        if (await attempt(() => remove(path("vhosts", name)), `Virtual host ${name} is deleted.`)) page.leave("vhosts");
      })),
    ] : null);
}

export function limitTable(limits, where, again) {
  const clearButton = (name) => dangerous("Clear", `Clear ${name}? Then there is no such limit.`, async () => {
    if (await attempt(() => remove(where(name)), "The limit is cleared.")) again();
  });
  return plainTable("Limits", [
    { label: "Limit", cell: ([name]) => name },
    { label: "At most", number: true, cell: ([, value]) => format.count(value) },
    { label: "", cell: ([name]) => clearButton(name) },
  ], Object.entries(limits), ([name]) => name, "No limits.");
}

export function limitForm(names, where, again) {
  return form([
    { name: "name", label: "Limit", type: "select", options: names },
    { name: "value", label: "At most", type: "number", required: true },
  ], {
    label: "Set limit",
    done: "The limit is set.",
    submit: async ({ name, value }) => {
      await put(where(name), { value });
      again();
    },
  });
}
