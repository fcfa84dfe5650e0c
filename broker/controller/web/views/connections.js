// Connections and channels: lists, single ones, and closing a connection.

import { path, remove } from "../api.js";
import { h, update } from "../dom.js";
import * as format from "../format.js";
import { OBJECT_KEPT_S, pastCharts } from "../history.js";
import { listTable, plainTable } from "../table.js";
import { attempt, dangerous, empty, entries, facts, link, nodeColumn, nodeFact, section, state } from "../widgets.js";
import { consumerTable } from "./consumers.js";

export function connections(page) {
  page.show("Connections", section(null, listTable(page, {
    caption: "Connections",
    where: () => "connections",
    nothing: "Nobody is connected.",
    search: "name or address",
    choose: "connections",
    key: (row) => row.name,
    columns: [
      { label: "Name", sort: "user_provided_name", cell: (row) => [link(titleOf(row), "connections", row.name), row.user_provided_name ? h("small", { class: "under" }, row.name) : null] },
      { label: "User", sort: "user", cell: (row) => row.user },
      { label: "Virtual host", minor: true, sort: "vhost", cell: (row) => row.vhost },
      ...nodeColumn({ sort: "node", minor: true }),
      { label: "State", sort: "state", cell: (row) => state(row.state) },
      { label: "TLS", minor: true, sort: "ssl", cell: (row) => (row.ssl ? row.ssl_protocol || "yes" : "no") },
      { label: "Channels", sort: "channels", number: true, cell: (row) => format.count(row.channels) },
      { label: "From client", sort: "recv_oct", number: true, cell: (row) => perSecond(row.recv_oct_details) },
      { label: "To client", sort: "send_oct", number: true, cell: (row) => perSecond(row.send_oct_details) },
      { label: "Address", sort: "peer_host", extra: true, cell: (row) => format.address(row.peer_host, row.peer_port) },
      { label: "Client", sort: "client_properties.product", extra: true, cell: (row) => [row.client_properties.product, row.client_properties.version].filter(Boolean).join(" ") || "–" },
      { label: "Connected", sort: "connected_at", extra: true, cell: (row) => format.moment(row.connected_at) },
      { label: "Protocol", sort: "protocol", extra: true, cell: (row) => row.protocol },
      { label: "Heartbeat", sort: "timeout", number: true, extra: true, cell: (row) => format.duration(row.timeout) },
      { label: "Bytes received", sort: "recv_oct", number: true, extra: true, cell: (row) => format.bytes(row.recv_oct) },
      { label: "Bytes sent", sort: "send_oct", number: true, extra: true, cell: (row) => format.bytes(row.send_oct) },
    ],
  })));
}

/** Return the name that the client has given its connection, or else the addresses. */
function titleOf(row) {
  return typeof row.user_provided_name === "string" && row.user_provided_name ? row.user_provided_name : row.name;
}

function perSecond(details) {
  return details ? `${format.bytes(details.rate)}/s` : "–";
}

const BYTES = [{
  title: "Bytes a second",
  show: (value) => (Number.isFinite(value) ? `${format.bytes(value)}/s` : "–"),
  lines: [{ name: "from client", colour: 0, of: "recv_oct", isRate: true }, { name: "to client", colour: 1, of: "send_oct", isRate: true }],
}];

export function connection(page, name) {
  const about = h("div", null, empty("…"));
  const opened = h("div", null, empty("…"));
  const close = dangerous("Close connection", `Close the connection ${name}? Its client is told so, and may connect again.`, async () => {
    if (await attempt(() => remove(path("connections", name)), "The connection is closed.")) page.leave("connections");
  });
  page.show(name, pastCharts(page, path("connections", name), BYTES, OBJECT_KEPT_S), section(null, about), section("Channels", opened), section("Close it", close));
  page.live(async () => {
    const where = path("connections", name);
    const [found, channels] = await Promise.all([page.get(where), page.get(`${where}/channels`)]);
    page.rename(titleOf(found));
    update(about, facts([
      ["From and to", found.name],
      ["User", found.user],
      ["Virtual host", found.vhost],
      nodeFact(found),
      ["State", state(found.state)],
      ["Connected", format.moment(found.connected_at)],
      ["Protocol", found.protocol],
      ["Login by", found.auth_mechanism],
      ["TLS", found.ssl ? `${found.ssl_protocol} ${found.ssl_cipher ?? ""}` : "no"],
      ["Heartbeat", format.duration(found.timeout)],
      ["Largest frame", format.bytes(found.frame_max)],
      ["From client", `${format.bytes(found.recv_oct)}, ${perSecond(found.recv_oct_details)}`],
      ["To client", `${format.bytes(found.send_oct)}, ${perSecond(found.send_oct_details)}`],
      ["Client says", entries(found.client_properties)],
    ]));
    update(opened, plainTable("Channels", CHANNEL, channels, (row) => row.name));
  });
}

const CHANNEL = [
  { label: "Channel", sort: "name", cell: (row) => link(row.name, "channels", row.name) },
  { label: "State", sort: "state", cell: (row) => state(row.state) },
  { label: "Mode", minor: true, cell: (row) => mode(row) },
  { label: "Consumers", sort: "consumer_count", number: true, cell: (row) => format.count(row.consumer_count) },
  { label: "Prefetch", sort: "prefetch_count", number: true, cell: (row) => format.count(row.prefetch_count) },
  { label: "Unacked", sort: "messages_unacknowledged", number: true, cell: (row) => format.count(row.messages_unacknowledged) },
  { label: "Unconfirmed", sort: "messages_unconfirmed", number: true, cell: (row) => format.count(row.messages_unconfirmed) },
  { label: "In", sort: "message_stats.publish_details.rate", number: true, cell: (row) => format.rate(row.message_stats?.publish_details?.rate) },
  { label: "Out", sort: "message_stats.deliver_get_details.rate", number: true, cell: (row) => format.rate(row.message_stats?.deliver_get_details?.rate) },
];

function mode(row) {
  return [row.confirm ? "confirms" : null, row.transactional ? "transactions" : null].filter(Boolean).join(", ") || "–";
}

export function channels(page) {
  page.show("Channels", section(null, listTable(page, {
    caption: "Channels",
    where: () => "channels",
    nothing: "No channel is open.",
    choose: "channels",
    key: (row) => row.name,
    columns: [
      ...CHANNEL.slice(0, 1), { label: "User", minor: true, sort: "user", cell: (row) => row.user }, ...CHANNEL.slice(1),
      { label: "Virtual host", sort: "vhost", extra: true, cell: (row) => row.vhost },
      ...nodeColumn({ sort: "node", extra: true }),
      { label: "Connection", sort: "connection_details.name", extra: true, cell: (row) => link(row.connection_details.name, "connections", row.connection_details.name) },
      { label: "Published", sort: "message_stats.publish", number: true, extra: true, cell: (row) => format.count(row.message_stats?.publish) },
      { label: "Delivered", sort: "message_stats.deliver_get", number: true, extra: true, cell: (row) => format.count(row.message_stats?.deliver_get) },
    ],
  })));
}

const MESSAGES = [{
  title: "Messages a second",
  show: format.rate,
  lines: [{ name: "in", colour: 0, of: "message_stats.publish", isRate: true }, { name: "out", colour: 1, of: "message_stats.deliver_get", isRate: true }],
}];

export function channel(page, name) {
  const about = h("div", null, empty("…"));
  const consumers = h("div", null, empty("…"));
  page.show(name, pastCharts(page, path("channels", name), MESSAGES, OBJECT_KEPT_S), section(null, about), section("Consumers", consumers));
  page.live(async () => {
    const found = await page.get(path("channels", name));
    update(about, facts([
      ["Connection", link(found.connection_details.name, "connections", found.connection_details.name)],
      ["User", found.user],
      ["Virtual host", found.vhost],
      nodeFact(found),
      ["State", state(found.state)],
      ["Mode", mode(found)],
      ["Prefetch", format.count(found.prefetch_count)],
      ["Prefetch of the channel", format.count(found.global_prefetch_count)],
      ["Unacknowledged", format.count(found.messages_unacknowledged)],
      ["Unconfirmed", format.count(found.messages_unconfirmed)],
      ["Published", `${format.count(found.message_stats?.publish)}, ${format.rate(found.message_stats?.publish_details?.rate)}`],
      ["Delivered", `${format.count(found.message_stats?.deliver_get)}, ${format.rate(found.message_stats?.deliver_get_details?.rate)}`],
    ]));
    update(consumers, consumerTable(found.consumer_details));
  });
}
