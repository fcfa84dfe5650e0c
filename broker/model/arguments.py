"""The arguments of queues and exchanges: one row of one table for each.

A row says everything that follows from an argument's name: what its value may be, which queues or
exchanges take the argument, which policy key has the same meaning and how both are merged, which
field of the shard's limits the value ends in, and a line for people. What asks for arguments
reads the rows: the refusals (`checks`), the merging (`policies`), the checks of policies and the
sentences about what has no effect (in the controller), the HTTP API's description, the page's
buttons, shardctl's help and broker/ARGUMENTS.md. `make arguments` writes the last three.

What an argument does is not here: the shard that enforces a limit reads the argument itself
(`shardd/queues/limits.py`), and an exchange type checks arguments that depend on each other.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from types import MappingProxyType
from typing import Final, NamedTuple

from shardmq.broker.model import values
from shardmq.broker.model.values import Check, KeyCheck
from shardmq.broker.routing import delaying, federated, keeping
from shardmq.cluster.replicas import REPLICAS_MAX

CLASSIC, QUORUM, STREAM = "classic", "quorum", "stream"
QUEUE_TYPES: Final = frozenset((CLASSIC, QUORUM, STREAM))
NOT_STREAMS: Final = QUEUE_TYPES - {STREAM}
STREAMS: Final = frozenset((STREAM,))
ANY_EXCHANGE: Final[frozenset[str]] = frozenset()  # exchanges of every type
HASHED: Final = frozenset(("x-consistent-hash",))

# Policy keys of stream exchanges, and the arguments of the same meaning.
NUMBER, WHEN_GONE = "shards-per-node", "shards-when-gone"
DEADLINE, AT_DEADLINE = "shards-change-deadline", "shards-change-at-deadline"
SHARD_KEY = "routing-key"
DEFINITION = "stream-definition"
# Policy keys of the copies that queues, and the shard queues of exchanges, ask for.
REPLICAS, MIN_IN_SYNC = "replicas", "min-in-sync"
NUMBER_ARGUMENT, SUPER_STREAM = "x-shards", "x-super-stream"
SHARD_ARGUMENTS, KEY_ARGUMENT = "x-shard-arguments", "x-shard-routing-key"
WHEN_GONE_ARGUMENT = "x-shards-when-gone"
DEADLINE_ARGUMENT, AT_DEADLINE_ARGUMENT = f"x-{DEADLINE}", f"x-{AT_DEADLINE}"
when_gone_fault: Final = values.listed(("drain", "merge", "keep", "delete"))
deadline_fault: Final = values.at_least(0, "number of milliseconds")
at_deadline_fault: Final = values.listed(("wait", "break-order", "dead-letter"))

STRATEGIES = ("at-most-once", "at-least-once")
OVERFLOWS = ("drop-head", "reject-publish", "reject-publish-dlx")
MODES = ("default", "lazy")
CLIENT_LOCAL = "client-local"
# The locators that place a queue where the fewest queues are; all but the first are deprecated.
FEWEST_QUEUES = ("balanced", "random", "least-leaders", "min-masters")
LOCATORS = (CLIENT_LOCAL, "balanced", "random", "least-leaders")
OLD_LOCATORS = ("min-masters", CLIENT_LOCAL, "random")
RETRY_TYPES = ("disabled", "all", "failed", "returned")

# Reasons why something has no effect.
NO_REPLICAS = "a queue has the copies of its shard: replicas and min-in-sync choose the shard"
IN_MEMORY = "messages of every queue are on disk; memory keeps an index of them"
NO_WAIT = "a consumer is gone with its connection: nothing is waited for"
INDEXED = "streams are filtered by their index, whose size is not set"


class Merge(Enum):
    """The rule for which value is in force where policies and an argument differ."""

    ARGUMENT = "argument"  # the argument's, or the operator policy's
    LOWER = "lower"
    LOWER_NOT_NEGATIVE = "lower-not-negative"  # a negative one is no limit
    APART = "apart"  # nothing is merged: whoever reads the argument reads the policy, too


class PolicyKey(NamedTuple):
    """The key of a policy that sets an argument."""

    name: str
    check: KeyCheck
    merge: Merge = Merge.ARGUMENT
    is_operator: bool = False  # an operator policy may have the key, too


class Argument(NamedTuple):
    """A row of the table of arguments.

    name: as a client writes it.
    summary: the line for people, one short sentence.
    types: of a queue, the types that take the argument; of an exchange, the types that read it.
    check: what the value may be. None: the file of the exchange's type looks at it with others.
    limit: the field of `shardd.queues.limits.Limits` that the value ends in.
    retention: the field of a stream's `Retention` that the value ends in.
    no_effect: why the argument and its policy key do nothing here, if they do nothing.
    is_compared: whether a second declare must give the same value.
    is_offered: whether the page has a button for the name.
    """

    name: str
    summary: str
    types: frozenset[str]
    check: Check | None = None
    policy: PolicyKey | None = None
    limit: str = ""
    retention: str = ""
    no_effect: str = ""
    is_compared: bool = True
    is_offered: bool = False


# Deduplication, at an exchange as at a queue.
_DEDUPLICATION: Final = (
    Argument("x-message-deduplication", "Drop messages that have the id of an earlier message.",
             NOT_STREAMS, values.boolean),
    Argument("x-cache-size", "The number of ids that are remembered; 128 if not said.",
             NOT_STREAMS, values.whole(1, values.DEDUPLICATION_CACHE_MAX)),
    Argument("x-cache-ttl", "Milliseconds for which an id is remembered.", NOT_STREAMS,
             values.positive),
    Argument("x-deduplication-header",
             "The header that holds the id, if not x-deduplication-header.", NOT_STREAMS,
             values.string),
)  # fmt: skip

# In the order in which a second declare compares them.
_QUEUE: Final = (
    *_DEDUPLICATION,
    Argument("x-queue-type", "The type of the queue: classic, quorum or stream.", QUEUE_TYPES,
             values.word(QUEUE_TYPES, "\"unsupported queue type '{}'\""), is_offered=True),
    Argument("x-expires", "Milliseconds without use after which the queue is deleted.",
             NOT_STREAMS, values.expiry, limit="expires", is_offered=True,
             policy=PolicyKey("expires", values.at_least(1, "queue expiry"), Merge.LOWER,
                              is_operator=True)),
    Argument("x-message-ttl", "Milliseconds after which a message expires.", NOT_STREAMS,
             values.duration, limit="message_ttl", is_offered=True,
             policy=PolicyKey("message-ttl", values.at_least(0, "message TTL"), Merge.LOWER,
                              is_operator=True)),
    Argument("x-dead-letter-exchange", "The exchange that dead messages go to.", NOT_STREAMS,
             values.string, limit="dead_letters", is_offered=True,
             policy=PolicyKey("dead-letter-exchange", values.text("dead letter exchange name"))),
    Argument("x-dead-letter-routing-key", "The routing key of dead messages, if not their own.",
             NOT_STREAMS, values.dead_letter_key, limit="dead_letters", is_offered=True,
             policy=PolicyKey("dead-letter-routing-key", values.text("dead letter routing key"))),
    Argument("x-dead-letter-strategy",
             "at-least-once offers a refused dead message again; or at-most-once.", NOT_STREAMS,
             values.word(STRATEGIES, "invalid_dlx_strategy"), limit="dead_letters",
             policy=PolicyKey("dead-letter-strategy",
                              values.one_of(STRATEGIES, "dead letter strategy"))),
    Argument("x-max-length",
             "Messages that are ready in a queue, or kept by a stream, at the most.", QUEUE_TYPES,
             values.non_negative, limit="max_length", retention="max_messages", is_offered=True,
             policy=PolicyKey("max-length", values.at_least(0, "maximum length"), Merge.LOWER,
                              is_operator=True)),
    Argument("x-max-length-bytes",
             "Bytes that are ready in a queue, or kept by a stream, at the most.", QUEUE_TYPES,
             values.non_negative, limit="max_bytes", retention="max_bytes", is_offered=True,
             policy=PolicyKey("max-length-bytes", values.at_least(0, "maximum length in bytes"),
                              Merge.LOWER, is_operator=True)),
    Argument("x-max-in-memory-length", "The number of messages in memory.", NOT_STREAMS,
             values.non_negative, no_effect=IN_MEMORY,
             policy=PolicyKey("max-in-memory-length", values.at_least(0, "maximum memory in bytes"),
                              Merge.LOWER, is_operator=True)),
    Argument("x-max-in-memory-bytes", "The number of bytes of messages in memory.", NOT_STREAMS,
             values.non_negative, no_effect=IN_MEMORY,
             policy=PolicyKey("max-in-memory-bytes", values.at_least(0, "maximum memory in bytes"),
                              Merge.LOWER, is_operator=True)),
    Argument("x-max-priority", "The highest priority of messages, at most 255.", NOT_STREAMS,
             values.priority, limit="max_priority", is_offered=True),
    Argument("x-overflow",
             "The action of a full queue: drop-head, reject-publish or reject-publish-dlx.",
             NOT_STREAMS, values.word(OVERFLOWS, "invalid_overflow"), limit="reject_publish",
             is_offered=True,
             policy=PolicyKey("overflow", values.one_of(OVERFLOWS, "overflow value"),
                              is_operator=True)),
    Argument("x-queue-mode", "The mode of the queue: default or lazy.", NOT_STREAMS,
             values.word(MODES, "\"unsupported queue mode '{}'\""), no_effect=IN_MEMORY,
             policy=PolicyKey("queue-mode", values.one_of(MODES, "queue-mode value"))),
    Argument("x-queue-version", "The format in which messages are stored: 1 or 2.", NOT_STREAMS,
             values.anything, no_effect=IN_MEMORY,
             policy=PolicyKey("queue-version", values.one_of((1, 2), "queue-version value"),
                              is_operator=True)),
    Argument("x-single-active-consumer", "Give all messages to one consumer; the others stand by.",
             NOT_STREAMS, values.boolean, limit="single_active", is_offered=True),
    Argument("x-delivery-limit",
             "Returns of a message before it dies, at the most; negative: no limit.", NOT_STREAMS,
             values.integer, limit="delivery_limit", is_offered=True,
             policy=PolicyKey("delivery-limit", values.at_least(-1, "delivery limit"),
                              Merge.LOWER_NOT_NEGATIVE, is_operator=True)),
    Argument("x-consumer-timeout",
             "Milliseconds after which unsettled deliveries are requeued; 0: never.", NOT_STREAMS,
             values.non_negative, limit="consumer_timeout",
             policy=PolicyKey("consumer-timeout", values.at_least(0, "consumer timeout"),
                              Merge.LOWER)),
    Argument("x-consumer-disconnected-timeout",
             "Milliseconds for which a consumer may be disconnected.", NOT_STREAMS,
             values.non_negative, no_effect=NO_WAIT,
             policy=PolicyKey("consumer-disconnected-timeout",
                              values.at_least(0, "consumer disconnected timeout"), Merge.APART)),
    Argument("x-delayed-retry-type",
             "Messages that rest on return: all, failed, returned or disabled.", NOT_STREAMS,
             values.word(RETRY_TYPES, "invalid_delayed_retry_type"), limit="retry",
             policy=PolicyKey("delayed-retry-type",
                              values.one_of(RETRY_TYPES, "delayed retry type"))),
    Argument("x-delayed-retry-min",
             "Milliseconds that a message rests for each time it came back.", NOT_STREAMS,
             values.positive, limit="retry",
             policy=PolicyKey("delayed-retry-min", values.at_least(1, "delayed retry time"))),
    Argument("x-delayed-retry-max", "Milliseconds that a message rests at the most.", NOT_STREAMS,
             values.positive, limit="retry",
             policy=PolicyKey("delayed-retry-max", values.at_least(1, "delayed retry time"))),
    Argument("x-delayed-retry-multiplier", "The factor by which the rest grows with each return.",
             NOT_STREAMS, values.positive, limit="retry",
             policy=PolicyKey("delayed-retry-multiplier",
                              values.at_least(1, "delayed retry multiplier"))),
    Argument("x-max-age",
             "The age up to which a stream keeps messages, such as 7D (Y, M, D, h, m, s).",
             STREAMS, values.max_age, retention="max_age_ms",
             policy=PolicyKey("max-age", values.age)),
    Argument("x-stream-max-segment-size-bytes",
             "Bytes of a stream's segments, which are deleted whole.", STREAMS,
             values.whole(1, values.SEGMENT_BYTES_MAX), retention="segment_bytes",
             policy=PolicyKey("stream-max-segment-size-bytes", values.at_least(0, "segment size"))),
    Argument("x-stream-filter-size-bytes", "The size of the filter of a chunk in bytes.", STREAMS,
             values.non_negative, no_effect=INDEXED,
             policy=PolicyKey("stream-filter-size-bytes", values.at_least(0, "filter size"))),
    Argument("x-queue-leader-locator",
             "Place a new queue at the client's node (client-local) or balanced.", QUEUE_TYPES,
             values.word(LOCATORS, "invalid_queue_locator_arg"), is_offered=True,
             policy=PolicyKey("queue-leader-locator",
                              values.one_of(LOCATORS, "queue leader locator value"))),
    Argument("x-initial-cluster-size", "The number of nodes that are to have the queue.",
             QUEUE_TYPES, values.positive,
             policy=PolicyKey("initial-cluster-size", values.at_least(0, "cluster size"))),
    Argument("x-quorum-initial-group-size", "The number of nodes that are to have the queue.",
             NOT_STREAMS, values.positive, is_offered=True),
    Argument("x-quorum-target-group-size", "The number of replicas that the queue grows to.",
             NOT_STREAMS, values.positive, no_effect=NO_REPLICAS,
             policy=PolicyKey("target-group-size", values.at_least(1, "target group size"),
                              Merge.APART, is_operator=True)),
    Argument("x-queue-master-locator",
             "The older name: min-masters (balanced), client-local or random.",
             QUEUE_TYPES, values.word(OLD_LOCATORS, "invalid_queue_locator_arg"),
             policy=PolicyKey("queue-master-locator",
                              values.one_of(OLD_LOCATORS, "queue-master-locator value",
                                            wrong="invalid"))),
    Argument("x-ha-policy", "The nodes that have mirrors of the queue.", QUEUE_TYPES,
             values.anything, no_effect=NO_REPLICAS, is_compared=False),
    # Checked where the name is made (`checks.with_prefix`).
    Argument("x-name-prefix", "The beginning of a name that the broker makes; at most 64 bytes.",
             QUEUE_TYPES, values.anything, is_compared=False),
)  # fmt: skip

# In the order in which a second declare compares them.
_EXCHANGE: Final = (
    Argument("alternate-exchange", "The exchange that messages without a route go to.",
             ANY_EXCHANGE, is_offered=True,
             policy=PolicyKey("alternate-exchange", values.text("alternate exchange name"))),
    Argument("hash-header", "The header that is hashed.", HASHED, is_offered=True),
    Argument("hash-property", "The property that is hashed.", HASHED, is_offered=True),
    Argument("x-hash-on", "The same as hash-header.", HASHED),
    Argument("x-algorithm", "The way from a hash to a queue: ring (weighted rendezvous) or jump.",
             HASHED),
    Argument(NUMBER_ARGUMENT, "The number of shard queues of a stream exchange, or auto.",
             ANY_EXCHANGE, is_offered=True,
             policy=PolicyKey(NUMBER, values.any_setting, Merge.APART)),
    Argument(SUPER_STREAM, "The number of partitions of a super stream, or true.", ANY_EXCHANGE),
    Argument(SHARD_ARGUMENTS, "A table: the arguments of the shard queues.", ANY_EXCHANGE),
    Argument(KEY_ARGUMENT, "The key that binds the shard queues.", ANY_EXCHANGE,
             policy=PolicyKey(SHARD_KEY, values.any_setting, Merge.APART)),
    Argument(WHEN_GONE_ARGUMENT, "The end of old shard queues: drain, merge, keep or delete.",
             ANY_EXCHANGE, policy=PolicyKey(WHEN_GONE, when_gone_fault, Merge.APART)),
    Argument(delaying.TYPE_ARGUMENT, "The type that messages are routed by when they are due.",
             frozenset((delaying.DELAYED_TYPE,)), is_offered=True),
    Argument(delaying.FLAG_ARGUMENT,
             "Hold messages with a header x-delay back for so many milliseconds.", ANY_EXCHANGE,
             policy=PolicyKey(delaying.POLICY_KEY, values.flag)),
    *(row._replace(types=ANY_EXCHANGE) for row in _DEDUPLICATION),
    Argument(keeping.MESSAGES, "The number of newest messages that are kept.", ANY_EXCHANGE),
    Argument(keeping.AGE_MS, "Milliseconds for which messages are kept.", ANY_EXCHANGE),
    Argument(keeping.LENGTH, "The number of newest messages that are kept; 20 if not said.",
             frozenset((keeping.RECENT_HISTORY,))),
    Argument(federated.MAX_HOPS, "The number of brokers from which a message is held back.",
             frozenset((federated.FEDERATION_UPSTREAM,)), is_compared=False),
    Argument(federated.DOWNSTREAM_NAME, "The name of the broker that takes the messages.",
             frozenset((federated.FEDERATION_UPSTREAM,)), is_compared=False),
    Argument(federated.DOWNSTREAM_VHOST, "The virtual host there.",
             frozenset((federated.FEDERATION_UPSTREAM,)), is_compared=False),
    Argument(DEADLINE_ARGUMENT, "Milliseconds for which a change of shards keeps order.",
             ANY_EXCHANGE, is_compared=False,
             policy=PolicyKey(DEADLINE, deadline_fault, Merge.APART)),
    Argument(AT_DEADLINE_ARGUMENT,
             "The action at that deadline: wait, break-order or dead-letter.", ANY_EXCHANGE,
             is_compared=False, policy=PolicyKey(AT_DEADLINE, at_deadline_fault, Merge.APART)),
)  # fmt: skip

# Policy keys that no argument has, with the reason why they do nothing, "" if they act. The last
# ones are kept because definitions of other brokers carry them.
_ONLY_KEYS: Final = {
    PolicyKey(DEFINITION, values.text("stream definition name"), Merge.APART): "",
    # `copies.policy_faults` looks at both together.
    PolicyKey(
        REPLICAS,
        values.between(1, REPLICAS_MAX, "number of replicas"),
        Merge.APART,
        is_operator=True,
    ): "",
    PolicyKey(
        MIN_IN_SYNC,
        values.between(1, REPLICAS_MAX, "number of nodes in sync"),
        Merge.APART,
        is_operator=True,
    ): "",
    # `federation.policy_faults` looks at them together.
    PolicyKey("federation-upstream", values.text("federation upstream name"), Merge.APART): "",
    PolicyKey(
        "federation-upstream-set", values.text("federation upstream set name"), Merge.APART
    ): "",
    PolicyKey(
        "federation-upstream-pattern", values.text("federation upstream pattern"), Merge.APART
    ): "",
    **{
        PolicyKey(name, values.any_setting, Merge.APART): why
        for why, names in (
            (
                NO_REPLICAS,
                "ha-mode ha-params ha-sync-mode ha-sync-batch-size ha-promote-on-shutdown "
                "ha-promote-on-failure",
            ),
        )
        for name in names.split()
    },
}


class Table:
    """All rows, by the names that others look for. Never changed in place.

    queue, exchange: the rows by their argument's name.
    keys, operator_keys: what an own policy and an operator policy may have, by name.
    keys_without_effect: why a key does nothing, by name.
    queue_merges, exchange_merges: the rows whose policy is merged into the arguments, by key.
    """

    def __init__(self, queue: Iterable[Argument], exchange: Iterable[Argument]) -> None:
        self.queue = MappingProxyType({row.name: row for row in queue})
        self.exchange = MappingProxyType({row.name: row for row in exchange})
        reasons = dict(_ONLY_KEYS)
        for row in (*self.queue.values(), *self.exchange.values()):
            if row.policy is not None:
                reasons[row.policy] = row.no_effect
        self.keys = MappingProxyType({key.name: key for key in reasons})
        self.operator_keys = MappingProxyType({key.name: key for key in reasons if key.is_operator})
        self.keys_without_effect = MappingProxyType(
            {key.name: why for key, why in reasons.items() if why}
        )
        self.queue_merges = MappingProxyType(_merged(self.queue.values()))
        self.exchange_merges = MappingProxyType(_merged(self.exchange.values()))


def _merged(rows: Iterable[Argument]) -> dict[str, Argument]:
    return {
        row.policy.name: row
        for row in rows
        if row.policy is not None and row.policy.merge is not Merge.APART
    }


# Ask for the table through this module (`arguments.TABLE`), so that a test can put another here.
TABLE = Table(_QUEUE, _EXCHANGE)
