/* AMQP 0-9-1 frames: write the few methods that the generator sends, scan what a broker sends.
 *
 *   u8 type | u16 channel | u32 payload bytes | payload | 0xCE          (big endian)
 *
 * The scanner counts deliveries in the receive buffer and copies nothing. It takes whole frames
 * only; the caller keeps the rest. There is one channel per connection, so the scanner does not
 * look at the channel of content frames. */
#ifndef AMQPLOAD_FRAMES_H
#define AMQPLOAD_FRAMES_H

#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    FRAME_METHOD = 1,
    FRAME_HEADER = 2,
    FRAME_BODY = 3,
    FRAME_HEARTBEAT = 8,
    FRAME_END = 0xCE,
    FRAME_OVERHEAD = 8
};

#define METHOD(class_id, method_id) ((uint32_t)(class_id) << 16 | (uint32_t)(method_id))
enum {
    CONNECTION_START = METHOD(10, 10), CONNECTION_START_OK = METHOD(10, 11),
    CONNECTION_TUNE = METHOD(10, 30), CONNECTION_TUNE_OK = METHOD(10, 31),
    CONNECTION_OPEN = METHOD(10, 40), CONNECTION_OPEN_OK = METHOD(10, 41),
    CONNECTION_CLOSE = METHOD(10, 50), CONNECTION_CLOSE_OK = METHOD(10, 51),
    CONNECTION_BLOCKED = METHOD(10, 60), CONNECTION_UNBLOCKED = METHOD(10, 61),
    CHANNEL_OPEN = METHOD(20, 10), CHANNEL_OPEN_OK = METHOD(20, 11),
    CHANNEL_FLOW = METHOD(20, 20), CHANNEL_FLOW_OK = METHOD(20, 21),
    CHANNEL_CLOSE = METHOD(20, 40), CHANNEL_CLOSE_OK = METHOD(20, 41),
    EXCHANGE_DECLARE = METHOD(40, 10), EXCHANGE_DECLARE_OK = METHOD(40, 11),
    EXCHANGE_DELETE = METHOD(40, 20), EXCHANGE_DELETE_OK = METHOD(40, 21),
    QUEUE_DECLARE = METHOD(50, 10), QUEUE_DECLARE_OK = METHOD(50, 11),
    QUEUE_BIND = METHOD(50, 20), QUEUE_BIND_OK = METHOD(50, 21),
    QUEUE_DELETE = METHOD(50, 40), QUEUE_DELETE_OK = METHOD(50, 41),
    BASIC_QOS = METHOD(60, 10), BASIC_QOS_OK = METHOD(60, 11),
    BASIC_CONSUME = METHOD(60, 20), BASIC_CONSUME_OK = METHOD(60, 21),
    BASIC_CANCEL = METHOD(60, 30), BASIC_PUBLISH = METHOD(60, 40), BASIC_RETURN = METHOD(60, 50),
    BASIC_DELIVER = METHOD(60, 60), BASIC_ACK = METHOD(60, 80), BASIC_NACK = METHOD(60, 120),
    CONFIRM_SELECT = METHOD(85, 10), CONFIRM_SELECT_OK = METHOD(85, 11),
};

static inline uint16_t be16(const uint8_t *p) { return (uint16_t)(p[0] << 8 | p[1]); }
static inline uint32_t be32(const uint8_t *p) {
    uint32_t v;
    memcpy(&v, p, 4);
    return __builtin_bswap32(v);
}
static inline uint64_t be64(const uint8_t *p) {
    uint64_t v;
    memcpy(&v, p, 8);
    return __builtin_bswap64(v);
}

/* ---- writing --------------------------------------------------------------------------------- */

typedef struct {
    uint8_t *bytes;
    size_t size, room, frame; /* frame: the offset of the frame that is being written */
} buffer;

static inline uint8_t *grow(buffer *b, size_t bytes) {
    if (b->size + bytes > b->room) {
        b->room = (b->size + bytes) * 2;
        b->bytes = realloc(b->bytes, b->room);
        if (!b->bytes) abort();
    }
    b->size += bytes;
    return b->bytes + b->size - bytes;
}
static inline void put8(buffer *b, unsigned v) { *grow(b, 1) = (uint8_t)v; }
static inline void put16(buffer *b, unsigned v) { put8(b, v >> 8), put8(b, v); }
static inline void put32(buffer *b, uint32_t v) {
    v = __builtin_bswap32(v), memcpy(grow(b, 4), &v, 4);
}
static inline void put64(buffer *b, uint64_t v) {
    v = __builtin_bswap64(v), memcpy(grow(b, 8), &v, 8);
}
static inline void put_bytes(buffer *b, const void *p, size_t n) {
    if (n) memcpy(grow(b, n), p, n);
}
static inline void put_short(buffer *b, const char *s) {
    put8(b, (unsigned)strlen(s)), put_bytes(b, s, strlen(s));
}
static inline void put_long(buffer *b, const void *p, size_t n) {
    put32(b, (uint32_t)n), put_bytes(b, p, n);
}

static inline void begin_frame(buffer *b, unsigned type, unsigned channel) {
    b->frame = b->size;
    put8(b, type), put16(b, channel), put32(b, 0);
}
static inline void begin_method(buffer *b, unsigned channel, uint32_t method) {
    begin_frame(b, FRAME_METHOD, channel);
    put32(b, method);
}
static inline void end_frame(buffer *b) {
    uint32_t payload = __builtin_bswap32((uint32_t)(b->size - b->frame - 7));
    memcpy(b->bytes + b->frame + 3, &payload, 4);
    put8(b, FRAME_END);
}

/* Write one publish: method, header and as many body frames as the agreed frame size needs.
 * `properties` are the flags and values. Return the offset of the body's first byte, or of the
 * end when the body is empty. */
static inline size_t put_content(buffer *b, const char *exchange, const char *key,
    const void *properties, size_t properties_bytes, const uint8_t *body, size_t body_bytes,
    size_t frame_bytes_max) {
    begin_method(b, 1, BASIC_PUBLISH);
    put16(b, 0), put_short(b, exchange), put_short(b, key), put8(b, 0);
    end_frame(b);
    begin_frame(b, FRAME_HEADER, 1);
    put16(b, 60), put16(b, 0), put64(b, body_bytes), put_bytes(b, properties, properties_bytes);
    end_frame(b);
    size_t first = b->size + 7, piece_max = frame_bytes_max - FRAME_OVERHEAD;
    for (size_t at = 0; at < body_bytes; at += piece_max) {
        size_t piece = body_bytes - at < piece_max ? body_bytes - at : piece_max;
        begin_frame(b, FRAME_BODY, 1);
        put_bytes(b, body + at, piece);
        end_frame(b);
    }
    return body_bytes ? first : b->size;
}

/* Write a publish whose only property, if any, is delivery_mode. */
static inline size_t put_publish(buffer *b, const char *exchange, const char *key,
    const uint8_t *body, size_t body_bytes, bool persistent, size_t frame_bytes_max) {
    return put_content(b, exchange, key, persistent ? "\x10\0\2" : "\0\0", persistent ? 3 : 2, body,
        body_bytes, frame_bytes_max);
}

static inline void put_ack(buffer *b, uint64_t tag, bool multiple) {
    begin_method(b, 1, BASIC_ACK);
    put64(b, tag), put8(b, multiple);
    end_frame(b);
}

/* ---- the stamp at the start of a body -----------------------------------------------------------
 *
 *   u64 time | u16 producer | u16 queue | u32 sequence          (little endian)
 *
 * The time is in nanoseconds. With --check alone it is a hash of the rest. */

typedef struct {
    uint64_t time;
    uint16_t producer, queue;
    uint32_t sequence;
} stamp;
enum { STAMP_BYTES = sizeof(stamp) };
_Static_assert(sizeof(stamp) == 16, "a stamp fits the smallest usual body");

static inline uint64_t stamp_hash(const stamp *s) {
    uint64_t x = (uint64_t)s->producer << 48 | (uint64_t)s->queue << 32 | s->sequence;
    x = (x ^ 0x9E3779B97F4A7C15u) * 0xBF58476D1CE4E5B9u;
    return x ^ x >> 29;
}

/* Fill a table with the bytes that follow the stamp in every body; both sides use one such
 * table. */
static inline void fill_pattern(uint8_t *body, size_t bytes) {
    for (size_t i = 0; i < bytes; i++) body[i] = (uint8_t)(i * 31 + (i >> 8) + 7);
}

/* ---- scanning -------------------------------------------------------------------------------- */

typedef struct scanner {
    uint32_t frame_bytes_max;
    enum { AWAITING_METHOD, AWAITING_HEADER, AWAITING_BODY } state;
    uint64_t body_bytes, body_at, last_tag;
    uint64_t messages, message_bytes;
    uint64_t ack_every, until_ack; /* 0: never */
    bool look;                     /* on_body gets the pieces of bodies */
    const char *error;
    void *owner;
    void (*on_method)(struct scanner *, unsigned channel, uint32_t method, const uint8_t *arguments,
        size_t bytes);
    void (*on_ack_due)(struct scanner *);
    /* flags and values; may be NULL */
    void (*on_header)(struct scanner *, const uint8_t *properties, size_t bytes);
    void (*on_body)(struct scanner *, const uint8_t *piece, size_t bytes);
} scanner;

static inline void message_done(scanner *s) {
    s->state = AWAITING_METHOD;
    s->messages++;
    s->message_bytes += s->body_bytes;
    if (s->ack_every && --s->until_ack == 0) {
        s->until_ack = s->ack_every;
        s->on_ack_due(s);
    }
}

static inline void scan_method(scanner *s, const uint8_t *frame, uint32_t bytes) {
    if (bytes < 4) { s->error = "method frame without a method"; return; }
    uint32_t method = be32(frame + 7);
    if (method != BASIC_DELIVER) {
        s->on_method(s, be16(frame + 1), method, frame + 11, bytes - 4);
    } else if (s->state != AWAITING_METHOD) {
        s->error = "basic.deliver before the end of the message before it";
    } else if (bytes < 5 || bytes < 5u + frame[11] + 8) {
        s->error = "basic.deliver cut short";
    } else {
        s->last_tag = be64(frame + 12 + frame[11]);
        s->state = AWAITING_HEADER;
    }
}

static inline void scan_header(scanner *s, const uint8_t *frame, uint32_t bytes) {
    if (s->state != AWAITING_HEADER || bytes < 14) {
        s->error = "content header out of place";
        return;
    }
    s->body_bytes = be64(frame + 11);
    s->body_at = 0;
    if (s->on_header) s->on_header(s, frame + 19, bytes - 12);
    if (s->body_bytes) { s->state = AWAITING_BODY; return; }
    if (s->look) s->on_body(s, frame, 0);
    message_done(s);
}

static inline void scan_body(scanner *s, const uint8_t *frame, uint32_t bytes) {
    if (s->state != AWAITING_BODY || bytes > s->body_bytes - s->body_at) {
        s->error = "body frame out of place";
        return;
    }
    if (s->look) s->on_body(s, frame + 7, bytes);
    s->body_at += bytes;
    if (s->body_at == s->body_bytes) message_done(s);
}

/* Take all whole frames and return the number of their bytes. When `error` is set the stream is
 * lost. */
static inline size_t scan_frames(scanner *s, const uint8_t *bytes, size_t size) {
    size_t at = 0;
    while (size - at >= FRAME_OVERHEAD && !s->error) {
        const uint8_t *frame = bytes + at;
        uint32_t payload = be32(frame + 3);
        if (payload > s->frame_bytes_max - FRAME_OVERHEAD) {
            s->error = "frame longer than agreed";
            break;
        }
        if (size - at < (size_t)payload + FRAME_OVERHEAD) break;
        if (frame[7 + payload] != FRAME_END) { s->error = "frame end octet missing"; break; }
        switch (frame[0]) {
            case FRAME_METHOD: scan_method(s, frame, payload); break;
            case FRAME_HEADER: scan_header(s, frame, payload); break;
            case FRAME_BODY: scan_body(s, frame, payload); break;
            case FRAME_HEARTBEAT: break;
            default: s->error = "unknown frame type";
        }
        at += (size_t)payload + FRAME_OVERHEAD;
    }
    return at;
}

#endif
