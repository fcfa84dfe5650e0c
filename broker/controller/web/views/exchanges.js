// Exchanges: the list, and one with its bindings, its ring, and a form that says where a message would go.

import { exchangePart, path, post, put, remove } from "../api.js";
import { EXCHANGE_ARGUMENTS } from "../arguments.js";
import { fill, h, update } from "../dom.js";
import * as format from "../format.js";
import { OBJECT_KEPT_S, pastCharts } from "../history.js";
import { to } from "../router.js";
import { chosenVhost, listTable, vhostChoice } from "../table.js";
import { adder, attempt, badge, dangerous, empty, entries, exchangeLink, facts, fold, form, notice, queueLink, section } from "../widgets.js";
import { bindingsOf } from "./bindings.js";
import { publishForm } from "./messages.js";
import { ringOf, spreads } from "./streams.js";
import { vhostOptions } from "./vhosts.js";

export function exchanges(page) {
  const list = listTable(page, {
    caption: "Exchanges",
    where: () => (chosenVhost() ? path("exchanges", chosenVhost()) : "exchanges"),
    choose: "exchanges",
    key: (row) => `${row.vhost}\n${row.name}`,
    tools: vhostChoice(page, () => page.refresh()),
    columns: [
      { label: "Name", sort: "name", cell: (row) => exchangeLink(row.vhost, row.name) },
      { label: "Virtual host", sort: "vhost", cell: (row) => row.vhost },
      { label: "Type", sort: "type", cell: (row) => badge(row.type) },
      { label: "Features", cell: features },
      { label: "In", sort: "message_stats.publish_in_details.rate", number: true, cell: (row) => format.rate(row.message_stats?.publish_in_details?.rate) },
      { label: "Out", sort: "message_stats.publish_out_details.rate", number: true, cell: (row) => format.rate(row.message_stats?.publish_out_details?.rate) },
      { label: "Messages in", sort: "message_stats.publish_in", number: true, extra: true, cell: (row) => format.count(row.message_stats?.publish_in) },
      { label: "Messages out", sort: "message_stats.publish_out", number: true, extra: true, cell: (row) => format.count(row.message_stats?.publish_out) },
      { label: "Policy", sort: "policy", extra: true, cell: (row) => row.policy || "–" },
    ],
  });
  page.show("Exchanges", adder("Add an exchange", addForm(page)), section(null, list));
}

function features(row) {
  return [
    row.durable ? badge("durable") : badge("transient", "warn"),
    row.auto_delete ? badge("auto-delete") : null,
    row.internal ? badge("internal") : null,
    row.policy ? badge(`policy ${row.policy}`) : null,
    row.shard_queues ? h("a", { href: to("streams", row.vhost, row.name) }, badge(`${row.shard_queues.length} shard queues`, "good")) : null,
  ];
}

function addForm(page) {
  const type = { name: "type", label: "Type", type: "select", options: ["direct", "fanout", "topic", "headers", "x-consistent-hash", "x-modulus-hash", "x-random", "x-delayed-message", "x-recent-history"] };
  return form([
    vhostOptions(page),
    { name: "name", label: "Name", required: true },
    type,
    { name: "durable", label: "Durable: outlives a restart", type: "checkbox", value: true },
    { name: "auto_delete", label: "Delete it when nothing is bound to it any more", type: "checkbox" },
    { name: "internal", label: "Internal: clients may not publish to it", type: "checkbox" },
    { name: "args", label: "Arguments", type: "arguments", hints: EXCHANGE_ARGUMENTS, help: "One in each line: name = value" },
  ], {
    label: "Add exchange",
    submit: async ({ vhost, name, args, ...body }) => {
      await put(path("exchanges", vhost, name), { ...body, arguments: args });
      notice(`Exchange ${name} is added.`);
      page.refresh();
    },
  });
}

const CHARTS = [{
  title: "Messages a second",
  show: format.rate,
  lines: [{ name: "in", colour: 0, of: "message_stats.publish_in", isRate: true }, { name: "to queues", colour: 1, of: "message_stats.publish_out", isRate: true }],
}];

export function exchange(page, vhost, name) {
  const where = path("exchanges", vhost, exchangePart(name));
  const about = h("div", null, empty("…"));
  const circle = h("div");
  const rows = [pastCharts(page, where, CHARTS, OBJECT_KEPT_S), section(null, about), circle];
  if (name !== "") {
    rows.push(section("Bindings from here", bindingsOf(page, { vhost, kind: "exchange", name }, true)));
    rows.push(section("Bindings to here", bindingsOf(page, { vhost, kind: "exchange", name }, false)));
  } else {
    rows.push(section("Bindings", empty("Every queue is bound to the default exchange by its own name.")));
  }
  rows.push(fold("Publish a message", publishForm(vhost, name, null, () => {})), fold("Where would a message go?", ...explainForm(vhost, where)));
  if (name !== "" && !name.startsWith("amq.")) rows.push(section("Delete it", deleteButton(page, where, name)));
  page.show(name === "" ? "(default exchange)" : name, rows);
  let spread = false;
  page.live(async () => {
    const found = await page.get(where);
    update(about, facts([
      ["Virtual host", found.vhost],
      ["Type", badge(found.type)],
      ["Features", features(found)],
      ["Arguments", entries(found.arguments)],
      ["Policy", found.policy || "none"],
      ["Messages delayed", found.messages_delayed === undefined ? null : format.count(found.messages_delayed)],
    ]));
    if (!spread && spreads(found)) {
      spread = true;
      fill(circle, section("Share of the keys", ringOf(page, vhost, name)));
    }
  });
}

function deleteButton(page, where, name) {
  return dangerous("Delete", `Delete exchange ${name} and its bindings?`, async () => {
    if (await attempt(() => remove(where), `Exchange ${name} is deleted.`)) page.leave("exchanges");
  });
}

function explainForm(vhost, where) {
  const shown = h("div", { role: "status" });
  const asks = form([
    { name: "routing_key", label: "Routing key" },
    { name: "headers", label: "Headers", type: "arguments", help: "One in each line: name = value" },
  ], {
    label: "Explain",
    stays: true,
    submit: async ({ routing_key, headers }) => {
      const found = await post(`${where}/route`, { routing_key, headers });
      fill(shown, found.queues.length ? h("p", null, "To ", found.queues.map((one, i) => [i ? ", " : "", queueLink(vhost, one.name)])) : h("p", null, "It would go to no queue."),
        h("ol", { class: "hops" }, found.hops.map((hop) => h("li", null, hopText(vhost, hop)))));
    },
  });
  return [asks, shown];
}

function hopText(vhost, hop) {
  const hash = hop.hash ? ` by ${hop.hash.algorithm} of the ${hop.hash.of} "${hop.hash.hashed}" = ${hop.hash.value} among ${hop.hash.destinations}` : "";
  const chance = hop.by_chance ? " by chance" : "";
  return [exchangeLink(vhost, hop.exchange), ` (${hop.type})${hop.alternate ? ", an alternate exchange" : ""}${hash}${chance} to `,
    hop.destinations.length ? hop.destinations.map((one, i) => [i ? ", " : "", one.kind === "queue" ? queueLink(vhost, one.name) : exchangeLink(vhost, one.name)]) : "nothing"];
}
