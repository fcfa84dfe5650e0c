/* A consumer: a thread with a connection and one or more queues. It counts, acknowledges and, with
 * --check, checks messages. */
#ifndef AMQPLOAD_CONSUMER_H
#define AMQPLOAD_CONSUMER_H

#include "options.h"

typedef struct {
    unsigned index;
    connection *c;
    counter consumed;
    buffer acks;               /* whole frames to write: acks, or replies with --rpc */
    char reply_to[256];        /* the reply-to of the request that is being read */
    uint64_t acked_tag, now;
    uint32_t *next;            /* [producers * queues]: the next sequence number */
    uint8_t *pattern;
    bool shared;               /* others consume the same queues: numbers rise, but with gaps */
    uint64_t duplicates, gaps, damaged;
    histogram delivery_times;
    atomic_bool ready;
} consumer;

static inline void on_ack_due(scanner *s) {
    consumer *k = ((connection *)s->owner)->owner;
    /* as clients do: one each, or many at once */
    put_ack(&k->acks, s->last_tag, opt.ack_every > 1);
    k->acked_tag = s->last_tag;
}

static inline void check_stamp(consumer *k, const stamp *s) {
    if (s->producer >= opt.producers || s->queue >= opt.queues ||
        (!opt.latency && s->time != stamp_hash(s))) {
        k->damaged++;
        return;
    }
    uint32_t *next = &k->next[s->producer * opt.queues + s->queue];
    if (s->sequence < *next) { k->duplicates++; return; } /* or out of order */
    if (!k->shared) k->gaps += s->sequence - *next;
    *next = s->sequence + 1;
}

static inline void on_body(scanner *s, const uint8_t *piece, size_t bytes) {
    consumer *k = ((connection *)s->owner)->owner;
    size_t skip = s->body_at ? 0 : STAMP_BYTES;
    if (s->body_bytes != opt.body_bytes || (skip && bytes < STAMP_BYTES)) {
        k->damaged += s->body_at == 0;
        return;
    }
    if (skip) {
        stamp got;
        memcpy(&got, piece, sizeof got);
        if (opt.latency && measuring)
            histogram_add(&k->delivery_times, k->now > got.time ? k->now - got.time : 0, 1);
        if (opt.check) check_stamp(k, &got);
    }
    if (opt.check && memcmp(piece + skip, k->pattern + s->body_at + skip, bytes - skip))
        k->damaged++;
}

static inline bool subscribe(consumer *k) {
    buffer b = {0};
    bool done = true;
    if (opt.prefetch && opt.ack_every) {
        begin_method(&b, 1, BASIC_QOS);
        put32(&b, 0), put16(&b, (unsigned)opt.prefetch), put8(&b, 0);
        end_frame(&b);
        done = call(k->c, &b, BASIC_QOS_OK, "basic.qos");
    }
    for (uint64_t i = 0; i < opt.consumer_queues && done; i++) {
        char queue[256], tag[32];
        if (opt.virtual) snprintf(queue, sizeof queue, "%s", exchange_name());
        else queue_name(queue, sizeof queue, (k->index * opt.consumer_queues + i) % opt.queues);
        snprintf(tag, sizeof tag, "c%llu", (unsigned long long)i);
        begin_method(&b, 1, BASIC_CONSUME);
        put16(&b, 0), put_short(&b, queue), put_short(&b, tag), put8(&b, opt.ack_every ? 0 : 2);
        if (opt.stream_queue)
            put32(&b, 26), put_short(&b, "x-stream-offset"), put8(&b, 'S'),
                put_long(&b, "first", 5);
        else put32(&b, 0);
        end_frame(&b);
        done = call(k->c, &b, BASIC_CONSUME_OK, "basic.consume");
    }
    free(b.bytes);
    return done;
}

static inline void flush_acks(consumer *k) {
    if (k->acks.size) write_all(k->c, k->acks.bytes, k->acks.size);
    k->acks.size = 0;
}

static inline void read_until_told(consumer *k) {
    connection *c = k->c;
    scanner *s = &c->scan;
    /* deliveries may come together with consume-ok, as many as the prefetch allows */
    flush_acks(k);
    count(&k->consumed, s->messages, s->message_bytes);
    while (!stop && !drained) {
        ssize_t waiting = 1;
        /* the time of arrival must be known before the bodies are scanned */
        if (opt.latency) waiting = wait_for(c, POLLIN, POLL_MS), k->now = now_ns();
        if (waiting && receive(c, opt.latency ? MSG_DONTWAIT : 0)) {
            flush_acks(k);
            count(&k->consumed, s->messages, s->message_bytes);
        }
    }
    if (opt.ack_every && !failed && s->last_tag > k->acked_tag)
        put_ack(&k->acks, s->last_tag, true), flush_acks(k);
}

static inline void *consume(void *argument) {
    consumer *k = argument;
    k->c = open_connection(&opt.broker);
    if (k->c) {
        scanner *s = &k->c->scan;
        k->c->owner = k;
        k->shared = opt.consumers * opt.consumer_queues > opt.queues;
        k->next = calloc(opt.producers * opt.queues + 1, sizeof(uint32_t));
        k->pattern = malloc(opt.body_bytes + STAMP_BYTES);
        fill_pattern(k->pattern, opt.body_bytes);
        s->on_ack_due = on_ack_due, s->on_body = on_body;
        s->ack_every = s->until_ack = opt.ack_every;
        s->look = opt.check || opt.latency;
    }
    if (opt.backlog) k->ready = true;
    while (opt.backlog && !filled && !stop) usleep(1000);
    bool subscribed = k->c && subscribe(k);
    k->ready = true;
    if (subscribed && !opt.stall) read_until_told(k);
    return NULL;
}

#endif
