// Consumers: the list of all, and the table of those of one queue or channel.

import { path } from "../api.js";
import * as format from "../format.js";
import { chosenVhost, listTable, plainTable, vhostChoice } from "../table.js";
import { badge, link, queueLink, section } from "../widgets.js";

const yesNo = (value) => (value ? "yes" : "no");

const COLUMNS = [
  { label: "Consumer tag", sort: "consumer_tag", cell: (row) => row.consumer_tag },
  { label: "Queue", name: true, sort: "queue.name", cell: (row) => queueLink(row.queue.vhost, row.queue.name) },
  { label: "Channel", name: true, sort: "channel_details.name", cell: (row) => (row.channel_details?.name ? link(row.channel_details.name, "channels", row.channel_details.name) : "–") },
  { label: "Acknowledges", sort: "ack_required", minor: true, cell: (row) => yesNo(row.ack_required) },
  { label: "Prefetch", sort: "prefetch_count", number: true, cell: (row) => format.count(row.prefetch_count) },
  { label: "Priority", sort: "priority", number: true, minor: true, cell: (row) => format.count(row.priority) },
  { label: "Exclusive", sort: "exclusive", minor: true, cell: (row) => yesNo(row.exclusive) },
  { label: "State", sort: "activity_status", cell: (row) => (row.activity_status ? badge(row.activity_status, row.active ? "good" : "warn") : "–") },
];

const LISTED = [
  ...COLUMNS.slice(0, 2),
  { label: "Virtual host", sort: "queue.vhost", extra: true, cell: (row) => row.queue.vhost },
  COLUMNS[2],
  { label: "User", sort: "channel_details.user", extra: true, cell: (row) => row.channel_details?.user ?? "–" },
  ...COLUMNS.slice(3, 5),
  ...COLUMNS.slice(5, 7).map((column) => ({ ...column, extra: true })),
  { label: "Stream offset", sort: "offset", number: true, extra: true, cell: (row) => format.count(row.offset) },
  { label: "Stream lag", sort: "offset_lag", number: true, extra: true, cell: (row) => format.count(row.offset_lag) },
  COLUMNS[7],
];

const keyOf = (row) => `${row.queue.vhost}\n${row.queue.name}\n${row.channel_details?.name}\n${row.consumer_tag}`;

export function consumers(page) {
  page.show("Consumers", section(null, listTable(page, {
    caption: "Consumers",
    where: () => (chosenVhost() ? path("consumers", chosenVhost()) : "consumers"),
    nothing: "Nobody consumes.",
    search: "tag, queue or channel",
    choose: "consumers",
    key: keyOf,
    tools: vhostChoice(page, () => page.refresh()),
    columns: LISTED,
  })));
}

export function consumerTable(rows) {
  return plainTable("Consumers", COLUMNS, rows, keyOf, "Nobody consumes.");
}
