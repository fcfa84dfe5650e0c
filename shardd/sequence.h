/* A publish's place in what its producer sends: the headers x-producer-id (1 to 255 bytes) and x-sequence (an integer from
   0 on) among the properties of an AMQP message. Read where a publish is packed, and where a shard stores it. */
#ifndef SHARDD_SEQUENCE_H
#define SHARDD_SEQUENCE_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    const uint8_t *producer;
    uint32_t length;
    uint64_t number;
} sequence_t;

static inline uint64_t sequence_big(const uint8_t *p, int bytes) {
    uint64_t value = 0;
    while (bytes--) value = value << 8 | *p++;
    return value;
}

/* Bytes that a field's value of this type takes, its type byte not among them; 0: none known, or more than there are. A
   value without bytes (void) counts as 0 too: `known` tells. */
static inline size_t sequence_value(uint8_t type, const uint8_t *p, size_t left, int *known) {
    size_t size;
    *known = 1;
    switch (type) {
        case 't': case 'b': case 'B': size = 1; break;
        case 's': case 'u': size = 2; break;
        case 'I': case 'i': case 'f': size = 4; break;
        case 'l': case 'L': case 'd': case 'T': size = 8; break;
        case 'D': size = 5; break;
        case 'V': return 0;
        case 'S': case 'x': case 'A': case 'F':
            if (left < 4) { *known = 0; return 0; }
            size = 4 + (size_t)sequence_big(p, 4);
            break;
        default: *known = 0; return 0;
    }
    if (size > left) *known = 0;
    return size;
}

/* 1: an integer, not negative; -1: another thing. */
static inline int sequence_number(uint8_t type, const uint8_t *p, uint64_t *number) {
    int bytes = type == 'b' || type == 'B' ? 1 : type == 's' || type == 'u' ? 2 : type == 'I' || type == 'i' ? 4
              : type == 'l' || type == 'L' ? 8 : 0;
    if (!bytes) return -1;
    *number = sequence_big(p, bytes);
    if (type != 'B' && type != 'u' && type != 'i' && *number >> (8 * bytes - 1)) return -1;
    return 1;
}

/* 1: both headers are there; 0: not both, or no properties that could be read; -1: both, but they mean nothing. */
static int sequence_read(const uint8_t *props, size_t size, sequence_t *out) {
    const uint8_t *p = props + 2, *end = props + size;
    unsigned present, bit;
    int producer = 0, number = 0, known;
    size_t length;
    if (size < 2) return 0;
    present = (unsigned)props[0] << 8 | props[1];
    if (!(present >> 13 & 1)) return 0;
    for (bit = 15; bit > 13; bit--)
        if (present >> bit & 1) {
            if (end - p < 1 || end - p - 1 < p[0]) return 0;
            p += 1 + p[0];
        }
    if (end - p < 4) return 0;
    length = (size_t)sequence_big(p, 4);
    p += 4;
    if ((size_t)(end - p) < length) return 0;
    end = p + length;
    while (p < end) {
        const uint8_t *name = p + 1;
        uint8_t n = p[0], type;
        if (end - p < 2 + (ptrdiff_t)n) return 0;
        type = p[1 + n];
        p += 2 + n;
        length = sequence_value(type, p, (size_t)(end - p), &known);
        if (!known) return 0;
        if (n == 13 && memcmp(name, "x-producer-id", 13) == 0) {
            producer = (type == 'S' || type == 'x') && length > 4 && length <= 4 + 255 ? 1 : -1;
            out->producer = p + 4;
            out->length = (uint32_t)length - 4;
        } else if (n == 10 && memcmp(name, "x-sequence", 10) == 0) {
            number = sequence_number(type, p, &out->number);
        }
        p += length;
    }
    if (!producer || !number) return 0;
    return producer > 0 && number > 0 ? 1 : -1;
}
#endif
