/* A producer: a thread with a connection and blocks of messages that are encoded before the clock
 * starts.
 *
 * A block is a run of encoded publishes; a write is a part of one block. During the run only the
 * stamps in the bodies change. While a write waits for the socket, confirms and
 * connection.blocked are read, so neither side waits for the other. */
#ifndef AMQPLOAD_PRODUCER_H
#define AMQPLOAD_PRODUCER_H

#include "options.h"

/* With random keys there are enough blocks that a broker cannot learn them, and few enough that
 * they stay in the cache. */
enum {
    BLOCKS_OF_KEYS = 16,
    BLOCK_MESSAGES = 1024,
    BLOCK_BYTES_MAX = 4 << 20,
    READ_EVERY_WRITES = 64,
    CLOSE_MS = 2000,
    DRAIN_MS = 60000
};

typedef struct {
    buffer encoded;
    uint64_t messages;
    size_t *start, *body; /* [messages + 1], [messages] */
    uint16_t *queue;
} block;

typedef struct {
    unsigned index;
    connection *c, **fleet;      /* fleet: all connections; c is the next to use */
    counter published, answered; /* answered: replies with --rpc */
    block *blocks;
    unsigned block_count, block_at;
    uint64_t at, write_messages; /* message in the block; messages of a full write */
    uint64_t sent, limit;
    uint32_t *sequences;         /* [queues] */
    uint64_t *sent_at; /* ring: the time of each unconfirmed message, 0 for a confirmed one */
    uint64_t ring_mask, lowest, outstanding, confirmed, nacked;
    uint8_t *request;            /* the encoded request of --rpc */
    size_t request_bytes, request_body;
    buffer output;
    uint64_t due_from, behind_since, blocked_ns;
    histogram confirm_times;
    atomic_bool ready, done;
} producer;

static inline void encode_block(
    producer *p, block *b, const uint8_t *body, uint64_t messages, unsigned *seed) {
    *b = (block){.messages = messages,
        .start = calloc(messages + 1, sizeof(size_t)),
        .body = calloc(messages, sizeof(size_t)),
        .queue = calloc(messages, sizeof(uint16_t))};
    for (uint64_t i = 0; i < messages; i++) {
        char key[256];
        uint64_t k = opt.keys > 1 ? (uint64_t)rand_r(seed) % opt.keys : p->index % opt.queues;
        routing_key(key, sizeof key, k);
        b->queue[i] = (uint16_t)(k % opt.queues);
        b->start[i] = b->encoded.size;
        b->body[i] = put_publish(&b->encoded, exchange_name(), key, body, opt.body_bytes,
            opt.persistent, p->c->frame_bytes_max);
    }
    b->start[messages] = b->encoded.size;
}

static inline void encode_blocks(producer *p) {
    uint8_t *body = malloc(opt.body_bytes + 1);
    fill_pattern(body, opt.body_bytes);
    unsigned seed = 1 + p->index;
    block probe;
    encode_block(p, &probe, body, 1, &seed);
    uint64_t message_bytes = probe.encoded.size, messages = opt.batch_messages;
    if (opt.batch_bytes) messages = opt.batch_bytes / message_bytes;
    p->write_messages = messages = messages ? messages : 1;
    /* Short writes share a block. A block stays within BLOCK_BYTES_MAX unless one write is
     * longer. */
    if (messages < BLOCK_MESSAGES) messages = BLOCK_MESSAGES;
    if (messages * message_bytes > BLOCK_BYTES_MAX) messages = BLOCK_BYTES_MAX / message_bytes;
    if (messages < p->write_messages) messages = p->write_messages;
    messages -= messages % p->write_messages;
    p->block_count = opt.keys > 1 ? BLOCKS_OF_KEYS : 1;
    p->blocks = calloc(p->block_count, sizeof(block));
    for (unsigned i = 0; i < p->block_count; i++)
        encode_block(p, &p->blocks[i], body, messages, &seed);
    free(body);
}

/* ---- confirms -------------------------------------------------------------------------------- */

static inline void confirm_one(producer *p, uint64_t tag, uint64_t now) {
    uint64_t *slot = &p->sent_at[tag & p->ring_mask];
    if (!*slot) { fail("message %llu was confirmed twice", (unsigned long long)tag); return; }
    if (measuring) histogram_add(&p->confirm_times, now - *slot, 1);
    *slot = 0;
    p->outstanding--;
}

/* Take a confirm. Tags start at 1; `lowest` is the first unconfirmed tag. */
static inline void on_confirm(connection *c, uint64_t tag, bool multiple, bool positive) {
    producer *p = c->owner;
    uint64_t now = now_ns(), before = p->outstanding;
    if (tag == 0 && multiple) tag = p->sent;
    if (tag > p->sent || tag < p->lowest) {
        fail("message %llu was confirmed, which is not outstanding", (unsigned long long)tag);
        return;
    }
    if (!multiple) confirm_one(p, tag, now);
    else for (uint64_t i = p->lowest; i <= tag; i++)
        if (p->sent_at[i & p->ring_mask]) confirm_one(p, i, now);
    while (p->lowest <= p->sent && !p->sent_at[p->lowest & p->ring_mask]) p->lowest++;
    *(positive ? &p->confirmed : &p->nacked) += before - p->outstanding;
}

static inline uint64_t confirm_room(const producer *p) {
    uint64_t window = opt.confirms > p->outstanding ? opt.confirms - p->outstanding : 0;
    uint64_t ring = p->ring_mask - (p->sent + 1 - p->lowest);
    return window < ring ? window : ring;
}

static inline void prepare_confirms(producer *p) {
    uint64_t size = 2;
    while (size < opt.confirms * 4)
        size *= 2; /* confirms out of order may spread over more than the window */
    p->ring_mask = size - 1;
    p->sent_at = calloc(size, sizeof(uint64_t));
    p->c->on_confirm = on_confirm;
    p->c->owner = p;
    buffer b = {0};
    begin_method(&b, 1, CONFIRM_SELECT), put8(&b, 0);
    end_frame(&b);
    call(p->c, &b, CONFIRM_SELECT_OK, "confirm.select");
    free(b.bytes);
}

/* ---- pace ------------------------------------------------------------------------------------ */

static inline uint64_t due_time(const producer *p, uint64_t message) {
    double each = 1e9 * (double)opt.producers / (double)opt.rate;
    return p->due_from +
           (uint64_t)(((double)message + (double)p->index / (double)opt.producers) * each);
}

/* Return how many messages are due. Wait for the first one if none is, and read meanwhile. */
static inline uint64_t due_messages(producer *p) {
    uint64_t now = now_ns(), next = due_time(p, p->sent);
    if (next > now) {
        struct timespec t = {.tv_nsec = (long)(next - now < 100000000u ? next - now : 100000000u)};
        struct pollfd f = {.fd = p->c->fd, .events = POLLIN};
        if (ppoll(&f, 1, &t, NULL) > 0) receive(p->c, MSG_DONTWAIT);
        now = now_ns();
    }
    uint64_t n = 0;
    while (n < p->write_messages && due_time(p, p->sent + n) <= now) n++;
    return n;
}

/* ---- publishing ------------------------------------------------------------------------------ */

/* Return the time for a stamp: now, or the due time of a message that became due while the
 * broker did not read. */
static inline uint64_t stamp_time(const producer *p, uint64_t message, uint64_t now) {
    if (!opt.rate || !p->behind_since) return now;
    uint64_t due = due_time(p, message);
    return due < now ? due : now;
}

static inline void stamp_messages(producer *p, block *b, uint64_t n, uint64_t now) {
    for (uint64_t i = 0; i < n; i++) {
        uint64_t m = p->at + i;
        stamp s = {.producer = (uint16_t)p->index,
            .queue = b->queue[m],
            .sequence = p->sequences[b->queue[m]]++};
        s.time = opt.latency ? stamp_time(p, p->sent + i, now) : stamp_hash(&s);
        memcpy(b->encoded.bytes + b->body[m], &s, sizeof s);
    }
}

/* Write a batch. Return false when the run ends in the middle of the write: the connection is
 * then of no more use. */
static inline bool write_messages(producer *p, const uint8_t *bytes, size_t size) {
    p->behind_since = 0;
    for (size_t at = 0; at < size;) {
        ssize_t n = send(p->c->fd, bytes + at, size - at, MSG_NOSIGNAL | MSG_DONTWAIT);
        if (n > 0) { at += (size_t)n; continue; }
        if (n < 0 && errno != EAGAIN && errno != EINTR) {
            receive(p->c, MSG_DONTWAIT); /* the broker may have sent the reason */
            return fail("cannot write: %s", strerror(errno)), false;
        }
        uint64_t since = now_ns();
        if (!p->behind_since) p->behind_since = since;
        if (wait_for(p->c, POLLIN | POLLOUT, POLL_MS) & POLLIN) receive(p->c, MSG_DONTWAIT);
        if (p->c->blocked) p->blocked_ns += now_ns() - since;
        if (stop || !publishing) {
            /* a broker takes a frame that is cut short for an error, so the write goes on while
             * the broker reads */
            if (stop || now_ns() - p->behind_since > (uint64_t)CLOSE_MS * 1000000u) return false;
        }
    }
    return true;
}

static inline bool publish_some(producer *p, uint64_t n) {
    block *b = &p->blocks[p->block_at];
    if (n > b->messages - p->at) n = b->messages - p->at;
    if (opt.confirms || opt.check || opt.latency) {
        uint64_t now = now_ns();
        if (opt.check || opt.latency) stamp_messages(p, b, n, now);
        if (opt.confirms)
            for (uint64_t i = 1; i <= n; i++) p->sent_at[(p->sent + i) & p->ring_mask] = now;
    }
    /* count the messages before they are sent: a confirm may come while the rest of the write
     * waits */
    p->sent += n;
    p->outstanding += opt.confirms ? n : 0;
    const uint8_t *bytes = b->encoded.bytes + b->start[p->at];
    size_t size = b->start[p->at + n] - b->start[p->at];
    p->at += n;
    if (p->at == b->messages) p->at = 0, p->block_at = (p->block_at + 1) % p->block_count;
    if (!write_messages(p, bytes, size)) { p->sent -= n; return false; }
    count(&p->published, p->sent, p->sent * opt.body_bytes);
    return true;
}

static inline bool open_fleet(producer *p) {
    p->fleet = calloc(opt.fleet, sizeof *p->fleet);
    for (uint64_t i = 0; i < opt.fleet; i++)
        if (!(p->fleet[i] = i ? open_connection(&opt.broker) : p->c)) return false;
    return true;
}

static inline bool publish_until_told(producer *p) {
    for (unsigned writes = 0; !stop && publishing && p->sent < p->limit; writes++) {
        uint64_t n = p->write_messages, left = p->limit - p->sent, since;
        if (p->fleet) p->c = p->fleet[p->sent % opt.fleet];
        if (p->c->blocked) {
            since = now_ns();
            receive(p->c, 0);
            p->blocked_ns += now_ns() - since;
            continue;
        }
        if (opt.confirms) {
            uint64_t room = confirm_room(p);
            if (!room) { receive(p->c, 0); continue; }
            if (n > room) n = room;
        }
        if (opt.rate) {
            uint64_t due = due_messages(p);
            if (!due) continue;
            if (n > due) n = due;
        }
        if (!publish_some(p, n < left ? n : left)) return false;
        if (opt.confirms || writes % READ_EVERY_WRITES == 0) receive(p->c, MSG_DONTWAIT);
    }
    return true;
}

static inline void finish(producer *p) {
    uint64_t give_up = now_ns() + (uint64_t)DRAIN_MS * 1000000u;
    while (p->outstanding && !stop && now_ns() < give_up) receive(p->c, 0);
    if (p->outstanding && !stop)
        fail("%llu messages were not confirmed within %d s", (unsigned long long)p->outstanding,
            DRAIN_MS / 1000);
    if (!close_politely(p->c, opt.messages && !opt.stall ? DRAIN_MS : CLOSE_MS) && opt.messages &&
        !opt.stall && !stop)
        fail("the broker did not answer connection.close within %d s", DRAIN_MS / 1000);
}

static inline void *produce(void *argument) {
    producer *p = argument;
    p->lowest = 1;
    p->sequences = calloc(opt.queues, sizeof(uint32_t));
    p->c = open_connection(&opt.broker);
    if (p->c && opt.confirms) prepare_confirms(p);
    if (p->c) encode_blocks(p);
    if (p->c && opt.fleet > 1 && !open_fleet(p)) p->c = NULL;
    p->ready = true;
    while (!go && !stop) usleep(1000);
    p->due_from = now_ns();
    if (p->c && !stop && publish_until_told(p)) finish(p);
    p->done = true;
    return NULL;
}

#endif
