// Publishing and getting single messages by hand, for queues and exchanges.

import { exchangePart, path, post } from "../api.js";
import { fill, h } from "../dom.js";
import * as format from "../format.js";
import { badge, empty, entries, facts, form, notice } from "../widgets.js";

const COUNT_MAX = 1_000;
const SHOWN_BYTES_MAX = 50_000; // of each payload
const PROPERTIES = ["content_type", "content_encoding", "correlation_id", "reply_to", "expiration", "message_id", "type", "app_id", "priority"];

/** A form to publish to `exchange`, or with `queue` straight into one queue. */
export function publishForm(vhost, exchange, queue, then) {
  const key = { name: "routing_key", label: "Routing key" };
  return form([
    ...(queue === null ? [key] : []),
    { name: "payload", label: "Payload", type: "textarea" },
    { name: "headers", label: "Headers", type: "arguments", help: "One in each line: name = value" },
    { name: "properties", label: "Properties", type: "arguments", help: "One in each line: name = value", hints: PROPERTIES },
    { name: "persistent", label: "Persistent: confirmed when it is on stable storage", type: "checkbox", value: true },
  ], {
    label: "Publish message",
    stays: true,
    submit: async ({ routing_key, payload, headers, properties, persistent }) => {
      const { routed } = await post(`${path("exchanges", vhost, exchangePart(exchange))}/publish`, {
        routing_key: queue ?? routing_key,
        payload,
        payload_encoding: "string",
        properties: { ...properties, headers, delivery_mode: persistent ? 2 : 1 },
      });
      notice(routed ? "Message published." : "Message published, but no queue took it: no binding matches.");
      then();
    },
  });
}

const MODES = [
  ["ack_requeue_true", "Put them back into the queue"],
  ["ack_requeue_false", "Remove them (acknowledge)"],
  ["reject_requeue_false", "Reject them: they are dropped or dead-lettered"],
];

export function getForm(vhost, queue, then) {
  const shown = h("div", { class: "messages", role: "status" });
  const asks = form([
    { name: "ackmode", label: "Afterwards", type: "select", options: MODES },
    { name: "count", label: "Messages", type: "number", value: 1, min: 1 },
    { name: "encoding", label: "Payload as", type: "select", options: [["auto", "text if it is text"], ["base64", "base64"]] },
  ], {
    label: "Get messages",
    stays: true,
    submit: async ({ ackmode, count, encoding }) => {
      const found = await post(`${path("queues", vhost, queue)}/get`, { ackmode, encoding, count: Math.min(count ?? 1, COUNT_MAX), truncate: SHOWN_BYTES_MAX });
      fill(shown, found.length ? found.map(message) : empty("The queue is empty."));
      then();
    },
  });
  return [asks, shown];
}

function message(row, i) {
  const cut = row.payload_bytes > SHOWN_BYTES_MAX ? `, the first ${format.bytes(SHOWN_BYTES_MAX)} are shown` : "";
  const { headers, ...properties } = row.properties;
  return h("article", { class: "message" },
    h("header", null, h("strong", null, `Message ${i + 1}`), row.redelivered ? badge("redelivered", "warn") : null, h("span", { class: "faint" }, `${format.count(row.message_count)} more in the queue`)),
    facts([
      ["Exchange", row.exchange || "(default)"],
      ["Routing key", h("code", null, row.routing_key)],
      ["Headers", entries(headers)],
      ["Properties", entries(properties)],
      ["Payload", `${format.bytes(row.payload_bytes)}, ${row.payload_encoding}${cut}`],
    ]),
    h("pre", { tabindex: "0", "aria-label": "Payload" }, row.payload));
}
