// Messages of a queue that were delivered and are not acknowledged: who holds them, and for how long.

import { path } from "../api.js";
import { h, update } from "../dom.js";
import * as format from "../format.js";
import { listTable, plainTable } from "../table.js";
import { empty, link } from "../widgets.js";

const HOLDERS_MAX = 100; // shown at once

const COLUMNS = [
  { label: "Consumer tag", cell: (row) => row.consumer_tag || h("em", null, "basic.get") },
  { label: "Channel", name: true, cell: (row) => (row.channel_name ? link(row.channel_name, "channels", row.channel_name) : `number ${row.channel}`) },
];

const seconds = (row) => format.duration(row.unacked_for / 1_000);

export function unackedOf(page, vhost, name) {
  const where = `${path("queues", vhost, name)}/unacked`;
  const holders = h("div", null, empty("…"));
  page.live(async () => {
    const found = await page.get(`${where}/consumers`, { page: 1, page_size: HOLDERS_MAX });
    const left = found.total_count - found.items.length;
    update(holders, holderTable(found.items), left > 0 ? empty(`${format.count(left)} more consumers are not shown.`) : null);
  });
  return [
    empty("Consumers that were cancelled are listed as long as they hold messages, and channels that fetched messages by basic.get."),
    h("h3", null, "Who holds them"), holders,
    h("h3", null, "The messages, the oldest first"), empty("At most 1,000 of each front door are listed."),
    listTable(page, {
      caption: "Unacknowledged messages",
      where: () => where,
      search: null,
      nothing: "Nobody holds any.",
      key: (row) => `${row.channel_name}\n${row.channel}\n${row.delivery_tag}`,
      columns: [
        ...COLUMNS,
        { label: "Delivery tag", number: true, cell: (row) => format.count(row.delivery_tag) },
        { label: "Held for", number: true, cell: seconds },
      ],
    }),
  ];
}

function holderTable(rows) {
  return plainTable("Who holds unacknowledged messages", [
    ...COLUMNS,
    { label: "Messages", number: true, cell: (row) => format.count(row.messages_unacknowledged) },
    { label: "The oldest for", number: true, cell: seconds },
  ], rows, (row) => `${row.channel_name}\n${row.channel}\n${row.consumer_tag}`, "Nobody holds any.");
}
