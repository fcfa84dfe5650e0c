/* The hash of a routing key, and which of several queues it chooses: the same as in
   broker/routing/hashing.py, to the last bit. */
#ifndef KEY_HASH_H
#define KEY_HASH_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

/* Murmur3's finalizer. */
static inline uint64_t mixed(uint64_t bits)
{
    bits = (bits ^ (bits >> 33)) * 0xFF51AFD7ED558CCDULL;
    bits = (bits ^ (bits >> 33)) * 0xC4CEB9FE1A85EC53ULL;
    return bits ^ (bits >> 33);
}

/* FNV-1a, mixed at the end. */
static inline uint64_t key_hash(const unsigned char *key, size_t length)
{
    uint64_t found = 0xCBF29CE484222325ULL;
    /* Four at a time: counting single bytes would be half of the work. */
    for (; length >= 4; length -= 4, key += 4) {
        found = (found ^ key[0]) * 0x100000001B3ULL;
        found = (found ^ key[1]) * 0x100000001B3ULL;
        found = (found ^ key[2]) * 0x100000001B3ULL;
        found = (found ^ key[3]) * 0x100000001B3ULL;
    }
    for (; length; length--, key++)
        found = (found ^ *key) * 0x100000001B3ULL;
    return mixed(found);
}

/* Index of the winner among equal weights: the first with the most. */
static inline uint32_t rendezvous_equal(uint64_t hashed, const uint64_t *seeds, uint32_t count)
{
    uint32_t best = 0;
    uint64_t most = 0;
    for (uint32_t i = 0; i < count; i++) {
        uint64_t bits = mixed(hashed ^ seeds[i]) >> 11;
        /* Without a branch: nobody could foretell which way it goes. */
        uint64_t more = -(uint64_t)(bits > most);
        most ^= (most ^ bits) & more;
        best ^= (best ^ i) & (uint32_t)more;
    }
    return best;
}

#if defined(__x86_64__) && defined(__GNUC__)
#define EIGHTS __attribute__((target("avx512f,avx512dq")))

static inline int has_eights(void)
{
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq");
}

/* The same, eight seeds at a time. */
EIGHTS
static uint32_t rendezvous_among_eights(uint64_t hashed, const uint64_t *seeds, uint32_t count)
{
    const __m512i one = _mm512_set1_epi64((long long)0xFF51AFD7ED558CCDULL);
    const __m512i two = _mm512_set1_epi64((long long)0xC4CEB9FE1A85EC53ULL);
    const __m512i key = _mm512_set1_epi64((long long)hashed);
    __m512i most = _mm512_setzero_si512(), at = _mm512_setzero_si512();
    for (uint32_t i = 0; i < count; i += 8) {
        __mmask8 there = count - i < 8 ? (__mmask8)((1u << (count - i)) - 1) : 0xFF;
        __m512i bits = _mm512_xor_si512(key, _mm512_maskz_loadu_epi64(there, seeds + i));
        bits = _mm512_mullo_epi64(_mm512_xor_si512(bits, _mm512_srli_epi64(bits, 33)), one);
        bits = _mm512_mullo_epi64(_mm512_xor_si512(bits, _mm512_srli_epi64(bits, 33)), two);
        bits = _mm512_srli_epi64(_mm512_xor_si512(bits, _mm512_srli_epi64(bits, 33)), 11);
        __mmask8 more = _mm512_mask_cmpgt_epu64_mask(there, bits, most);
        most = _mm512_mask_mov_epi64(most, more, bits);
        at = _mm512_mask_mov_epi64(at, more, _mm512_set1_epi64(i));
    }
    __m512i winner = _mm512_set1_epi64((long long)_mm512_reduce_max_epu64(most));
    __mmask8 best = _mm512_cmpeq_epu64_mask(most, winner);
    if (count <= 8)
        return (uint32_t)__builtin_ctz(best);
    at = _mm512_add_epi64(at, _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0));
    return (uint32_t)_mm512_mask_reduce_min_epu64(best, at);
}
#endif

/* Index of the winner. `equal`: all weights are the same, so the logarithm, which is monotonous,
   need not be taken. */
static inline uint32_t rendezvous(
    uint64_t hashed, const uint64_t *seeds, const double *weights, uint32_t count, int equal)
{
    uint32_t best = 0;
    if (equal) {
#if defined(__x86_64__) && defined(__GNUC__)
        if (has_eights())
            return rendezvous_among_eights(hashed, seeds, count);
#endif
        return rendezvous_equal(hashed, seeds, count);
    }
    double first = INFINITY;
    for (uint32_t i = 0; i < count; i++) {
        double bits = (double)(mixed(hashed ^ seeds[i]) >> 11);
        double arrival = -log((bits + 0.5) / 9007199254740992.0) / weights[i];
        if (arrival < first) {
            first = arrival;
            best = i;
        }
    }
    return best;
}

#if defined(__x86_64__) && defined(__GNUC__)
/* mixed() from its first multiplication to its second. x ^ x >> 33 of a key xor a seed is that of
   the key xor that of the seed. So it is taken once of each, not of each pair. */
EIGHTS
static inline __m512i mixed_middle(__m512i bits)
{
    bits = _mm512_mullo_epi64(bits, _mm512_set1_epi64((long long)0xFF51AFD7ED558CCDULL));
    return _mm512_mullo_epi64(_mm512_xor_si512(bits, _mm512_srli_epi64(bits, 33)),
                              _mm512_set1_epi64((long long)0xC4CEB9FE1A85EC53ULL));
}

/* Numbers of queues that fit behind the 53 bits that are compared. */
#define AMONG_MAX 2048

/* rendezvous_equal() of each of `n` hashes, eight at a time; `count` is at most AMONG_MAX. */
EIGHTS
static void rendezvous_of_eights(
    const uint64_t *hashed, uint32_t n, const uint64_t *seeds, uint32_t count, uint32_t *winners)
{
    const __m512i compared = _mm512_set1_epi64(-(long long)AMONG_MAX);
    for (uint32_t k = 0; k < n; k += 8) {
        __mmask8 there = n - k < 8 ? (__mmask8)((1u << (n - k)) - 1) : 0xFF;
        __m512i key = _mm512_maskz_loadu_epi64(there, hashed + k), most = _mm512_setzero_si512();
        key = _mm512_xor_si512(key, _mm512_srli_epi64(key, 33));
        for (uint32_t i = 0; i < count; i++) {
            uint64_t seed = seeds[i] ^ (seeds[i] >> 33);
            __m512i bits = mixed_middle(_mm512_xor_si512(key, _mm512_set1_epi64((long long)seed)));
            /* (bits ^ bits >> 33) & compared. Behind these bits comes the number of the queue,
               counted down so that the first of equals is the highest. */
            bits = _mm512_ternarylogic_epi64(bits, _mm512_srli_epi64(bits, 33), compared, 0x28);
            bits = _mm512_or_si512(bits, _mm512_set1_epi64(AMONG_MAX - 1 - (long long)i));
            most = _mm512_max_epu64(most, bits);
        }
        most = _mm512_andnot_si512(compared, most);
        most = _mm512_sub_epi64(_mm512_set1_epi64(AMONG_MAX - 1), most);
        _mm512_mask_cvtepi64_storeu_epi32(winners + k, there, most);
    }
}
#endif

/* rendezvous() of each of `n` hashes. */
static inline void rendezvous_each(
    const uint64_t *hashed, uint32_t n, const uint64_t *seeds, const double *weights,
    uint32_t count, int equal, uint32_t *winners)
{
#if defined(__x86_64__) && defined(__GNUC__)
    if (equal && n > 1 && count <= AMONG_MAX && has_eights()) {
        rendezvous_of_eights(hashed, n, seeds, count, winners);
        return;
    }
#endif
    for (uint32_t k = 0; k < n; k++)
        winners[k] = k && hashed[k] == hashed[k - 1]
            ? winners[k - 1] : rendezvous(hashed[k], seeds, weights, count, equal);
}

/* Jump consistent hash (Lamping, Veach 2014): a bucket of `buckets`. */
static inline uint64_t jump(uint64_t key, uint64_t buckets)
{
    uint64_t bucket = 0, next = 0;
    while (next < buckets) {
        bucket = next;
        key = key * 2862933555777941757ULL + 1;
        next = (uint64_t)((double)(bucket + 1) * (2147483648.0 / (double)((key >> 33) + 1)));
    }
    return bucket;
}

/* Index of the one whose buckets, up to `ends[i]`, the hash leads to. */
static inline uint32_t jump_among(uint64_t hashed, const uint64_t *ends, uint32_t count)
{
    uint64_t bucket = jump(hashed, ends[count - 1]);
    uint32_t low = 0, high = count - 1;
    while (low < high) {
        uint32_t middle = (low + high) / 2;
        if (bucket < ends[middle])
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

#endif
