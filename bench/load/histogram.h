/* Latency histograms with logarithmic buckets, 64 per power of two: a percentile is right to about
 * 1 %.
 *
 * Values are nanoseconds. A histogram belongs to one thread. All are added up when the threads
 * end. */
#ifndef AMQPLOAD_HISTOGRAM_H
#define AMQPLOAD_HISTOGRAM_H

#include <stdint.h>
#include <stdio.h>
#include <time.h>

enum { SUB_BITS = 6, SUB_BUCKETS = 1 << SUB_BITS, BUCKETS = (64 - SUB_BITS + 1) * SUB_BUCKETS };

typedef struct {
    uint64_t count;
    uint64_t max;
    uint64_t buckets[BUCKETS];
} histogram;

static inline uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Values below 64 have a bucket each. Above, the six bits after the leading one choose the
 * bucket. */
static inline unsigned bucket_of(uint64_t value) {
    if (value < SUB_BUCKETS) return (unsigned)value;
    unsigned shift = 63u - (unsigned)__builtin_clzll(value) - SUB_BITS;
    return (shift + 1) * SUB_BUCKETS + (unsigned)(value >> shift) - SUB_BUCKETS;
}

static inline double bucket_middle(unsigned bucket) {
    if (bucket < SUB_BUCKETS) return bucket;
    unsigned shift = bucket / SUB_BUCKETS - 1;
    double low = (double)((uint64_t)(SUB_BUCKETS + bucket % SUB_BUCKETS) << shift);
    return low + (double)(1ull << shift) / 2;
}

static inline void histogram_add(histogram *h, uint64_t value, uint64_t times) {
    h->count += times;
    h->buckets[bucket_of(value)] += times;
    if (value > h->max) h->max = value;
}

static inline void histogram_merge(histogram *into, const histogram *from) {
    into->count += from->count;
    if (from->max > into->max) into->max = from->max;
    for (unsigned i = 0; i < BUCKETS; i++) into->buckets[i] += from->buckets[i];
}

static inline double percentile_us(const histogram *h, double percent) {
    double wanted = (double)h->count * percent / 100.0;
    uint64_t seen = 0;
    for (unsigned i = 0; i < BUCKETS; i++) {
        seen += h->buckets[i];
        if (h->buckets[i] && (double)seen >= wanted) {
            double middle = bucket_middle(i);
            return (middle < (double)h->max ? middle : (double)h->max) / 1000.0;
        }
    }
    return (double)h->max / 1000.0;
}

static inline void histogram_json(FILE *out, const char *name, const histogram *h) {
    if (!h->count) return;
    fprintf(out,
        ", \"%s\": {\"count\": %llu, \"p50\": %.1f, \"p90\": %.1f, \"p99\": %.1f, "
        "\"p99.9\": %.1f, \"max\": %.1f}",
        name, (unsigned long long)h->count, percentile_us(h, 50), percentile_us(h, 90),
        percentile_us(h, 99), percentile_us(h, 99.9), (double)h->max / 1000.0);
}

static inline void histogram_text(FILE *out, const char *name, const histogram *h) {
    if (!h->count) return;
    fprintf(out, "%s (us): p50 %.1f  p90 %.1f  p99 %.1f  p99.9 %.1f  max %.1f  of %llu\n", name,
        percentile_us(h, 50), percentile_us(h, 90), percentile_us(h, 99), percentile_us(h, 99.9),
        (double)h->max / 1000.0, (unsigned long long)h->count);
}

#endif
