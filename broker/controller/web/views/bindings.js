// Bindings of one queue or exchange: the list, adding one, removing one.

import { exchangePart, path, post, remove } from "../api.js";
import { h, update } from "../dom.js";
import { plainTable } from "../table.js";
import { attempt, dangerous, empty, entries, exchangeLink, form, inner, queueLink } from "../widgets.js";

const KINDS = { queue: "q", exchange: "e" };
const ROWS_MAX = 500; // shown at once

/** The bindings of `what`: {vhost, kind ("queue" or "exchange"), name}. `from`: bindings whose source it is. */
export function bindingsOf(page, what, from) {
  const list = h("div", null, empty("…"));
  const where = what.kind === "queue"
    ? `${path("queues", what.vhost, what.name)}/bindings`
    : `${path("exchanges", what.vhost, exchangePart(what.name))}/bindings/${from ? "source" : "destination"}`;
  const again = page.live(async () => {
    const found = await page.get(where, { page: 1, page_size: ROWS_MAX });
    const rows = found.items;
    update(list, table(rows, from, again), found.total_count > rows.length ? empty(`${found.total_count - rows.length} more are not shown.`) : null);
  }, 10_000);
  return h("div", null, inner("Add a binding", addForm(what, from, again)), list);
}

function table(rows, from, again) {
  const other = from
    ? { label: "To", cell: (row) => [row.destination_type === "queue" ? queueLink(row.vhost, row.destination) : exchangeLink(row.vhost, row.destination), h("small", { class: "under" }, row.destination_type)] }
    : { label: "From exchange", cell: (row) => exchangeLink(row.vhost, row.source) };
  return plainTable(from ? "Bindings from here" : "Bindings to here", [
    other,
    { label: "Routing key", cell: (row) => h("code", null, row.routing_key) },
    { label: "Arguments", cell: (row) => entries(row.arguments) },
    { label: "", cell: (row) => (row.source === "" ? null : unbindButton(row, again)) },
  ], rows, (row) => [row.source, row.destination_type, row.destination, row.properties_key].join("\n"), "No bindings.");
}

function unbindButton(row, again) {
  const where = path("bindings", row.vhost, "e", exchangePart(row.source), KINDS[row.destination_type], exchangePart(row.destination), row.properties_key);
  const question = `Unbind ${row.destination} from ${row.source}? Messages that go by the routing key "${row.routing_key}" no longer arrive there.`;
  return dangerous("Unbind", question, async () => {
    if (await attempt(() => remove(where), "Unbound.")) again();
  });
}

function addForm(what, from, again) {
  const other = from ? { name: "other", label: "To", required: true } : { name: "other", label: "From exchange", required: true };
  const kind = { name: "kind", label: "Kind", type: "select", options: ["queue", "exchange"] };
  return form([
    other,
    ...(from ? [kind] : []),
    { name: "routing_key", label: "Routing key" },
    { name: "args", label: "Arguments", type: "arguments", help: "One argument in each line: name = value" },
  ], {
    label: "Bind",
    done: "Bound.",
    submit: async ({ other: name, kind: chosen, routing_key, args }) => {
      const [source, to, toKind] = from ? [what.name, name, chosen] : [name, what.name, what.kind];
      await post(path("bindings", what.vhost, "e", exchangePart(source), KINDS[toKind], exchangePart(to)), { routing_key, arguments: args });
      again();
    },
  });
}
