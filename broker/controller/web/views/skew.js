// Skew of a stream exchange: how unevenly keys, messages and bytes lie on its shard queues.

import { h } from "../dom.js";
import * as format from "../format.js";
import { plainTable } from "../table.js";
import { facts, link } from "../widgets.js";

const MEASURES = [
  { label: "Keys", title: "Share of keys", of: (part) => part.share, show: null },
  { label: "Arrived", title: "Messages arrived", of: (part) => part.row?.message_stats?.publish, show: format.count },
  { label: "Messages", title: "Messages now", of: (part) => part.row?.messages, show: format.count },
  { label: "Bytes", title: "Bytes now", of: (part) => part.row?.message_bytes, show: format.bytes },
];

/** `parts`: {queue, index}; `rows`: the queues by name; `ring`: [{name, share}], shares of the keys. */
export function skewOf(vhost, parts, rows, ring) {
  const shares = new Map(ring.map(({ name, share }) => [name, share]));
  const known = parts.map((part) => ({ ...part, row: rows.get(part.queue), share: shares.get(part.queue) }));
  const measures = MEASURES.map((measure) => ({ ...measure, total: known.reduce((sum, part) => sum + (measure.of(part) ?? 0), 0) }));
  const cell = ({ of, show, total }) => (part) => {
    const value = of(part);
    const share = total ? format.percent((value ?? 0) / total) : "–";
    return show ? [show(value), h("small", { class: "under" }, share)] : share;
  };
  return [
    facts(measures.map((measure) => [measure.title, said(measure, known)])),
    plainTable("Skew", [
      { label: "Shard queue", cell: (part) => link(`Shard queue ${part.index}`, "queues", vhost, part.queue) },
      ...measures.map((measure) => ({ label: measure.label, number: true, cell: cell(measure) })),
    ], known, (part) => part.queue),
  ];
}

/** Say which shard queue has the most, beside the average. */
function said({ of, total }, parts) {
  if (!total) return "none yet";
  const most = parts.reduce((a, b) => ((of(b) ?? 0) > (of(a) ?? 0) ? b : a));
  const factor = (of(most) * parts.length) / total;
  return factor < 1.05 ? "even" : `shard queue ${most.index} has ${factor.toFixed(1)} times the average`;
}
