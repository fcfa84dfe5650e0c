// Shovels: their states, how they are paused, started anew and deleted, and the form that adds one.

import { has, path, put, remove } from "../api.js";
import { h } from "../dom.js";
import * as format from "../format.js";
import { chosenVhost, listTable, vhostChoice } from "../table.js";
import { adder, attempt, button, dangerous, form, notice, section, state } from "../widgets.js";
import { vhostOptions } from "./vhosts.js";

const PAUSED = "paused";

export function shovels(page) {
  const changes = has("policymaker");
  const list = listTable(page, {
    caption: "Shovels",
    where: () => (chosenVhost() ? path("shovels", chosenVhost()) : "shovels"),
    nothing: "There is no shovel.",
    choose: "shovels",
    tools: vhostChoice(page, () => page.refresh()),
    key: (row) => `${row.vhost}\n${row.name}\n${row.state === PAUSED}`,
    columns: [
      { label: "Name", sort: "name", cell: (row) => row.name },
      { label: "Virtual host", sort: "vhost", minor: true, cell: (row) => row.vhost },
      { label: "State", sort: "state", cell: (row) => [state(row.state), reason(row)] },
      { label: "From", cell: (row) => end(row.src_queue || row.src_exchange, row.src_exchange_key, row.src_uri) },
      { label: "To", cell: (row) => end(row.dest_queue || row.dest_exchange || row.dest_address, row.dest_exchange_key, row.dest_uri) },
      { label: "Moved", sort: "message_count", number: true, cell: (row) => format.count(row.message_count) },
      { label: "Pending", sort: "pending", number: true, minor: true, cell: (row) => format.count(row.pending) },
      { label: "Bytes moved", sort: "message_bytes", number: true, extra: true, cell: (row) => format.bytes(row.message_bytes) },
      { label: "Refused", sort: "refused", number: true, extra: true, cell: (row) => format.count(row.refused) },
      { label: "Failed tries", sort: "failures", number: true, extra: true, cell: (row) => format.count(row.failures) },
      { label: "Since", sort: "timestamp", extra: true, cell: (row) => row.timestamp || "–" },
      ...(changes ? [{ label: "", cell: (row) => h("div", { class: "actions" }, actions(page, row)) }] : []),
    ],
  });
  page.show("Shovels",
    h("p", { class: "lead" }, "A shovel takes messages from a queue or an exchange and publishes them at another broker, at this one, or at an HTTP server."),
    changes ? adder("Add a shovel", addForm(page)) : null,
    section(null, list));
}

/** Why a shovel does not move messages, and when it tries again. */
function reason({ error, blocked, retry_in_s: wait }) {
  const text = error || (blocked ? `The destination takes no messages: ${blocked}` : "");
  return text ? h("small", { class: "under" }, wait ? `${text}; next try after ${format.duration(wait)}` : text) : null;
}

function end(name, key, uri) {
  return [name || "as each message says", key ? ` with key ${key}` : "", uri ? h("small", { class: "under" }, uri) : null];
}

function actions(page, row) {
  const where = [row.vhost, row.name];
  const act = (text, does, done) => button(text, async () => {
    if (await attempt(does, done)) page.refresh();
  }, "", `${text} ${row.name}`);
  return [
    row.state === PAUSED
      ? act("Resume", () => put(path("shovels", ...where, "resume"), {}), `${row.name} goes on.`)
      : act("Pause", () => put(path("shovels", ...where, "pause"), {}), `${row.name} is paused.`),
    act("Restart", () => remove(path("shovels", "vhost", ...where, "restart")), `${row.name} is started anew.`),
    dangerous("Delete", `Delete the shovel ${row.name}? Messages that it has not moved stay where they are.`, async () => {
      if (await attempt(() => remove(path("shovels", "vhost", ...where)), `${row.name} is deleted.`)) page.refresh();
    }, `Delete ${row.name}`),
  ];
}

// The keys of the parameter that each kind of end has.
const FROM = { queue: ["src-queue"], exchange: ["src-exchange", "src-exchange-key"] };
const TO = { queue: ["dest-queue"], exchange: ["dest-exchange", "dest-exchange-key"], same: [], http: ["dest-address"] };

function addForm(page) {
  return form([
    vhostOptions(page),
    { name: "name", label: "Name", required: true },
    { name: "src-uri", label: "From URI", value: "amqp://", required: true, help: "amqp:// is this broker, amqp:///NAME another virtual host of it; others are amqp://user:password@host:5672/vhost" },
    { name: "from", label: "Source", type: "select", options: [["queue", "A queue"], ["exchange", "An exchange"]] },
    { name: "src-queue", label: "Source queue", required: true, when: ["from", "queue"], help: "It is made if there is none of this name" },
    { name: "src-exchange", label: "Source exchange", required: true, when: ["from", "exchange"] },
    { name: "src-exchange-key", label: "Binding key", when: ["from", "exchange"] },
    { name: "dest-uri", label: "To URI", value: "amqp://", required: true, help: "Or http://host/path: each message is posted there" },
    { name: "to", label: "Destination", type: "select", options: [["queue", "A queue"], ["exchange", "An exchange"], ["same", "The exchange and key of each message"], ["http", "An HTTP server"]] },
    { name: "dest-queue", label: "Destination queue", required: true, when: ["to", "queue"], help: "It is made if there is none of this name" },
    { name: "dest-exchange", label: "Destination exchange", when: ["to", "exchange"] },
    { name: "dest-exchange-key", label: "Routing key", when: ["to", "exchange"], help: "Empty: the key of each message" },
    { name: "dest-address", label: "Path behind the URI", when: ["to", "http"] },
    { name: "ack-mode", label: "A message leaves the source", type: "select", options: [["on-confirm", "When the destination has it (on-confirm)"], ["on-publish", "When it is sent (on-publish)"], ["no-ack", "When it is taken (no-ack)"]] },
    { name: "after", label: "The shovel ends", type: "select", options: [["never", "Never"], ["queue-length", "After the messages that are there now"], ["number", "After a number of messages"]] },
    { name: "number", label: "Number of messages", type: "number", min: 0, required: true, when: ["after", "number"] },
    { name: "more", label: "More", type: "arguments", hints: ["src-prefetch-count", "reconnect-delay", "dest-add-forward-headers"], help: "One setting in each line: name = value" },
  ], {
    label: "Add shovel",
    submit: async ({ vhost, name, from, to, after, number, more, ...fields }) => {
      const keys = ["src-uri", ...FROM[from], "dest-uri", ...TO[to], "ack-mode"];
      const given = keys.map((key) => [key, fields[key]]).filter(([, value]) => value !== "");
      const value = { ...Object.fromEntries(given), "src-delete-after": after === "number" ? number : after, ...more };
      await put(path("parameters", "shovel", vhost, name), { value });
      notice(`${name} is added.`);
      page.refresh();
    },
  });
}
