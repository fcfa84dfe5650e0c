// Names for forms. Written by `make arguments` from broker/model/arguments.py.

export const QUEUE_ARGUMENTS = [
  "x-queue-type",
  "x-expires",
  "x-message-ttl",
  "x-dead-letter-exchange",
  "x-dead-letter-routing-key",
  "x-max-length",
  "x-max-length-bytes",
  "x-max-priority",
  "x-overflow",
  "x-single-active-consumer",
  "x-delivery-limit",
  "x-queue-leader-locator",
  "x-quorum-initial-group-size",
];

export const EXCHANGE_ARGUMENTS = [
  "alternate-exchange",
  "hash-header",
  "hash-property",
  "x-shards",
  "x-delayed-type",
];

export const POLICY_KEYS = [
  "expires",
  "message-ttl",
  "dead-letter-exchange",
  "dead-letter-routing-key",
  "max-length",
  "max-length-bytes",
  "overflow",
  "delivery-limit",
  "queue-leader-locator",
  "alternate-exchange",
  "shards-per-node",
];

export const OPERATOR_POLICY_KEYS = [
  "expires",
  "message-ttl",
  "max-length",
  "max-length-bytes",
  "overflow",
  "delivery-limit",
];

export const APPLY_TO = [
  "queues",
  "exchanges",
  "all",
  "classic_queues",
  "quorum_queues",
  "streams",
];
