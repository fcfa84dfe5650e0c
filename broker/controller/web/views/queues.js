// Queues: the list, and one with its messages, consumers and bindings.

import { path, post, put, remove } from "../api.js";
import { QUEUE_ARGUMENTS } from "../arguments.js";
import { fill, h, update } from "../dom.js";
import * as format from "../format.js";
import { OBJECT_KEPT_S, pastCharts } from "../history.js";
import { to } from "../router.js";
import { chosenVhost, listTable, vhostChoice } from "../table.js";
import { adder, attempt, badge, button, confirmed, dangerous, empty, entries, facts, figures, fold, foldOnDemand, form, formDialog, nodeColumn, nodeFact, notice, queueLink, section, state } from "../widgets.js";
import { bindingsOf } from "./bindings.js";
import { consumerTable } from "./consumers.js";
import { groupsOf } from "./groups.js";
import { getForm, publishForm } from "./messages.js";
import { unackedOf } from "./unacked.js";
import { vhostOptions } from "./vhosts.js";

const EVERY_MS = 2_000;
const CHARTS = [
  {
    title: "Messages a second",
    show: format.rate,
    lines: [
      { name: "in", colour: 0, of: "message_stats.publish", isRate: true },
      { name: "out", colour: 1, of: "message_stats.deliver_get", isRate: true },
      { name: "acknowledged", colour: 2, of: "message_stats.ack", isRate: true },
    ],
  },
  {
    title: "Messages",
    show: format.compact,
    lines: [{ name: "ready", colour: 0, of: "messages_ready" }, { name: "unacknowledged", colour: 4, of: "messages_unacknowledged" }],
  },
];

export function queues(page) {
  const list = listTable(page, {
    caption: "Queues",
    where: () => (chosenVhost() ? path("queues", chosenVhost()) : "queues"),
    nothing: "No queues yet.",
    choose: "queues",
    key: (row) => `${row.vhost}\n${row.name}`,
    tools: vhostChoice(page, () => page.refresh()),
    columns: [
      { label: "Name", sort: "name", cell: (row) => queueLink(row.vhost, row.name) },
      { label: "Virtual host", sort: "vhost", cell: (row) => row.vhost },
      { label: "Features", minor: true, cell: (row) => features(row, true) },
      { label: "State", minor: true, sort: "state", cell: (row) => state(row.state) },
      { label: "Ready", sort: "messages_ready", number: true, cell: (row) => format.count(row.messages_ready) },
      { label: "Unacked", sort: "messages_unacknowledged", number: true, cell: (row) => format.count(row.messages_unacknowledged) },
      { label: "Consumers", sort: "consumers", number: true, cell: (row) => format.count(row.consumers) },
      { label: "In", sort: "message_stats.publish_details.rate", number: true, cell: (row) => format.rate(row.message_stats?.publish_details?.rate) },
      { label: "Out", sort: "message_stats.deliver_get_details.rate", number: true, cell: (row) => format.rate(row.message_stats?.deliver_get_details?.rate) },
      ...nodeColumn({ sort: "node", minor: true }),
      { label: "Shard", sort: "shard", number: true, cell: (row) => h("a", { href: to("shards", row.shard) }, String(row.shard)) },
      { label: "Messages", sort: "messages", number: true, extra: true, cell: (row) => format.count(row.messages) },
      { label: "Bytes", sort: "message_bytes", number: true, extra: true, cell: (row) => format.bytes(row.message_bytes) },
      { label: "Bytes unacked", sort: "message_bytes_unacknowledged", number: true, extra: true, cell: (row) => format.bytes(row.message_bytes_unacknowledged) },
      { label: "Acks", sort: "message_stats.ack_details.rate", number: true, extra: true, cell: (row) => format.rate(row.message_stats?.ack_details?.rate) },
      { label: "Redelivered", sort: "message_stats.redeliver_details.rate", number: true, extra: true, cell: (row) => format.rate(row.message_stats?.redeliver_details?.rate) },
      { label: "Type", sort: "type", extra: true, cell: (row) => row.type },
      { label: "Policy", sort: "policy", extra: true, cell: (row) => row.policy || "–" },
    ],
  });
  page.show("Queues", adder("Add a queue", addForm(page)), section(null, list));
}

/** Badges for a queue. `briefly`: without those that most queues have. */
function features(row, briefly = false) {
  return [
    row.type === "classic" ? null : badge(row.type),
    row.durable ? (briefly ? null : badge("durable")) : badge("transient", "warn"),
    row.auto_delete ? badge("auto-delete") : null,
    row.exclusive ? badge("exclusive") : null,
    row.policy ? badge(`policy ${row.policy}`) : null,
    row.exchange === undefined ? null : badge(`shard queue ${row.index} of ${row.exchange}`),
  ];
}

function addForm(page) {
  const vhost = vhostOptions(page);
  return form([
    vhost,
    { name: "name", label: "Name", required: true },
    { name: "durability", label: "Durability", type: "select", options: [["durable", "durable: outlives a restart"], ["transient", "transient"]] },
    { name: "auto_delete", label: "Delete it when its last consumer leaves", type: "checkbox" },
    { name: "args", label: "Arguments", type: "arguments", hints: QUEUE_ARGUMENTS, help: "One in each line: name = value" },
  ], {
    label: "Add queue",
    submit: async (values) => {
      await put(path("queues", values.vhost, values.name), { durable: values.durability === "durable", auto_delete: values.auto_delete, arguments: values.args });
      notice(`Queue ${values.name} is added.`);
      page.refresh();
    },
  });
}

export function queue(page, vhost, name) {
  const where = path("queues", vhost, name);
  const numbers = h("div", null, empty("…"));
  const about = h("div", null, empty("…"));
  const consumers = h("div", null, empty("…"));
  const groups = h("div");
  const pausing = h("span");
  const purging = h("span");
  let tags = null; // of the consumers of a stream
  const again = page.live(async () => {
    const found = await page.get(where);
    update(numbers, numbersOf(found));
    update(about, aboutOf(found));
    update(consumers, consumerTable(found.consumer_details ?? []));
    update(pausing, pauseButton(where, found, again));
    if (found.type !== "stream") update(purging, purgeSomeButton(where, name, again));
    const isFirst = tags === null;
    tags = (found.consumer_details ?? []).map((one) => one.consumer_tag);
    if (isFirst && found.type === "stream") fill(groups, section("Groups", groupsOf(page, vhost, name, () => tags)));
  }, EVERY_MS);

  page.show(name,
    section(null, numbers), pastCharts(page, where, CHARTS, OBJECT_KEPT_S),
    section("About", about), section("Consumers", consumers), groups,
    foldOnDemand("Unacknowledged messages", () => h("div", null, unackedOf(page, vhost, name))),
    section("Bindings", bindingsOf(page, { vhost, kind: "queue", name }, false)),
    fold("Publish a message", publishForm(vhost, "", name, again)),
    fold("Get messages", ...getForm(vhost, name, again)),
    fold("Move messages", moveForm(where, again)),
    section("Empty, pause or delete it", h("div", { class: "actions" }, pausing, purging, purgeButton(where, name, again), deleteButton(page, where, name))));
}

function numbersOf(row) {
  return figures([
    ["Ready", format.count(row.messages_ready)],
    ["Unacknowledged", format.count(row.messages_unacknowledged)],
    ["Bytes", format.bytes(row.message_bytes)],
    ["Consumers", format.count(row.consumers)],
    ["Published", format.count(row.message_stats?.publish)],
    ["Delivered", format.count(row.message_stats?.deliver_get)],
  ]);
}

// In a cluster: how many nodes have all of the queue, are to have it, and were asked for.
function copies(row) {
  if (row.replicas === undefined) return null;
  const asked = row.replicas_wanted === row.replicas ? "" : `; ${format.count(row.replicas_wanted)} are asked for`;
  return `${format.count(row.members.length)} of ${format.count(row.replicas)} in sync${asked}`;
}

function aboutOf(row) {
  const stream = row.exchange === undefined ? null : h("a", { href: to("streams", row.vhost, row.exchange) }, `${row.exchange}, shard queue ${row.index}`);
  return facts([
    ["Virtual host", row.vhost],
    ["State", state(row.state)],
    ["Features", features(row)],
    ["Shard", h("a", { href: to("shards", row.shard) }, String(row.shard))],
    nodeFact(row),
    ["Copies", copies(row)],
    ["Stream exchange", stream],
    ["Arguments", entries(row.arguments)],
    ["Policy", row.policy || "none"],
    ["Operator policy", row.operator_policy || null],
    ["Settings from policies", entries(row.effective_policy_definition)],
    ["Exclusive to", row.owner_pid_details ? h("a", { href: to("connections", row.owner_pid_details.name) }, row.owner_pid_details.name) : null],
    ["Offsets", row.first_offset === undefined ? null : `${format.count(row.first_offset)} to ${row.last_offset === null ? "–" : format.count(row.last_offset)}`],
  ]);
}

function pauseButton(where, { state: now }, again) {
  const paused = now === "paused";
  const act = async () => {
    if (await attempt(() => put(`${where}/${paused ? "resume" : "pause"}`), paused ? "The queue delivers again." : "The queue delivers nothing now.")) again();
  };
  const made = button(paused ? "Resume" : "Pause deliveries", act);
  made.dataset.key = now; // another action, another button
  return made;
}

function purgeSomeButton(where, name, again) {
  const ask = () => formDialog(`Purge the next messages of ${name}`, [
    { name: "count", label: "How many", type: "number", value: 1, min: 1, required: true, help: "The ready messages that would be delivered next" },
  ], {
    label: "Purge them",
    submit: async ({ count }) => {
      const next = (number) => (number === 1 ? "the next message" : `the next ${format.count(number)} messages`);
      if (!(await confirmed(`Drop ${next(count)} of ${name}? They are gone for good.`, "Drop them"))) return;
      const purged = Number(await remove(`${where}/contents`, { query: { count }, timeoutMs: 60_000, header: "X-Messages-Purged" }));
      notice(purged ? `Purged ${next(purged)} of ${name}.` : `Purged nothing: ${name} has no ready messages.`);
      again();
    },
  });
  const made = button("Purge some", ask, "danger");
  made.dataset.key = "purge some";
  return made;
}

function purgeButton(where, name, again) {
  return dangerous("Purge all", `Drop all ready messages of ${name}? They are gone for good.`, async () => {
    if (await attempt(() => remove(`${where}/contents`), "The queue is empty.")) again();
  });
}

function deleteButton(page, where, name) {
  return dangerous("Delete", `Delete ${name} with all its messages?`, async () => {
    if (await attempt(() => remove(where), `Queue ${name} is deleted.`)) page.leave("queues");
  });
}

function moveForm(where, again) {
  return form([
    { name: "destination", label: "To queue", required: true, help: "In the same virtual host" },
    { name: "count", label: "At most", type: "number", min: 1, help: "If empty, all ready messages are moved, up to 10,000" },
  ], {
    label: "Move messages",
    submit: async ({ destination, count }) => {
      const { moved, left } = await post(`${where}/move`, count ? { destination, count } : { destination }, { timeoutMs: 60_000 });
      notice(`${format.count(moved)} moved, ${format.count(left)} left.`);
      again();
    },
  });
}
