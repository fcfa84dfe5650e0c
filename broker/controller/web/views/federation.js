// Links of federation: their states, how they are started anew, and the form that adds an upstream.

import { has, path, put, remove } from "../api.js";
import { h } from "../dom.js";
import * as format from "../format.js";
import { chosenVhost, listTable, vhostChoice } from "../table.js";
import { adder, attempt, button, form, notice, section, state } from "../widgets.js";
import { vhostOptions } from "./vhosts.js";

export function federation(page) {
  const changes = has("policymaker");
  const list = listTable(page, {
    caption: "Links of federation",
    where: () => (chosenVhost() ? path("federation-links", chosenVhost()) : "federation-links"),
    nothing: "There is no link. A policy with the key federation-upstream, federation-upstream-set or federation-upstream-pattern makes one for each upstream and each queue or exchange.",
    choose: "federation",
    tools: vhostChoice(page, () => page.refresh()),
    key: (row) => `${row.vhost}\n${row.id}`,
    columns: [
      { label: "Queue or exchange", cell: (row) => [named(row), h("small", { class: "under" }, row.type)] },
      { label: "Virtual host", sort: "vhost", minor: true, cell: (row) => row.vhost },
      { label: "State", sort: "status", cell: (row) => [state(row.status), reason(row)] },
      { label: "Upstream", sort: "upstream", cell: (row) => [row.upstream, h("small", { class: "under" }, `${row.upstream_queue ?? row.upstream_exchange} at ${row.uri}`)] },
      { label: "Takes messages", sort: "is_pulling", minor: true, cell: (row) => (row.is_pulling ? "yes" : "no") },
      { label: "Moved", sort: "message_count", number: true, cell: (row) => format.count(row.message_count) },
      { label: "Pending", sort: "pending", number: true, minor: true, cell: (row) => format.count(row.pending) },
      { label: "Policy", sort: "policy", extra: true, cell: (row) => row.policy },
      { label: "Bytes moved", sort: "message_bytes", number: true, extra: true, cell: (row) => format.bytes(row.message_bytes) },
      { label: "Dropped", sort: "dropped", number: true, extra: true, cell: (row) => format.count(row.dropped) },
      { label: "Refused", sort: "refused", number: true, extra: true, cell: (row) => format.count(row.refused) },
      { label: "Failed tries", sort: "failures", number: true, extra: true, cell: (row) => format.count(row.failures) },
      { label: "Since", sort: "timestamp", extra: true, cell: (row) => row.timestamp || "–" },
      ...(changes ? [{ label: "", cell: (row) => h("div", { class: "actions" }, restart(page, row)) }] : []),
    ],
  });
  page.show("Federation",
    h("p", { class: "lead" }, "A federated queue takes messages from queues of upstream brokers while it is empty and has consumers. A federated exchange gets the messages of upstream exchanges that its bindings want. Upstreams are parameters, and a policy says what is federated."),
    changes ? adder("Add an upstream", addForm(page)) : null,
    section(null, list));
}

/** What is federated. */
function named({ queue, exchange }) {
  return queue ?? exchange;
}

/** Why a link does not move messages, and when it tries again. */
function reason({ error, blocked, retry_in_s: wait }) {
  const text = error || (blocked ? `This broker takes no messages: ${blocked}` : "");
  return text ? h("small", { class: "under" }, wait ? `${text}; next try after ${format.duration(wait)}` : text) : null;
}

function restart(page, row) {
  return button("Restart", async () => {
    const where = path("federation-links", "vhost", row.vhost, row.id, row.node, "restart");
    if (await attempt(() => remove(where), `The link of ${named(row)} is started anew.`)) page.refresh();
  }, "", `Restart ${named(row)} from ${row.upstream}`);
}

function addForm(page) {
  return form([
    vhostOptions(page),
    { name: "name", label: "Name", required: true },
    { name: "uri", label: "URI", value: "amqp://", required: true, help: "amqp://user:password@host:5672/vhost, or amqp:///NAME for another virtual host of this broker" },
    { name: "ack-mode", label: "A message leaves the upstream", type: "select", options: [["on-confirm", "When this broker has it (on-confirm)"], ["on-publish", "When it is sent (on-publish)"], ["no-ack", "When it is taken (no-ack)"]] },
    { name: "more", label: "More", type: "arguments", hints: ["prefetch-count", "reconnect-delay", "queue", "exchange", "max-hops"], help: "One setting in each line: name = value" },
  ], {
    label: "Add upstream",
    submit: async ({ vhost, name, more, ...fields }) => {
      await put(path("parameters", "federation-upstream", vhost, name), { value: { ...fields, ...more } });
      notice(`${name} is added.`);
      page.refresh();
    },
  });
}
