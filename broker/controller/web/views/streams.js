// Stream exchanges: the ring that spreads their messages, the shards of their queues, and the owners of these.

import { exchangePart, has, path, put, remove } from "../api.js";
import { COLOURS, ring } from "../charts.js";
import { fill, h, update } from "../dom.js";
import * as format from "../format.js";
import { to } from "../router.js";
import { chosenVhost, listTable, plainTable, vhostChoice } from "../table.js";
import { adder, attempt, badge, dangerous, empty, exchangeLink, form, notice, queueLink, section } from "../widgets.js";
import { groupsOf } from "./groups.js";
import { reshardingOf } from "./resharding.js";
import { skewOf } from "./skew.js";
import { vhostOptions } from "./vhosts.js";

const HASHED = new Set(["x-consistent-hash", "x-modulus-hash"]);

export function spreads(exchange) {
  return HASHED.has(exchange.type) || Boolean(exchange.shard_queues);
}

export function streams(page) {
  const list = listTable(page, {
    caption: "Stream exchanges",
    where: () => (chosenVhost() ? path("virtual-queues", chosenVhost()) : "virtual-queues"),
    nothing: "No exchange is spread over shards yet.",
    key: (row) => `${row.vhost}\n${row.name}`,
    tools: vhostChoice(page, () => page.refresh()),
    columns: [
      { label: "Name", sort: "name", cell: (row) => h("a", { href: to("streams", row.vhost, row.name) }, row.name) },
      { label: "Virtual host", sort: "vhost", cell: (row) => row.vhost },
      { label: "Shard queues", sort: "shards", number: true, cell: (row) => format.count(row.shards) },
      { label: "Consumers", sort: "consumers", number: true, cell: (row) => format.count(row.consumers) },
      { label: "Groups", cell: (row) => row.groups.map((name) => badge(name || "(default)")) },
      { label: "Changing owner", sort: "moving", number: true, cell: (row) => format.count(row.moving) },
    ],
  });
  page.show("Stream exchanges",
    h("p", { class: "lead" }, "A stream exchange spreads its messages over several queues, its shard queues, so that all cores share the work. The routing key decides which shard queue a message goes to. Consumers use the name of the exchange like that of one queue: the broker gives each shard queue to one of them."),
    has("policymaker") ? adder("Add a stream exchange", addForm(page)) : null, section(null, list));
}

function addForm(page) {
  return form([
    vhostOptions(page),
    { name: "name", label: "Exchange", required: true, help: "It is made if there is none of this name" },
    { name: "parts", label: "Number of shard queues", type: "number", value: 4, min: 1, required: true },
  ], {
    label: "Add stream exchange",
    submit: async ({ vhost, name, parts }) => {
      const pattern = `^${name.replace(/[.*+?^${}()|[\]\\]/g, "\\$&")}$`;
      await put(path("policies", vhost, `spread-${name}`), { pattern, definition: { "shards-per-node": parts }, "apply-to": "exchanges" });
      await put(path("exchanges", vhost, name), { type: "x-consistent-hash" }).catch((error) => {
        if (error.status !== 400) throw error; // it is there, with another type
      });
      notice(`${name} has ${parts} shard queues, by the policy spread-${name}.`);
      page.refresh();
    },
  });
}

export function stream(page, vhost, name) {
  const where = path("virtual-queues", vhost, name);
  const owners = h("div", null, empty("…"));
  const parts = h("div", null, empty("…"));
  const skew = h("div", null, empty("…"));
  const groups = h("div");
  let members = null; // the group of each consumer
  let ring = [];
  const again = page.live(async () => {
    const [found, rows] = await Promise.all([page.get(where), partRows(page, vhost, name)]);
    update(owners, ownership(found));
    update(parts, partTable(vhost, found, rows));
    update(skew, skewOf(vhost, found.shards, rows, ring));
    const isFirst = members === null;
    members = found.consumers.map((one) => one.group);
    const isStream = [...rows.values()].some((row) => row.type === "stream");
    if (isFirst && isStream) fill(groups, section("Groups", groupsOf(page, vhost, name, () => members)));
  });
  page.show(name, h("p", { class: "lead" }, "Exchange ", exchangeLink(vhost, name), ` in virtual host ${vhost}`),
    section("Share of the keys", ringOf(page, vhost, name, (destinations) => (ring = destinations))), section("Number of shard queues", reshardingOf(page, vhost, name, has("policymaker"))),
    section("Who consumes which shard queue", owners), groups, section("Shard queues", parts), section("How evenly the shard queues are filled", skew),
    section("Empty it", dangerous("Purge all shard queues", `Drop all ready messages in all shard queues of ${name}? They are gone for good.`, async () => {
      if (await attempt(() => remove(`${where}/contents`), "All shard queues are empty.")) again();
    })));
}

/** Return the rows of the shard queues that the user may see, by name. */
async function partRows(page, vhost, name) {
  const found = await page.get(path("queues", vhost), { page: 1, page_size: 500, name });
  return new Map(found.items.filter((row) => row.exchange === name).map((row) => [row.name, row]));
}

function partTable(vhost, found, rows) {
  return plainTable("Shard queues", [
    { label: "Shard queue", cell: (part) => [h("i", { class: `swatch c${part.index % COLOURS}` }), queueLink(vhost, part.queue)] },
    { label: "Shard", number: true, cell: (part) => h("a", { href: to("shards", part.shard) }, String(part.shard)) },
    { label: "Ready", number: true, cell: (part) => format.count(rows.get(part.queue)?.messages_ready) },
    { label: "Unacked", number: true, cell: (part) => format.count(rows.get(part.queue)?.messages_unacknowledged) },
    { label: "In", number: true, cell: (part) => format.rate(rows.get(part.queue)?.message_stats?.publish_details?.rate) },
    { label: "Owner", cell: (part) => part.owner || "–" },
    { label: "State", cell: (part) => part.state || "–" },
  ], found.shards, (part) => part.queue);
}

/** Consumers by shard queues: a filled cell is owned, a striped one is about to move. */
function ownership(found) {
  const consumers = [...new Map(found.shards.flatMap((part) => part.owners).concat(found.consumers).map((one) => [consumerKey(one), one])).entries()];
  if (!consumers.length) return empty("No consumer uses the name of the exchange.");
  const cell = (key) => (part) => {
    const owner = part.owners.find((one) => consumerKey(one) === key);
    const text = owner ? (owner.moving ? "moving" : "owns") : "";
    return h("td", { class: owner ? `owned c${part.index % COLOURS} ${owner.moving ? "moving" : ""}` : null }, h("span", { class: "hidden" }, text));
  };
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Who consumes which shard queue" },
    h("table", { class: "matrix" }, h("caption", { class: "hidden" }, "Who consumes which shard queue"),
      h("thead", null, h("tr", null, h("th", { scope: "col" }, "Consumer"), h("th", { scope: "col" }, "Group"), found.shards.map((part) => h("th", { scope: "col", title: part.queue }, String(part.index))))),
      h("tbody", null, consumers.map(([key, one]) => h("tr", { data: { key } },
        h("th", { scope: "row" }, one.consumer_tag, h("small", { class: "under" }, one.channel_details?.name ?? "")),
        h("td", null, badge(one.group || "(default)")), found.shards.map(cell(key)))))));
}

function consumerKey(one) {
  return `${one.group}\n${one.channel_details?.name ?? ""}\n${one.channel_details?.number}\n${one.consumer_tag}`;
}

/** The ring of an exchange that hashes: the share of the keys of each queue, which `tell` gets, too. */
export function ringOf(page, vhost, name, tell = () => {}) {
  const place = h("div", { class: "ringbox" }, empty("…"));
  page.live(async () => {
    const { destinations } = await page.get(`${path("exchanges", vhost, exchangePart(name))}/ring`);
    tell(destinations);
    if (!destinations.length) return update(place, empty("Nothing is bound to it."));
    const colour = (one, i) => (one.index ?? i) % COLOURS;
    const arcs = destinations.map((one, i) => ({ name: one.name, share: one.share, colour: colour(one, i) }));
    // An exchange with bindings of users has other queues and exchanges there, too.
    const noun = destinations.every(({ index }) => index !== undefined) ? "shard queue" : "destination";
    update(place, ring(`Shares of ${name}`, arcs, [String(destinations.length), destinations.length === 1 ? noun : `${noun}s`]),
      h("ul", { class: "shares" }, destinations.map((one, i) => h("li", { data: { key: one.name } },
        h("i", { class: `swatch c${colour(one, i)}` }),
        one.kind === "queue" ? queueLink(vhost, one.name) : exchangeLink(vhost, one.name),
        h("span", { class: "faint" }, one.shard === undefined ? "" : `shard ${one.shard}`), h("output", null, format.percent(one.share))))));
  }, 10_000);
  return place;
}
