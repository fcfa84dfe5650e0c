// Nodes of a cluster: the list, and one with its memory, files, disk and processes.

import { path } from "../api.js";
import { bar } from "../charts.js";
import { h, update } from "../dom.js";
import * as format from "../format.js";
import { to } from "../router.js";
import { plainTable } from "../table.js";
import { badge, empty, facts, nodeColumn, nodeLink, section, state } from "../widgets.js";

export function nodes(page) {
  const table = h("div", null, empty("…"));
  page.show("Nodes", section(null, table));
  page.live(async () => update(table, nodeTable(await page.get("nodes"))));
}

export function nodeTable(rows) {
  return plainTable("Nodes", [
    { label: "Node", cell: (row) => nodeLink(row.name) },
    { label: "State", cell: (row) => [state(row.running ? "running" : "down"), row.is_leader ? badge("leads") : null] },
    { label: "Alarms", cell: (row) => alarmsOf(row) ?? "–" },
    { label: "Shards", cell: shardLinks },
    { label: "Cores", cell: (row) => format.count(row.processors), number: true },
    { label: "Memory", cell: (row) => format.bytes(row.mem_used), number: true },
    { label: "Disk free", cell: (row) => format.bytes(row.disk_free), number: true },
    { label: "Connections", cell: (row) => format.count(row.sockets_used), number: true },
    { label: "Up", cell: (row) => format.duration(row.uptime / 1_000), number: true },
    { label: "Version", cell: (row) => row.version ?? "–" },
  ], rows, (row) => row.name);
}

function alarmsOf({ alarms = [] }) {
  return alarms.length ? alarms.map((text) => badge(text, "bad")) : null;
}

function shardLinks({ shards = [] }) {
  return shards.length ? shards.map((shard, i) => [i ? ", " : null, h("a", { href: to("shards", shard) }, String(shard))]) : "–";
}

export function node(page, name) {
  const about = h("div", null, empty("…"));
  const meters = h("div", { class: "meters" }, empty("…"));
  const processes = h("div", null, empty("…"));
  page.show(name, section(null, about), section("Memory, files and disk", meters), section("Processes", processes));
  page.live(async () => {
    const [found, rows, { listeners }] = await Promise.all([page.get(path("nodes", name)), page.get("processes"), page.get("overview", { columns: "listeners" })]);
    update(about, aboutOf(found, listeners.filter((one) => one.node === name)));
    update(meters, found.mem_used === undefined ? empty("The node tells nothing.") : room(found));
    update(processes, processTable(rows.filter((row) => row.node === undefined || row.node === name), false));
  });
}

function aboutOf(row, listeners) {
  return facts([
    ["State", state(row.running ? "running" : "down")],
    ["Leads", row.is_leader === undefined ? null : row.is_leader ? "yes" : "no"],
    ["Alarms", alarmsOf(row)],
    ["Copies in sync", (row.in_sync_shards ?? []).length ? `shards ${row.in_sync_shards.join(", ")}` : null],
    ["Definitions", row.has_definitions === undefined ? null : row.has_definitions ? "has all of them" : badge("is behind, or down", "warn")],
    ["etcd", row.etcd_up === undefined ? null : row.etcd_up ? "answers" : badge(`silent for ${format.duration(row.etcd_silent_s)}`, "bad")],
    ["Shards", row.shards === undefined ? null : shardLinks(row)],
    ["Cores", row.processors === undefined ? null : format.count(row.processors)],
    ["Up", row.uptime === undefined ? null : format.duration(row.uptime / 1_000)],
    ["Version", row.version],
    ["Data", row.db_dir],
    ["Listens at", listening(listeners)],
  ]);
}

export function listening(listeners) {
  return listeners.map((one) => `${one.protocol} ${format.address(one.ip_address, one.port)}`).join(", ") || "–";
}

/** Meters of what a node has. */
export function room(node) {
  const limited = (used, limit) => (limit ? used / limit : NaN);
  const of = (used, limit, show) => (limit ? `${show(used)} of ${show(limit)}` : show(used));
  return [
    bar("Memory", limited(node.mem_used, node.mem_limit), of(node.mem_used, node.mem_limit, format.bytes)),
    bar("File handles", limited(node.fd_used, node.fd_total), of(node.fd_used, node.fd_total, format.count)),
    node.connections_max ? bar("Connections", limited(node.sockets_used, node.connections_max), of(node.sockets_used, node.connections_max, format.count)) : null,
    node.disk_free_limit === undefined ? null : bar("Disk", node.disk_free_alarm ? 1 : limited(node.disk_free_limit, node.disk_free),
      `${format.bytes(node.disk_free)} free, alarm below ${format.bytes(node.disk_free_limit)}`),
    node.alarms.length ? h("p", null, node.alarms.map((text) => badge(text, "bad"))) : null,
  ];
}

/** Whether a process is a front door and a shard. */
const isBoth = (row) => row.kind === "shard" && row.front_door !== null;

export function processTable(rows, isOfMany = true) {
  return plainTable("Processes", [
    { label: "Process", cell: (row) => (row.kind === "shard" ? h("a", { href: to("shards", row.index) }, row.name) : row.name) },
    ...(isOfMany ? nodeColumn() : []),
    rows.some(isBoth) && { label: "Front door", cell: (row) => row.front_door ?? "–", number: true },
    { label: "State", cell: (row) => state(row.state) },
    { label: "Up", cell: (row) => format.duration(row.uptime), number: true },
    { label: "Memory", cell: (row) => format.bytes(row.rss_bytes), number: true },
    { label: "Files", cell: (row) => format.count(row.fd_used), number: true },
    { label: "Restarts", cell: (row) => format.count(row.restarts), number: true },
    { label: "PID", cell: (row) => row.pid || "–", number: true },
    { label: "Last exit", cell: (row) => row.last_end || "–" },
  ].filter(Boolean), rows, (row) => `${row.node}\n${row.name}`);
}
