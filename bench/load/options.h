/* The options of the generator, and the names and counters that its threads share. */
#ifndef AMQPLOAD_OPTIONS_H
#define AMQPLOAD_OPTIONS_H

#include <getopt.h>

#include "client.h"

enum { PRODUCERS_MAX = 1024, QUEUES_MAX = 65535, BODY_BYTES_MAX = 1 << 30 };

typedef struct {
    address broker;
    size_t body_bytes, batch_bytes; /* either batch_bytes or batch_messages is 0 */
    uint64_t batch_messages, confirms, prefetch, ack_every, rate, messages, producers, consumers;
    uint64_t queues, keys, consumer_queues, idle, rpc, pipeline, fleet;
    enum { NO_OPERATION, OP_CONNECT, OP_CHANNEL, OP_QUEUE, OP_BINDING } operation;
    const char *exchange_type; /* the type of a declared exchange */
    double seconds, warmup;
    const char *prefix;
    bool persistent, durable, named, sharded, fanout, topic, virtual, stream_queue, backlog;
    bool no_consume, stall, latency, check, json, marks, hold, keep;
} options;

static options opt = {
    .body_bytes = 16, .batch_bytes = 65536, .producers = 1, .consumers = 1, .queues = 1, .keys = 1,
    .pipeline = 1, .exchange_type = "direct", .seconds = 5, .warmup = 0.5, .prefix = "bench",
};

/* A counter that main reads while the threads run. It has a cache line of its own and one
 * writer. */
typedef struct {
    _Alignas(64) atomic_uint_fast64_t messages;
    atomic_uint_fast64_t bytes;
} counter;

static atomic_bool go, filled, measuring, publishing = true, drained;

static inline void count(counter *c, uint64_t messages, uint64_t bytes) {
    atomic_store_explicit(&c->messages, messages, memory_order_relaxed);
    atomic_store_explicit(&c->bytes, bytes, memory_order_relaxed);
}

/* Write the name of a queue. The broker names the shard queues of a stream exchange. */
static inline void queue_name(char *to, size_t room, uint64_t queue) {
    const char *form = opt.sharded ? "sharding: %s - shardmq@localhost - %llu" : "%s-%llu";
    snprintf(to, room, form, opt.prefix, (unsigned long long)queue);
}
static inline void routing_key(char *to, size_t room, uint64_t key) {
    if (opt.topic) snprintf(to, room, "key.%llu.item", (unsigned long long)key);
    else if (opt.named) snprintf(to, room, "key-%llu", (unsigned long long)key);
    else queue_name(to, room, key % opt.queues);
}
/* Each key matches one binding; a topic exchange must try both kinds of wildcard to find it. */
static inline void binding_key(char *to, size_t room, uint64_t key) {
    if (opt.topic) snprintf(to, room, key % 2 ? "*.%llu.#" : "key.%llu.*", (unsigned long long)key);
    else routing_key(to, room, key);
}
static inline const char *exchange_name(void) { return opt.named ? opt.prefix : ""; }
/* Return the number of deliveries of one publish. */
static inline uint64_t copies(void) { return opt.fanout ? opt.queues : 1; }

static const char usage[] =
    "amqpload: publish to and consume from any AMQP 0-9-1 broker, and print the rates\n\n"
    "  --url amqp://user:password@host:port/vhost   (or in the environment: AMQPLOAD_URL)\n"
    "  --body BYTES             body of each message (16)\n"
    "  --batch BYTES|N          one write: 64K, 4096B are bytes, a number counts messages (64K)\n"
    "  --confirms WINDOW        wait for confirms, at most WINDOW outstanding to each producer\n"
    "                           (0: none)\n"
    "  --prefetch N             basic.qos of each consumer (0: no limit)\n"
    "  --ack-every N            basic.ack(multiple) every N deliveries (0: consume with no-ack)\n"
    "  --persistent --durable   delivery_mode 2; durable queues and exchange\n"
    "  --rate MSGS_PER_S        all producers together, evenly paced (0: as fast as possible)\n"
    "  --producers P --consumers C --queues Q    (1 1 1)\n"
    "                           a connection and a thread each; queues PREFIX-<i>\n"
    "  --fleet N                each producer has N connections and uses them in turn (1)\n"
    "  --exchange default|direct|topic|fanout|stream\n"
    "                           direct: key-<k> is bound to queue k modulo Q\n"
    "                           topic: the same with wildcards, K bindings\n"
    "                           fanout: every queue gets every message\n"
    "                           stream: the broker makes Q shard queues (x-shards) and spreads\n"
    "                           keys over them by hash\n"
    "  --virtual                with stream: consumers consume the exchange's name, and the\n"
    "                           broker divides the shards\n"
    "  --keys K                 each message gets one of K keys at random\n"
    "                           (1: producer p always uses queue p)\n"
    "  --consumer-queues N      queues of each consumer\n"
    "                           (default: all queues are divided among the consumers)\n"
    "  --seconds S --warmup W   measure for S after W (5, 0.5)\n"
    "  --messages N             publish exactly N, then wait for all of them; no warm-up;\n"
    "                           --seconds, if given, is a limit\n"
    "  --no-consume             only publish\n"
    "  --backlog                with --messages: consumers begin when all is published;\n"
    "                           their time is measured\n"
    "  --stream-queue           the queues are streams, read from their start\n"
    "                           (needs --prefetch and --ack-every)\n"
    "  --rpc WINDOW             producers send requests with amq.rabbitmq.reply-to, consumers\n"
    "                           answer; each producer has WINDOW requests under way\n"
    "  --ops connect|channel|queue|binding\n"
    "                           no messages: each producer does these operations;\n"
    "                           connect and channel: open and close\n"
    "  --pipeline N             with --ops queue and binding: requests that are sent before an\n"
    "                           answer is read (1)\n"
    "  --stall-consumer         consumers subscribe and never read\n"
    "  --idle N                 open N idle connections first\n"
    "                           (no load then, unless --producers or --consumers is given)\n"
    "  --latency                publish-to-deliver times (16 bytes of the body)\n"
    "  --check                  sequence numbers (16 bytes of the body): duplicates, gaps,\n"
    "                           disorder and damage are failures\n"
    "  --json --prefix NAME     JSON on the last line; prefix of the declared names (bench)\n"
    "  --keep                   do not delete the declared queues and exchange\n"
    "  --marks --hold           print @start, @end around the measured time;\n"
    "                           after the work print @hold, wait for a line\n";

enum {
    O_URL = 1, O_BODY, O_BATCH, O_CONFIRMS, O_PREFETCH, O_ACK, O_PERSISTENT, O_DURABLE, O_RATE,
    O_PRODUCERS, O_CONSUMERS, O_QUEUES, O_EXCHANGE, O_KEYS, O_CONSUMER_QUEUES, O_SECONDS, O_WARMUP,
    O_MESSAGES, O_NO_CONSUME, O_STALL, O_IDLE, O_LATENCY, O_CHECK, O_JSON, O_PREFIX, O_MARKS,
    O_HOLD, O_KEEP, O_VIRTUAL, O_BACKLOG, O_STREAM_QUEUE, O_RPC, O_OPS, O_PIPELINE, O_FLEET, O_SCAN,
    O_SCAN_PIECE, O_HELP,
};

static const struct option names[] = {
    {"url", 1, 0, O_URL}, {"body", 1, 0, O_BODY}, {"batch", 1, 0, O_BATCH},
    {"confirms", 1, 0, O_CONFIRMS}, {"prefetch", 1, 0, O_PREFETCH}, {"ack-every", 1, 0, O_ACK},
    {"persistent", 0, 0, O_PERSISTENT}, {"durable", 0, 0, O_DURABLE}, {"rate", 1, 0, O_RATE},
    {"producers", 1, 0, O_PRODUCERS}, {"consumers", 1, 0, O_CONSUMERS}, {"queues", 1, 0, O_QUEUES},
    {"exchange", 1, 0, O_EXCHANGE}, {"keys", 1, 0, O_KEYS},
    {"consumer-queues", 1, 0, O_CONSUMER_QUEUES}, {"seconds", 1, 0, O_SECONDS},
    {"warmup", 1, 0, O_WARMUP}, {"messages", 1, 0, O_MESSAGES}, {"no-consume", 0, 0, O_NO_CONSUME},
    {"stall-consumer", 0, 0, O_STALL}, {"idle", 1, 0, O_IDLE}, {"latency", 0, 0, O_LATENCY},
    {"check", 0, 0, O_CHECK}, {"json", 0, 0, O_JSON}, {"prefix", 1, 0, O_PREFIX},
    {"marks", 0, 0, O_MARKS}, {"hold", 0, 0, O_HOLD}, {"keep", 0, 0, O_KEEP},
    {"virtual", 0, 0, O_VIRTUAL}, {"backlog", 0, 0, O_BACKLOG},
    {"stream-queue", 0, 0, O_STREAM_QUEUE}, {"rpc", 1, 0, O_RPC}, {"ops", 1, 0, O_OPS},
    {"pipeline", 1, 0, O_PIPELINE}, {"fleet", 1, 0, O_FLEET}, {"scan-file", 1, 0, O_SCAN},
    {"scan-piece", 1, 0, O_SCAN_PIECE}, {"help", 0, 0, O_HELP},
    {0, 0, 0, 0},
};

static inline void bad_usage(const char *why) {
    fprintf(stderr, "amqpload: %s (--help lists the options)\n", why);
    exit(2);
}

static inline uint64_t number(const char *text, uint64_t max) {
    char *end;
    unsigned long long v = strtoull(text, &end, 10);
    if (end == text || *end || *text == '-' || v > max)
        bad_usage("a number is malformed or out of range");
    return v;
}

static inline double duration(const char *text) {
    char *end;
    double v = strtod(text, &end);
    if (end == text || *end || !(v >= 0 && v < 1e6))
        bad_usage("a time in seconds is malformed or out of range");
    return v;
}

static inline void parse_batch(const char *text) {
    char *unit;
    unsigned long long v = strtoull(text, &unit, 10);
    size_t factor = 0;
    if (!strcmp(unit, "K")) factor = 1 << 10;
    if (!strcmp(unit, "M")) factor = 1 << 20;
    if (!strcmp(unit, "B")) factor = 1;
    if (!v || v > 1 << 30 || (*unit && !factor))
        bad_usage("--batch takes a count of messages, or bytes as 64K, 1M or 4096B");
    opt.batch_bytes = factor * v;
    opt.batch_messages = factor ? 0 : v;
}

static inline void parse_exchange(const char *text) {
    static const char *const types[] = {"default", "direct", "topic", "fanout", "stream"};
    unsigned i = 0;
    while (i < 5 && strcmp(text, types[i])) i++;
    if (i == 5) bad_usage("--exchange is default, direct, topic, fanout or stream");
    opt.named = i > 0, opt.topic = i == 2, opt.fanout = i == 3, opt.sharded = i == 4;
    if (opt.named) opt.exchange_type = opt.sharded ? "x-consistent-hash" : types[i];
}

static inline void parse_operation(const char *text) {
    static const char *const kinds[] = {"", "connect", "channel", "queue", "binding"};
    for (opt.operation = OP_CONNECT; opt.operation <= OP_BINDING; opt.operation++)
        if (!strcmp(text, kinds[opt.operation])) break;
    if (opt.operation > OP_BINDING) bad_usage("--ops is connect, channel, queue or binding");
    opt.named = opt.operation == OP_BINDING;
}

/* Check the options together and fill in those that follow from others. */
static inline void settle(bool seconds_given, bool load_given) {
    if (!opt.broker.host[0]) bad_usage("--url is missing");
    if (opt.idle && !load_given) opt.producers = opt.consumers = 0;
    if (opt.no_consume || opt.operation) opt.consumers = 0;
    if (opt.backlog && (!opt.messages || !opt.consumers))
        bad_usage("--backlog needs --messages, and consumers");
    if (opt.stream_queue && !(opt.prefetch && opt.ack_every))
        bad_usage("--stream-queue needs --prefetch and --ack-every");
    if (opt.fleet && (opt.confirms || opt.batch_messages != 1))
        bad_usage("--fleet goes with --batch 1, without confirms");
    if (!opt.pipeline) bad_usage("--pipeline: at least 1");
    if (opt.stream_queue) opt.durable = true;
    if (opt.rpc && (opt.messages || opt.named || opt.confirms || opt.ack_every || !opt.consumers))
        bad_usage("--rpc goes by the default exchange, for a time, without acks");
    if (opt.rpc && opt.body_bytes > FRAME_BYTES_WANTED / 2)
        bad_usage("--rpc: a body fits one frame");
    if (opt.messages) {
        opt.warmup = 0;
        if (!seconds_given) opt.seconds = 1e6;
    }
    if ((opt.check || opt.latency || opt.rpc) && opt.body_bytes < STAMP_BYTES)
        bad_usage("--check, --latency and --rpc need bodies of 16 bytes");
    if (!opt.queues || !opt.keys) bad_usage("at least one queue and one key");
    if (!opt.named && opt.keys > opt.queues)
        bad_usage("the default exchange has one key per queue: --keys is at most --queues");
    if ((opt.sharded || opt.fanout) && opt.check)
        bad_usage("--check must know each key's queue: not with --exchange stream or fanout");
    if (opt.virtual && !opt.sharded) bad_usage("--virtual is of --exchange stream");
    if (opt.virtual) opt.consumer_queues = 1;
    if (opt.prefetch && opt.ack_every > opt.prefetch)
        bad_usage("--ack-every above --prefetch would wait for ever");
    if (!opt.consumer_queues && opt.consumers)
        opt.consumer_queues = (opt.queues + opt.consumers - 1) / opt.consumers;
    if (opt.consumer_queues > opt.queues) bad_usage("--consumer-queues above --queues");
}

static inline void parse_options(
    int argc, char **argv, const char **scan_file, size_t *scan_piece) {
    bool seconds_given = false, load_given = false;
    const char *url = getenv("AMQPLOAD_URL");
    if (url && !parse_url(url, &opt.broker)) bad_usage("AMQPLOAD_URL is not amqp://host...");
    for (int o; (o = getopt_long(argc, argv, "", names, NULL)) != -1;) switch (o) {
            case O_URL:
                if (!parse_url(optarg, &opt.broker)) bad_usage("--url is not amqp://host...");
                break;
            case O_BODY: opt.body_bytes = number(optarg, BODY_BYTES_MAX); break;
            case O_BATCH: parse_batch(optarg); break;
            case O_CONFIRMS: opt.confirms = number(optarg, 1 << 24); break;
            case O_PREFETCH: opt.prefetch = number(optarg, 65535); break;
            case O_ACK: opt.ack_every = number(optarg, 1 << 24); break;
            case O_PERSISTENT: opt.persistent = true; break;
            case O_DURABLE: opt.durable = true; break;
            case O_RATE: opt.rate = number(optarg, 1000000000); break;
            case O_PRODUCERS:
                opt.producers = number(optarg, PRODUCERS_MAX), load_given = true;
                break;
            case O_CONSUMERS:
                opt.consumers = number(optarg, PRODUCERS_MAX), load_given = true;
                break;
            case O_QUEUES: opt.queues = number(optarg, QUEUES_MAX); break;
            case O_EXCHANGE: parse_exchange(optarg); break;
            case O_KEYS: opt.keys = number(optarg, 1 << 20); break;
            case O_CONSUMER_QUEUES: opt.consumer_queues = number(optarg, QUEUES_MAX); break;
            case O_SECONDS: opt.seconds = duration(optarg), seconds_given = true; break;
            case O_WARMUP: opt.warmup = duration(optarg); break;
            case O_MESSAGES: opt.messages = number(optarg, 1ull << 40); break;
            case O_NO_CONSUME: opt.no_consume = true; break;
            case O_STALL: opt.stall = true; break;
            case O_IDLE: opt.idle = number(optarg, 1000000); break;
            case O_LATENCY: opt.latency = true; break;
            case O_CHECK: opt.check = true; break;
            case O_JSON: opt.json = true; break;
            case O_PREFIX: opt.prefix = optarg; break;
            case O_MARKS: opt.marks = true; break;
            case O_HOLD: opt.hold = true; break;
            case O_VIRTUAL: opt.virtual = true; break;
            case O_KEEP: opt.keep = true; break;
            case O_BACKLOG: opt.backlog = true; break;
            case O_STREAM_QUEUE: opt.stream_queue = true; break;
            case O_RPC: opt.rpc = number(optarg, 1 << 16); break;
            case O_OPS: parse_operation(optarg); break;
            case O_FLEET: opt.fleet = number(optarg, 65535); break;
            case O_PIPELINE: opt.pipeline = number(optarg, 1 << 16); break;
            case O_SCAN: *scan_file = optarg; return;
            case O_SCAN_PIECE: *scan_piece = number(optarg, READ_BYTES); break;
            case O_HELP: fputs(usage, stdout); exit(0);
        default: bad_usage("unknown option");
        }
    if (optind < argc) bad_usage("arguments without an option");
    settle(seconds_given, load_given);
}

#endif
