/* amqpload: the load generator. It starts producers and consumers, measures, reports and cleans up.
 *
 * Exit status: 0 for success, 1 when something failed or a message was lost, refused, repeated or
 * damaged, 2 for wrong usage. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/resource.h>

#include "consumer.h"
#include "operations.h"
#include "producer.h"
#include "rpc.h"

enum { READY_MS_MAX = 60000, DELIVERY_STALL_MS_MAX = 10000, TICK_US = 2000 };

static producer *producers;
static consumer *consumers;

typedef struct {
    uint64_t time, published, consumed, bytes;
} totals;

static totals total(void) {
    totals t = {.time = now_ns()};
    for (uint64_t i = 0; i < opt.producers; i++) t.published += producers[i].published.messages;
    for (uint64_t i = 0; i < opt.producers; i++)
        t.consumed += producers[i].answered.messages, t.bytes += producers[i].answered.bytes;
    if (!opt.rpc)
        for (uint64_t i = 0; i < opt.consumers; i++)
            t.consumed += consumers[i].consumed.messages, t.bytes += consumers[i].consumed.bytes;
    return t;
}

static void mark(const char *what) {
    if (!opt.marks && strcmp(what, "@hold")) return;
    puts(what);
    fflush(stdout);
}

/* ---- declarations ---------------------------------------------------------------------------- */

/* Delete a queue or exchange. By the specification a delete of a missing queue closes the
 * channel, which RabbitMQ does not do; after such a refusal the channel is opened again. */
static bool delete_one(connection *c, bool exchange, const char *name) {
    buffer b = {0};
    begin_method(&b, 1, exchange ? EXCHANGE_DELETE : QUEUE_DELETE);
    put16(&b, 0), put_short(&b, name), put8(&b, 0);
    end_frame(&b);
    c->channel_may_close = true;
    bool done = call(c, &b, exchange ? EXCHANGE_DELETE_OK : QUEUE_DELETE_OK, "a delete");
    c->channel_may_close = false;
    free(b.bytes);
    return done || (c->refused && open_channel(c));
}

static bool delete_all(connection *c) {
    char name[256];
    bool done = !opt.named || delete_one(c, true, exchange_name());
    for (uint64_t i = 0; i < opt.queues && done; i++)
        queue_name(name, sizeof name, i), done = delete_one(c, false, name);
    return done;
}

static bool declare_queue(connection *c, buffer *b, uint64_t i) {
    char name[256];
    queue_name(name, sizeof name, i);
    begin_method(b, 1, QUEUE_DECLARE);
    put16(b, 0), put_short(b, name), put8(b, opt.durable ? 2 : 0);
    if (opt.stream_queue)
        put32(b, 24), put_short(b, "x-queue-type"), put8(b, 'S'), put_long(b, "stream", 6);
    else put32(b, 0);
    end_frame(b);
    return call(c, b, QUEUE_DECLARE_OK, "queue.declare");
}

static bool bind_key(connection *c, buffer *b, uint64_t k) {
    char name[256], key[256];
    queue_name(name, sizeof name, k % opt.queues);
    binding_key(key, sizeof key, k);
    begin_method(b, 1, QUEUE_BIND);
    put16(b, 0), put_short(b, name), put_short(b, exchange_name()), put_short(b, key), put8(b, 0),
        put32(b, 0);
    end_frame(b);
    return call(c, b, QUEUE_BIND_OK, "queue.bind");
}

static bool declare_exchange(connection *c, buffer *b) {
    begin_method(b, 1, EXCHANGE_DECLARE);
    put16(b, 0), put_short(b, exchange_name()), put_short(b, opt.exchange_type);
    put8(b, opt.durable ? 2 : 0);
    if (opt.sharded)
        put32(b, 14), put_short(b, "x-shards"), put8(b, 'I'), put32(b, (uint32_t)opt.queues);
    else put32(b, 0);
    end_frame(b);
    return call(c, b, EXCHANGE_DECLARE_OK, "exchange.declare");
}

/* Declare everything. The remains of an earlier run are deleted first: they may have other
 * arguments. */
static bool declare_all(connection *c) {
    buffer b = {0};
    bool done = delete_all(c);
    for (uint64_t i = 0; i < opt.queues && done && !opt.sharded; i++)
        done = declare_queue(c, &b, i);
    if (opt.named && done) done = declare_exchange(c, &b);
    if (opt.named && !opt.sharded && !opt.operation) {
        /* with --keys 1 producer p uses key p; a fanout exchange ignores keys */
        uint64_t keys =
            opt.keys > opt.queues && strcmp(opt.exchange_type, "fanout") ? opt.keys : opt.queues;
        for (uint64_t k = 0; k < keys && done; k++) done = bind_key(c, &b, k);
    }
    free(b.bytes);
    return done;
}

/* ---- the run --------------------------------------------------------------------------------- */

static bool all_ready(void) {
    for (uint64_t i = 0; i < opt.producers; i++) if (!producers[i].ready) return false;
    for (uint64_t i = 0; i < opt.consumers; i++) if (!consumers[i].ready) return false;
    return true;
}

static bool all_published(void) {
    for (uint64_t i = 0; i < opt.producers; i++) if (!producers[i].done) return false;
    return opt.producers > 0;
}

static void start_threads(pthread_t *threads) {
    for (uint64_t i = 0; i < opt.consumers; i++) {
        consumers[i].index = (unsigned)i;
        pthread_create(
            &threads[opt.producers + i], NULL, opt.rpc ? answer_requests : consume, &consumers[i]);
    }
    for (uint64_t i = 0; i < opt.producers; i++) {
        producers[i].index = (unsigned)i;
        uint64_t share = opt.messages / opt.producers + (i < opt.messages % opt.producers);
        producers[i].limit = opt.messages ? share : UINT64_MAX;
        pthread_create(&threads[i], NULL, opt.operation ? operate : opt.rpc ? ask : produce,
            &producers[i]);
    }
    uint64_t give_up = now_ns() + (uint64_t)READY_MS_MAX * 1000000u;
    while (!all_ready() && !stop) {
        usleep(TICK_US);
        if (now_ns() > give_up) fail("connections were not ready within %d s", READY_MS_MAX / 1000);
    }
}

/* Wait until the time is up or, with --messages, until everything is published and, with consumers,
 * delivered. */
static void wait_to_the_end(uint64_t until) {
    uint64_t moved_at = now_ns(), moved = 0;
    while (!stop && now_ns() < until) {
        usleep(TICK_US);
        if (!opt.messages) continue;
        totals t = total();
        if (t.consumed + t.published != moved) moved = t.consumed + t.published, moved_at = t.time;
        if (all_published() &&
            (!opt.consumers || opt.stall || t.consumed >= t.published * copies()))
            return;
        if (all_published() && t.time - moved_at > (uint64_t)DELIVERY_STALL_MS_MAX * 1000000u)
            return; /* reported as missing */
    }
}

static void drain(void) {
    uint64_t moved_at = now_ns(), moved = 0;
    for (totals t = total(); !stop && t.consumed < t.published * copies(); t = total()) {
        if (t.consumed != moved) moved = t.consumed, moved_at = t.time;
        if (t.time - moved_at > (uint64_t)DELIVERY_STALL_MS_MAX * 1000000u) return;
        usleep(TICK_US);
    }
}

/* Wait until everything is published and return the seconds that took. */
static double fill(void) {
    uint64_t since = now_ns();
    while (!all_published() && !stop) usleep(TICK_US);
    return (double)(now_ns() - since) / 1e9;
}

static double fill_seconds;

static void run(totals *from, totals *to) {
    pthread_t *threads = calloc(opt.producers + opt.consumers + 1, sizeof *threads);
    start_threads(threads);
    go = true;
    if (opt.backlog) fill_seconds = fill();
    uint64_t begun = now_ns(), warm = begun + (uint64_t)(opt.warmup * 1e9);
    while (!stop && now_ns() < warm) usleep(TICK_US);
    mark("@start");
    *from = total();
    if (opt.messages) from->time = begun, from->published = from->consumed = from->bytes = 0;
    measuring = true;
    filled = true;
    wait_to_the_end(from->time + (uint64_t)(opt.seconds * 1e9));
    measuring = false;
    *to = total();
    mark("@end");
    publishing = false;
    for (uint64_t i = 0; i < opt.producers; i++) pthread_join(threads[i], NULL);
    if (opt.consumers && !opt.stall && (opt.check || opt.messages)) drain();
    drained = true;
    if (opt.hold && !stop) mark("@hold"), getchar();
    for (uint64_t i = 0; i < opt.consumers; i++) pthread_join(threads[opt.producers + i], NULL);
    free(threads);
}

/* ---- the report ------------------------------------------------------------------------------ */

typedef struct {
    uint64_t published, consumed, confirmed, nacked, duplicates, gaps, damaged, missing;
    double seconds, rate, published_per_s, consumed_per_s, bytes_per_s, blocked_s;
    histogram confirm_times, delivery_times;
} report;

static report *summary(const totals *from, const totals *to) {
    report *r = calloc(1, sizeof *r);
    totals end = total();
    r->published = end.published, r->consumed = end.consumed;
    r->seconds = fmax((double)(to->time - from->time) / 1e9, 1e-9);
    r->published_per_s = (double)(to->published - from->published) / r->seconds;
    r->consumed_per_s = (double)(to->consumed - from->consumed) / r->seconds;
    r->bytes_per_s = (double)(to->bytes - from->bytes) / r->seconds;
    if (opt.backlog)
        r->published_per_s = fill_seconds > 0 ? (double)r->published / fill_seconds : 0;
    /* publishes a second that arrived at all their queues; with --backlog only the deliveries
     * count */
    r->rate = fmin(opt.backlog ? INFINITY : r->published_per_s,
        opt.consumers ? r->consumed_per_s / (double)copies() : INFINITY);
    if (!opt.producers) r->rate = 0;
    for (uint64_t i = 0; i < opt.producers; i++) {
        r->confirmed += producers[i].confirmed, r->nacked += producers[i].nacked,
            r->blocked_s += (double)producers[i].blocked_ns / 1e9;
        histogram_merge(opt.operation || opt.rpc ? &r->delivery_times : &r->confirm_times,
            &producers[i].confirm_times);
    }
    for (uint64_t i = 0; i < opt.consumers; i++) {
        r->duplicates += consumers[i].duplicates, r->gaps += consumers[i].gaps,
            r->damaged += consumers[i].damaged;
        histogram_merge(&r->delivery_times, &consumers[i].delivery_times);
    }
    bool whole = opt.consumers && !opt.stall && (opt.check || opt.messages);
    if (whole && r->published * copies() > r->consumed)
        r->missing = r->published * copies() - r->consumed;
    return r;
}

static void judge(const report *r) {
    if (r->missing) fail("%" PRIu64 " messages were not delivered", r->missing);
    if (opt.producers && !opt.stall && !r->published)
        fail("nothing could be published%s",
            r->blocked_s > 0 ? ": connection.blocked all the time" : "");
    if (r->nacked) fail("%" PRIu64 " messages were refused (basic.nack)", r->nacked);
    if (r->duplicates || r->gaps || r->damaged)
        fail("%" PRIu64 " messages twice or out of order, %" PRIu64
             " missing between others, %" PRIu64 " damaged",
            r->duplicates, r->gaps, r->damaged);
}

static void print_json(const report *r) {
    printf(
        "{\"published\": %" PRIu64 ", \"consumed\": %" PRIu64
        ", \"seconds\": %.4f, \"rate\": %.1f, \"published_per_s\": %.1f, \"consumed_per_s\": %.1f, "
        "\"bytes_per_s\": %.0f, \"confirmed\": %" PRIu64 ", \"nacked\": %" PRIu64
        ", \"missing\": %" PRIu64 ", \"duplicates\": %" PRIu64 ", \"gaps\": %" PRIu64
        ", \"damaged\": %" PRIu64 ", \"blocked_s\": %.3f",
        r->published, r->consumed, r->seconds, r->rate, r->published_per_s, r->consumed_per_s,
        r->bytes_per_s, r->confirmed, r->nacked, r->missing, r->duplicates, r->gaps, r->damaged,
        r->blocked_s);
    histogram_json(stdout, "confirm_us", &r->confirm_times);
    histogram_json(stdout, "latency_us", &r->delivery_times);
    printf(", \"error\": ");
    printf(failed ? "\"%s\"}\n" : "null}\n", failure);
}

static void print_text(const report *r) {
    if (opt.operation) printf("%.3f s: %.0f operations/s\n", r->seconds, r->rate);
    else
        printf("%.3f s: published %.0f/s, consumed %.0f/s (%.1f MB/s); in all %" PRIu64
               " and %" PRIu64 "\n",
            r->seconds, r->published_per_s, r->consumed_per_s, r->bytes_per_s / 1e6, r->published,
            r->consumed);
    histogram_text(stdout, "confirm", &r->confirm_times);
    const char *what =
        opt.operation ? "one operation" : opt.rpc ? "request to reply" : "publish to deliver";
    histogram_text(stdout, what, &r->delivery_times);
    if (r->blocked_s > 0) printf("blocked by the broker for %.3f s\n", r->blocked_s);
    if (failed) fprintf(stderr, "amqpload: %s\n", failure);
}

/* ---- the scanner alone, for its test --------------------------------------------------------- */

static uint64_t methods_seen, acks_due;
static void count_method(
    scanner *s, unsigned channel, uint32_t method, const uint8_t *arguments, size_t bytes) {
    (void)s, (void)channel, (void)method, (void)arguments, (void)bytes;
    methods_seen++;
}
static void count_ack(scanner *s) { (void)s, acks_due++; }

/* Scan a file of frames, `piece` bytes at a time, as a socket would give them. */
static int scan_file(const char *path, size_t piece) {
    FILE *file = fopen(path, "rb");
    if (!file) return perror(path), 2;
    scanner s = {.frame_bytes_max = FRAME_BYTES_WANTED,
        .on_method = count_method,
        .on_ack_due = count_ack,
        .ack_every = 2,
        .until_ack = 2};
    uint8_t *input = malloc(INPUT_BYTES);
    size_t kept = 0, n;
    while (!s.error && (n = fread(input + kept, 1, piece, file)) > 0) {
        kept += n;
        size_t taken = scan_frames(&s, input, kept);
        memmove(input, input + taken, kept -= taken);
    }
    fclose(file), free(input);
    printf("{\"messages\": %" PRIu64 ", \"bytes\": %" PRIu64 ", \"methods\": %" PRIu64
           ", \"acks_due\": %" PRIu64 ", \"last_tag\": %" PRIu64
           ", \"kept\": %zu, \"error\": \"%s\"}\n",
        s.messages, s.message_bytes, methods_seen, acks_due, s.last_tag, kept,
        s.error ? s.error : "");
    return s.error ? 1 : 0;
}

static void allow_many_connections(void) {
    struct rlimit r;
    if (getrlimit(RLIMIT_NOFILE, &r)) return;
    r.rlim_cur = r.rlim_max;
    setrlimit(RLIMIT_NOFILE, &r);
}

static void open_idle(void) {
    for (uint64_t i = 0; i < opt.idle && !stop; i++)
        open_connection(&opt.broker); /* stays open until the process ends */
}

/* Set when a signal ends the run. As after a failure, the declared things are deleted all the
 * same. */
static volatile sig_atomic_t interrupted;
static void interrupt(int number) {
    (void)number;
    interrupted = 1, stop = true;
}

int main(int argc, char **argv) {
    const char *file = NULL;
    size_t piece = READ_BYTES;
    parse_options(argc, argv, &file, &piece);
    if (file) return scan_file(file, piece);
    signal(SIGPIPE, SIG_IGN);
    signal(SIGINT, interrupt), signal(SIGTERM, interrupt);
    sem_init(&logins, 0, LOGINS_AT_ONCE);
    prctl(PR_SET_TIMERSLACK, 1); /* paced publishing has steps of 50 us */
    allow_many_connections();
    producers = aligned_alloc(64, (opt.producers + 1) * sizeof *producers);
    consumers = aligned_alloc(64, (opt.consumers + 1) * sizeof *consumers);
    memset(producers, 0, (opt.producers + 1) * sizeof *producers);
    memset(consumers, 0, (opt.consumers + 1) * sizeof *consumers);
    connection *control = open_connection(&opt.broker);
    bool declared = control && (opt.producers + opt.consumers == 0 || declare_all(control));
    totals from = {0}, to = {0};
    if (declared) open_idle();
    if (declared && !stop) run(&from, &to);
    report *r = summary(&from, &to);
    if (interrupted) fail("interrupted");
    judge(r);
    for (uint64_t i = 0; i < opt.consumers; i++) if (consumers[i].c) close(consumers[i].c->fd);
    if (opt.operation == OP_QUEUE && declared && !control->closed && !opt.keep)
        delete_declared(control, producers);
    if (declared && !control->closed && opt.producers + opt.consumers && !opt.keep)
        delete_all(control);
    if (control && !control->closed) close_politely(control, CLOSE_MS);
    opt.json ? print_json(r) : print_text(r);
    return failed ? 1 : 0;
}
