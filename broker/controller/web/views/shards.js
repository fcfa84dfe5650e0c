// Shards: the load of each, now and in the last minutes, and the queues on a shard.

import { heatMap } from "../charts.js";
import { h, update } from "../dom.js";
import * as format from "../format.js";
import * as history from "../history.js";
import { to } from "../router.js";
import { listTable, plainTable } from "../table.js";
import { badge, empty, facts, nodeColumn, nodeFact, nodeLink, queueLink, section, state } from "../widgets.js";

const EVERY_MS = 5_000;
const COLUMNS_MAX = 90;
const COLUMNS_NARROW_MAX = 40;
const NARROW_PX = 600;

// For each metric: its label, how it is shown, the number that has samples, and whether its rate is shown.
const METRICS = {
  publish_per_s: ["Published", format.rate, "published", true],
  deliver_per_s: ["Delivered", format.rate, "delivered", true],
  messages: ["Messages held", format.compact, "messages", false],
  message_bytes: ["Bytes held", format.bytes, "message_bytes", false],
  cpu: ["CPU", format.percent, "cpu_seconds", true],
  rss_bytes: ["Memory", format.bytes, "rss_bytes", false],
  syncs_per_s: ["Disk syncs", format.rate, "syncs", true],
};

export function shards(page) {
  const map = h("div", null, empty("Waiting for the first numbers …"));
  const table = h("div", null, empty("…"));
  const note = h("p", { class: "faint kept", role: "status" });
  let metric = "publish_per_s";
  let known = { rows: [] }; // with the time of the rows, the span that was asked for, and its step
  const draw = () => known.rows.length && update(map, mapOf(metric, known));
  const again = page.live(async () => {
    const most = window.innerWidth < NARROW_PX ? COLUMNS_NARROW_MAX : COLUMNS_MAX;
    const asked = { spanMs: history.spanMs(), stepMs: history.stepS(history.BROKER_KEPT_S, most) * 1_000 };
    const rows = await page.get("shards/load", history.query(history.BROKER_KEPT_S, most));
    if (asked.spanMs !== history.spanMs()) return; // the choice of another span has asked again
    known = { rows, nowMs: Date.now(), ...asked };
    draw();
    update(table, loadTable(rows));
    const oldest = Math.min(...rows.map((row) => history.values(row, "messages", false, known.nowMs)[0]?.[0] ?? Infinity));
    update(note, history.noteOf(oldest, history.BROKER_KEPT_S));
  }, EVERY_MS);
  const choices = h("fieldset", { class: "choices" }, h("legend", { class: "hidden" }, "What the heat map shows"),
    Object.entries(METRICS).map(([name, [label]]) => h("label", null,
      h("input", { type: "radio", name: "metric", value: name, checked: name === metric, on: { change: () => draw((metric = name)) } }), h("span", null, label))));
  page.show("Shards", section("Load over time", choices, history.spanChoice(() => again()), note, map), section("Now", table));
}

function mapOf(metric, { rows, nowMs, spanMs, stepMs }) {
  const [label, show, name, isRate] = METRICS[metric];
  const known = new Map(rows.map((row) => [row.shard, new Map(history.values(row, name, isRate, nowMs))]));
  const times = [...new Set([...known.values()].flatMap((values) => [...values.keys()]))].sort((a, b) => a - b);
  const columns = Math.max(1, Math.round(spanMs / stepMs));
  const shown = rows.map((row) => {
    const values = times.map((at) => known.get(row.shard).get(at) ?? NaN);
    return { name: `Shard ${row.shard}`, href: to("shards", row.shard), values, now: show(row[metric]) };
  });
  return heatMap(`${label}, the last ${format.duration(spanMs / 1_000)}`, shown, show, columns);
}

function loadTable(rows) {
  return plainTable("Shards", [
    { label: "Shard", cell: (row) => h("a", { href: to("shards", row.shard) }, `Shard ${row.shard}`) },
    ...nodeColumn(),
    { label: "State", cell: (row) => stateOf(row) },
    ...(rows.some((row) => row.replicas > 1) ? [{ label: "In sync", cell: (row) => `${row.in_sync.length} of ${row.replicas}`, number: true }] : []),
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
      { label: "Stream exchange", cell: (row) => (row.exchange === undefined ? "–" : h("a", { href: to("streams", row.vhost, row.exchange) }, row.exchange)) },
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
      nodeFact(found),
      ["All of it is on", (found.in_sync ?? []).length > 1 ? found.in_sync.map((name, i) => [i ? ", " : null, nodeLink(name)]) : null],
      ["Is to be on", found.replicas > 1 ? `${format.count(found.replicas)} nodes; ${format.count(found.min_in_sync)} in sync confirm` : null],
      ["Behind, the slowest of them", found.replica_lag_bytes === undefined ? null : `${format.bytes(found.replica_lag_bytes)}, ${format.duration(found.replica_lag_seconds)}`],
      ["Sent to the others", found.replica_sent_bytes === undefined ? null : `${format.bytes(found.replica_sent_bytes)}, ${format.bytes(found.replica_plain_bytes)} before compression`],
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
