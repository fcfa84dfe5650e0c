// Groups of a stream: the position of each name under which it is read, the lag of each shard queue, and other positions.

import { get, path, put, remove } from "../api.js";
import { h, update } from "../dom.js";
import * as format from "../format.js";
import { plainTable } from "../table.js";
import { attempt, badge, button, dangerous, empty, formDialog } from "../widgets.js";

const SHOWN_MAX = 50; // the groups with the most messages left
const ALL = "all";
const PLACES = [
  ["first", "the first message that is kept"],
  ["last", "the last message"],
  ["next", "the next message that arrives"],
  ["time", "a time"],
  ["number", "an offset"],
];

/** The groups of a stream, or of a stream exchange whose shard queues are streams. `members()`: the group of each consumer. */
export function groupsOf(page, vhost, name, members) {
  const stream = path("streams", vhost, name);
  const place = h("div", null, empty("…"));
  const again = page.live(async () => {
    const found = await page.get(`${stream}/groups`);
    const shown = found.sort((a, b) => b.lag - a.lag).slice(0, SHOWN_MAX);
    const left = found.length - shown.length;
    update(place, shown.length ? shown.map((group) => block(stream, group, members(), again)) : empty("Nobody has read it under a name yet."),
      left ? empty(`${format.count(left)} more groups, with fewer messages left, are not shown.`) : null);
  });
  return [h("p", { class: "lead" }, "A group is a name under which the stream is read. The broker keeps the offset of the next message for each group and shard queue. The lag is the number of messages that are left to read."), place];
}

function block(stream, group, members, again) {
  const count = members.filter((one) => one === group.name).length;
  const where = `${stream}/groups/${path(group.name)}`;
  return h("section", { class: "readers", data: { key: group.name } },
    h("header", null, h("h3", null, group.name), badge(count === 1 ? "1 consumer" : `${count} consumers`, count ? "good" : ""), h("span", null, `Lag ${format.count(group.lag)}`),
      h("div", { class: "actions", data: { key: group.shards.map(({ shard }) => shard).join() } },
        button("Set offset", () => ask(stream, where, group, again), "", `Set offset of ${group.name}`),
        dangerous("Forget", `Forget the offsets of ${group.name}? Its next consumer begins where that consumer says.`, async () => {
          if (await attempt(() => remove(where), `${group.name} has no offset any more.`)) again();
        }, `Forget ${group.name}`))),
    plainTable(`Shard queues of ${group.name}`, [
      { label: "Shard queue", cell: (row) => String(row.shard) },
      { label: "Next offset", number: true, cell: (row) => format.count(row.next) },
      { label: "Lag", number: true, cell: (row) => format.count(row.lag) },
    ], group.shards, (row) => String(row.shard)));
}

function ask(stream, where, group, again) {
  formDialog(`Set the offset of ${group.name}`, [
    { name: "place", label: "Read on at", type: "select", options: PLACES },
    { name: "time", label: "Messages since", type: "datetime-local", required: true, when: ["place", "time"] },
    { name: "number", label: "Offset", type: "number", min: 0, required: true, when: ["place", "number"] },
    { name: "part", label: "In", type: "select", options: [[ALL, "all shard queues"], ...group.shards.map(({ shard }) => [String(shard), `shard queue ${shard}`])] },
  ], {
    label: "Set offset",
    done: `${group.name} reads on there.`,
    submit: async ({ part, ...values }) => {
      const offsets = await offsetsOf(stream, values);
      const chosen = Object.entries(offsets).filter(([shard]) => part === ALL || shard === part);
      await put(where, { shards: Object.fromEntries(chosen.map(([shard, next]) => [shard, { next }])) });
      again();
    },
  });
}

/** Return the offset of a place in each shard queue. */
async function offsetsOf(stream, { place, time, number }) {
  if (place === "time") return (await get(`${stream}/offset-for-time`, { query: { timestamp: new Date(time).getTime() } })).shards;
  const { shards } = await get(stream);
  return Object.fromEntries(shards.map(({ shard, first, next }) => {
    if (next === null) throw new Error(`Shard queue ${shard} does not answer at the moment.`);
    return [String(shard), { first, last: Math.max(first, next - 1), next, number }[place]];
  }));
}
