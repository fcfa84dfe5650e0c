// Overview: rates, waiting messages, processes, and warnings.

import { ApiError, has } from "../api.js";
import { bar } from "../charts.js";
import { h, update } from "../dom.js";
import * as format from "../format.js";
import { BROKER_KEPT_S, pastCharts } from "../history.js";
import { plainTable } from "../table.js";
import { badge, empty, facts, figures, section, state } from "../widgets.js";
import { to } from "../router.js";

const rate = (name, colour, of) => ({ name, colour, of: `message_stats.${of}`, isRate: true });
const CHARTS = [
  {
    title: "Messages a second",
    show: format.rate,
    lines: [rate("published", 0, "publish"), rate("delivered", 1, "deliver_get"), rate("acknowledged", 2, "ack"), rate("confirmed", 3, "confirm")],
  },
  {
    title: "Messages in queues",
    show: format.compact,
    lines: [
      { name: "ready", colour: 0, of: "queue_totals.messages_ready" },
      { name: "unacknowledged", colour: 4, of: "queue_totals.messages_unacknowledged" },
    ],
  },
];

export function overview(page) {
  const totals = h("div");
  const alarms = h("div", { role: "status" });
  const node = h("div", { class: "meters" }, empty("…"));
  const about = h("div");
  const processes = h("div", null, empty("…"));
  page.show("Overview", alarms, totals, pastCharts(page, "overview", CHARTS, BROKER_KEPT_S),
    has("monitoring") ? [section("Memory, files and disk", node), section("Processes", processes)] : null, section("About", about));

  page.live(async () => {
    const said = await page.get("overview");
    update(totals, figuresOf(said));
    update(about, aboutOf(said));
  });
  page.live(async () => update(alarms, await wrongs(page)));
  if (has("monitoring")) {
    page.live(async () => {
      const [[found], rows] = await Promise.all([page.get("nodes"), page.get("processes")]);
      update(node, room(found));
      update(processes, processTable(rows));
    });
  }
}

function figuresOf(said) {
  const { object_totals: objects, queue_totals: queues } = said;
  const go = (name) => h("a", { href: to(name) }, format.count(objects[name]));
  return figures([
    ["Ready", format.compact(queues.messages_ready)],
    ["Unacknowledged", format.compact(queues.messages_unacknowledged)],
    ["Queues", go("queues")],
    ["Exchanges", go("exchanges")],
    ["Connections", go("connections")],
    ["Channels", go("channels")],
    ["Consumers", go("consumers")],
  ]);
}

/** Alarms and warnings, or nothing. */
async function wrongs(page) {
  const said = await page.get("health/checks/alarms").catch((error) => {
    if (error instanceof ApiError && error.status === 503) return { reason: error.message };
    throw error;
  });
  const rows = [...(said.warnings ?? []).map(({ shard, warning }) => (shard === undefined ? warning : `Shard ${shard}: ${warning}`)), ...(said.reason ? [said.reason] : [])];
  return rows.map((text) => h("p", { class: said.reason ? "banner bad" : "banner", data: { key: text } }, text));
}

function room(node) {
  const limited = (used, limit) => (limit ? used / limit : NaN);
  const of = (used, limit, show) => (limit ? `${show(used)} of ${show(limit)}` : show(used));
  return [
    bar("Memory", limited(node.mem_used, node.mem_limit), of(node.mem_used, node.mem_limit, format.bytes)),
    bar("File handles", limited(node.fd_used, node.fd_total), of(node.fd_used, node.fd_total, format.count)),
    node.connections_max ? bar("Connections", limited(node.sockets_used, node.connections_max), of(node.sockets_used, node.connections_max, format.count)) : null,
    node.disk_free === undefined ? null : bar("Disk", node.disk_free_alarm ? 1 : limited(node.disk_free_limit, node.disk_free),
      `${format.bytes(node.disk_free)} free, alarm below ${format.bytes(node.disk_free_limit)}`),
    node.alarms.length ? h("p", null, node.alarms.map((text) => badge(text, "bad"))) : null,
  ];
}

/** Whether a process is a front door and a shard. */
const isBoth = (row) => row.kind === "shard" && row.front_door !== null;

function processTable(rows) {
  return plainTable("Processes", [
    { label: "Process", cell: (row) => (row.kind === "shard" ? h("a", { href: to("shards", row.index) }, row.name) : row.name) },
    rows.some(isBoth) && { label: "Front door", cell: (row) => row.front_door ?? "–", number: true },
    { label: "State", cell: (row) => state(row.state) },
    { label: "Up", cell: (row) => format.duration(row.uptime), number: true },
    { label: "Memory", cell: (row) => format.bytes(row.rss_bytes), number: true },
    { label: "Files", cell: (row) => format.count(row.fd_used), number: true },
    { label: "Restarts", cell: (row) => format.count(row.restarts), number: true },
    { label: "PID", cell: (row) => row.pid ?? "–", number: true },
    { label: "Last exit", cell: (row) => row.last_end || "–" },
  ].filter(Boolean), rows, (row) => row.name);
}

function aboutOf(said) {
  return facts([
    ["Product", `${said.product_name} ${said.product_version}`],
    ["Cluster name", said.cluster_name],
    ["Like RabbitMQ", said.rabbitmq_version],
    ["Runs on", said.erlang_full_version],
    ["Listens at", said.listeners.map((one) => `${one.protocol} ${format.address(one.ip_address, one.port)}`).join(", ") || "–"],
  ]);
}
