/* --ops: connections, channels, queues or bindings instead of messages. Each thread sends PIPELINE
 * requests at a time.
 *
 * An operation counts when it is answered. Its time is the time of its whole pipeline. */
#ifndef AMQPLOAD_OPERATIONS_H
#define AMQPLOAD_OPERATIONS_H

#include "producer.h"

static inline void declared_name(char *to, size_t room, uint64_t thread, uint64_t n) {
    snprintf(
        to, room, "%s-%llu-%llu", opt.prefix, (unsigned long long)thread, (unsigned long long)n);
}

static inline void put_operation(buffer *b, uint64_t thread, uint64_t n) {
    char name[256], queue[256];
    declared_name(name, sizeof name, thread, n);
    if (opt.operation == OP_QUEUE) {
        begin_method(b, 1, QUEUE_DECLARE);
        put16(b, 0), put_short(b, name), put8(b, opt.durable ? 2 : 0), put32(b, 0);
    } else {
        queue_name(queue, sizeof queue, 0);
        begin_method(b, 1, QUEUE_BIND);
        put16(b, 0), put_short(b, queue), put_short(b, exchange_name()), put_short(b, name),
            put8(b, 0), put32(b, 0);
    }
    end_frame(b);
}

/* Open and close a connection with login and channel, or channel 2 of the thread's connection. */
static inline bool open_and_close(producer *p, buffer *b) {
    if (opt.operation == OP_CONNECT) {
        connection *c = open_connection(&opt.broker);
        bool done = c && close_politely(c, ANSWER_MS_MAX);
        if (c) destroy(c);
        return done;
    }
    begin_method(b, 2, CHANNEL_OPEN), put_short(b, "");
    end_frame(b);
    if (!call(p->c, b, CHANNEL_OPEN_OK, "channel.open")) return false;
    begin_method(b, 2, CHANNEL_CLOSE), put16(b, 200), put_short(b, "done"), put32(b, 0);
    end_frame(b);
    return call(p->c, b, CHANNEL_CLOSE_OK, "channel.close");
}

static inline bool operate_once(producer *p, buffer *b, uint64_t n) {
    if (opt.operation == OP_CONNECT || opt.operation == OP_CHANNEL) return open_and_close(p, b);
    for (uint64_t i = 0; i < n; i++) put_operation(b, p->index, p->sent + i);
    return call_many(p->c, b, n, opt.operation == OP_QUEUE ? QUEUE_DECLARE_OK : QUEUE_BIND_OK,
        "a request of many");
}

static inline void *operate(void *argument) {
    producer *p = argument;
    buffer b = {0};
    p->c = opt.operation == OP_CONNECT ? NULL : open_connection(&opt.broker);
    p->ready = true;
    while (!go && !stop) usleep(1000);
    bool single = opt.operation == OP_CONNECT || opt.operation == OP_CHANNEL;
    while (!stop && publishing && p->sent < p->limit) {
        uint64_t left = p->limit - p->sent, since = now_ns();
        uint64_t n = single ? 1 : opt.pipeline < left ? opt.pipeline : left;
        if (!operate_once(p, &b, n)) break;
        if (measuring) histogram_add(&p->confirm_times, now_ns() - since, n);
        p->sent += n;
        count(&p->published, p->sent, 0);
    }
    p->done = true;
    free(b.bytes);
    return NULL;
}

/* Delete the queues of all threads after the run. */
static inline void delete_declared(connection *c, const producer *of) {
    enum { AT_ONCE = 500 };
    buffer b = {0};
    for (uint64_t t = 0, waiting = 0; t < opt.producers; t++)
        for (uint64_t n = 0; n < of[t].sent && !c->closed; n++) {
            char name[256];
            declared_name(name, sizeof name, t, n);
            begin_method(&b, 1, QUEUE_DELETE), put16(&b, 0), put_short(&b, name), put8(&b, 0);
            end_frame(&b);
            if (++waiting == AT_ONCE || n + 1 == of[t].sent) {
                if (!call_many(c, &b, waiting, QUEUE_DELETE_OK, "deletes of the declared queues"))
                    return;
                waiting = 0;
            }
        }
    free(b.bytes);
}

#endif
