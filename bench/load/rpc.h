/* --rpc: requests with amq.rabbitmq.reply-to. Producers send requests, consumers answer to the
 * reply-to of each request.
 *
 * The body of a request has the time when the request was sent. The reply has the same body. */
#ifndef AMQPLOAD_RPC_H
#define AMQPLOAD_RPC_H

#include "consumer.h"
#include "producer.h"

enum { HAS_CORRELATION_ID = 0x0400, HAS_REPLY_TO = 0x0200 };
static const char direct_reply_to[] = "amq.rabbitmq.reply-to";

/* ---- answering ------------------------------------------------------------------------------- */

/* Take the two properties of a request: correlation-id "1" and reply-to. */
static inline void on_request_header(scanner *s, const uint8_t *properties, size_t bytes) {
    consumer *k = ((connection *)s->owner)->owner;
    size_t at = 2 + 2, length = bytes > at ? properties[at] : 0;
    if (bytes < 5 || be16(properties) != (HAS_CORRELATION_ID | HAS_REPLY_TO) ||
        bytes < at + 1 + length) {
        fail("a request without its reply-to");
        return;
    }
    memcpy(k->reply_to, properties + at + 1, length);
    k->reply_to[length] = 0;
}

static inline void on_request(scanner *s, const uint8_t *body, size_t bytes) {
    consumer *k = ((connection *)s->owner)->owner;
    if (bytes != s->body_bytes) { fail("a request in several frames"); return; }
    put_content(&k->acks, "", k->reply_to, "\4\0\1" "1", 4, body, bytes, k->c->frame_bytes_max);
}

static inline void *answer_requests(void *argument) {
    consumer *k = argument;
    k->c = open_connection(&opt.broker);
    if (k->c) {
        scanner *s = &k->c->scan;
        k->c->owner = k;
        s->on_header = on_request_header, s->on_body = on_request, s->look = true;
    }
    bool subscribed = k->c && subscribe(k);
    k->ready = true;
    while (subscribed && !stop && !drained)
        if (receive(k->c, 0))
            flush_acks(k), count(&k->consumed, k->c->scan.messages, k->c->scan.message_bytes);
    return NULL;
}

/* ---- requests -------------------------------------------------------------------------------- */

static inline void put_request(producer *p) {
    uint64_t now = now_ns();
    size_t at = p->output.size;
    put_bytes(&p->output, p->request, p->request_bytes);
    memcpy(p->output.bytes + at + p->request_body, &now, sizeof now);
    p->sent++;
}

static inline void on_reply(scanner *s, const uint8_t *body, size_t bytes) {
    producer *p = ((connection *)s->owner)->owner;
    uint64_t sent, now = now_ns();
    if (bytes != opt.body_bytes) { fail("a reply of another length"); return; }
    memcpy(&sent, body, sizeof sent);
    if (measuring) histogram_add(&p->confirm_times, now > sent ? now - sent : 0, 1);
    if (publishing) put_request(p);
}

static inline bool consume_replies(producer *p) {
    buffer b = {0};
    begin_method(&b, 1, BASIC_CONSUME);
    put16(&b, 0), put_short(&b, direct_reply_to), put_short(&b, "replies"), put8(&b, 2),
        put32(&b, 0);
    end_frame(&b);
    bool done = call(p->c, &b, BASIC_CONSUME_OK, "basic.consume of direct replies");
    free(b.bytes);
    return done;
}

static inline void encode_request(producer *p) {
    buffer b = {0}, properties = {0};
    char queue[256];
    uint8_t *body = malloc(opt.body_bytes);
    fill_pattern(body, opt.body_bytes);
    queue_name(queue, sizeof queue, p->index % opt.queues);
    put16(&properties, HAS_CORRELATION_ID | HAS_REPLY_TO), put_short(&properties, "1"),
        put_short(&properties, direct_reply_to);
    p->request_body = put_content(&b, "", queue, properties.bytes, properties.size, body,
        opt.body_bytes, p->c->frame_bytes_max);
    p->request = b.bytes, p->request_bytes = b.size;
    free(properties.bytes), free(body);
}

static inline bool write_requests(producer *p) {
    bool written = !p->output.size || write_all(p->c, p->output.bytes, p->output.size);
    p->output.size = 0;
    return written;
}

static inline void *ask(void *argument) {
    producer *p = argument;
    p->c = open_connection(&opt.broker);
    if (p->c) {
        p->c->owner = p;
        p->c->scan.on_body = on_reply, p->c->scan.look = true;
        encode_request(p);
    }
    bool able = p->c && consume_replies(p);
    p->ready = true;
    while (!go && !stop) usleep(1000);
    for (uint64_t i = 0; i < opt.rpc && able; i++) put_request(p);
    uint64_t give_up = 0;
    while (able && !stop && p->c->scan.messages < p->sent) {
        if (!publishing && !give_up) give_up = now_ns() + (uint64_t)CLOSE_MS * 1000000u;
        if (give_up && now_ns() > give_up) {
            fail("%llu requests were not answered",
                (unsigned long long)(p->sent - p->c->scan.messages));
            break;
        }
        if (!write_requests(p)) break;
        count(&p->published, p->sent, p->sent * opt.body_bytes);
        if (receive(p->c, 0)) count(&p->answered, p->c->scan.messages, p->c->scan.message_bytes);
    }
    if (able && !stop) close_politely(p->c, CLOSE_MS);
    p->done = true;
    return NULL;
}

#endif
