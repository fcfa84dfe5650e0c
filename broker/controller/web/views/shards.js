// Shards: the load of each, now and in the last minutes, and the queues on a shard.

import { heatMap } from "../charts.js";
import { h, update } from "../dom.js";
import * as format from "../format.js";
import * as history from "../history.js";
import { to } from "../router.js";
import { listTable, plainTable } from "../table.js";
import { badge, empty, facts, queueLink, section, state } from "../widgets.js";

const COLUMNS_MIN = 30; // a minute
const COLUMNS_MAX = 90;
const COLUMNS_NARROW_MAX = 40;
const NARROW_PX = 600;

const METRICS = {
  publish_per_s: ["Published", format.rate],
  deliver_per_s: ["Delivered", format.rate],
  messages: ["Messages held", format.compact],
  message_bytes: ["Bytes held", format.bytes],
  cpu: ["CPU", format.percent],
  rss_bytes: ["Memory", format.bytes],
  syncs_per_s: ["Disk syncs", format.rate],
};

export function shards(page) {
  const map = h("div", null, empty("Waiting for the first numbers …"));
  const table = h("div", null, empty("…"));
  let metric = "publish_per_s";
  const draw = () => update(map, mapOf(metric));
  const choices = h("fieldset", { class: "choices" }, h("legend", { class: "hidden" }, "What the heat map shows"),
    Object.entries(METRICS).map(([name, [label]]) => h("label", null,
      h("input", { type: "radio", name: "metric", value: name, checked: name === metric, on: { change: () => draw((metric = name)) } }), h("span", null, label))));
  page.show("Shards", section("Load over time", choices, map), section("Now", table));
  history.follow(() => {
    draw();
    const now = history.loads.at(-1)?.said;
    if (now) update(table, loadTable(now));
  }, page.signal);
}

function mapOf(metric) {
  if (!history.loads.length) return empty("Waiting for the first numbers …");
  const [label, show] = METRICS[metric];
  const most = window.innerWidth < NARROW_PX ? COLUMNS_NARROW_MAX : COLUMNS_MAX;
  const columns = Math.min(most, Math.max(COLUMNS_MIN, history.loads.length));
  const last = history.loads.at(-1).said;
  const rows = last.map(({ shard }) => {
    const values = history.loads.slice(-columns).map(({ said }) => said.find((one) => one.shard === shard)?.[metric] ?? NaN);
    return { name: `Shard ${shard}`, href: to("shards", shard), values, now: show(values.at(-1)) };
  });
  return heatMap(`${label}, the last ${Math.round((columns * history.EVERY_MS) / 1_000)} seconds`, rows, show, columns);
}

function loadTable(rows) {
  return plainTable("Shards", [
    { label: "Shard", cell: (row) => h("a", { href: to("shards", row.shard) }, `Shard ${row.shard}`) },
    { label: "State", cell: (row) => stateOf(row) },
    { label: "Queues", cell: (row) => format.count(row.queues), number: true },
    { label: "Messages", cell: (row) => format.count(row.messages), number: true },
    { label: "Bytes", cell: (row) => format.bytes(row.message_bytes), number: true },
    { label: "Consumers", cell: (row) => format.count(row.consumers), number: true },
    { label: "Published", cell: (row) => format.rate(row.publish_per_s), number: true },
    { label: "Delivered", cell: (row) => format.rate(row.deliver_per_s), number: true },
    { label: "CPU", cell: (row) => format.percent(row.cpu), number: true },
    { label: "Memory", cell: (row) => format.bytes(row.rss_bytes), number: true },
  ], rows, (row) => `${row.shard}`);
}

function stateOf(row) {
  return row.alarm ? badge(row.alarm, "bad") : state(row.ready ? "ready" : "down");
}

export function shard(page, number) {
  const about = h("div", null, empty("…"));
  const queues = listTable(page, {
    caption: "Queues on this shard",
    where: () => `shards/${encodeURIComponent(number)}/queues`,
    nothing: "No queue lives on this shard.",
    key: (row) => `${row.vhost}\n${row.name}`,
    columns: [
      { label: "Queue", sort: "name", cell: (row) => queueLink(row.vhost, row.name) },
      { label: "Virtual host", sort: "vhost", cell: (row) => row.vhost },
      { label: "Of stream exchange", cell: (row) => (row.exchange === undefined ? "–" : h("a", { href: to("streams", row.vhost, row.exchange) }, row.exchange)) },
      { label: "Ready", sort: "messages_ready", number: true, cell: (row) => format.count(row.messages_ready) },
      { label: "Unacked", sort: "messages_unacknowledged", number: true, cell: (row) => format.count(row.messages_unacknowledged) },
      { label: "Consumers", sort: "consumers", number: true, cell: (row) => format.count(row.consumers) },
    ],
  });
  page.show(`Shard ${number}`, section(null, about), section("Queues placed here", queues));
  page.live(async () => {
    const rows = await page.get("shards");
    const found = rows.find((row) => String(row.shard) === number);
    if (!found) return page.gone();
    update(about, facts([
      ["State", stateOf(found)],
      ["Queues", format.count(found.queues)],
      ["PID", found.pid],
      ["Memory", format.bytes(found.rss_bytes)],
      ["CPU since its start", format.duration(found.cpu_seconds)],
      ["Disk free", format.bytes(found.disk_free_bytes)],
      ["Disk syncs", found.syncs === undefined ? "–" : `${format.count(found.syncs)}, ${found.syncs ? ((found.sync_seconds / found.syncs) * 1000).toFixed(2) : 0} ms each`],
      ["Dead letters waiting", format.count(found.dead_letters_waiting)],
      ["Warnings", found.warnings.length ? found.warnings.map((text) => badge(text, "warn")) : null],
    ]));
  });
}
