// Overview: rates, waiting messages, processes, and warnings.

import { ApiError, has, isCluster } from "../api.js";
import { h, update } from "../dom.js";
import * as format from "../format.js";
import { BROKER_KEPT_S, pastCharts } from "../history.js";
import { empty, facts, figures, nodeLink, section } from "../widgets.js";
import { to } from "../router.js";
import { listening, nodeTable, processTable, room } from "./nodes.js";

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
  const node = h("div", isCluster ? null : { class: "meters" }, empty("…"));
  const about = h("div");
  const processes = h("div", null, empty("…"));
  page.show("Overview", alarms, totals, pastCharts(page, "overview", CHARTS, BROKER_KEPT_S),
    has("monitoring") ? [section(isCluster ? "Nodes" : "Memory, files and disk", node), section("Processes", processes)] : null, section("About", about));

  page.live(async () => {
    const [said, cluster] = await Promise.all([page.get("overview"), isCluster ? page.get("cluster-name") : {}]);
    update(totals, figuresOf(said));
    update(about, aboutOf(said, cluster));
  });
  page.live(async () => update(alarms, await wrongs(page)));
  if (has("monitoring")) {
    page.live(async () => {
      const [found, rows] = await Promise.all([page.get("nodes"), page.get("processes")]);
      update(node, isCluster ? nodeTable(found) : room(found[0]));
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
    if (error instanceof ApiError && error.status === 503) return { reason: error.message, ...error.said };
    throw error;
  });
  const where = ({ node, shard, process }) => [node, shard === undefined ? process : `shard ${shard}`].filter(Boolean).join(", ");
  const alarms = isCluster ? (said.alarms ?? []).map((one) => `${where(one)}: ${one.alarm}`) : [];
  const rows = [...(said.warnings ?? []).map(({ shard, warning }) => (shard === undefined ? warning : `Shard ${shard}: ${warning}`)), ...(said.reason ? [said.reason] : []), ...alarms];
  return rows.map((text) => h("p", { class: said.reason ? "banner bad" : "banner", data: { key: text } }, text));
}

function aboutOf(said, { nodes = null }) {
  return facts([
    ["Product", `${said.product_name} ${said.product_version}`],
    ["Cluster name", said.cluster_name],
    ["Nodes", nodes && nodes.map((one, i) => [i ? ", " : null, nodeLink(one.name), one.running ? null : " (down)", one.is_leader ? " (leads)" : null])],
    ["This node", nodes && nodeLink(said.node)],
    ["Like RabbitMQ", said.rabbitmq_version],
    ["Runs on", said.erlang_full_version],
    ["Listens at", listening(said.listeners.filter(({ node }) => node === said.node))],
  ]);
}
