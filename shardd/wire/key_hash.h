/* The hash of a routing key, and who of several gets it: the same as in broker/routing/hashing.py, to the last bit. */
#ifndef KEY_HASH_H
#define KEY_HASH_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>

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
    for (size_t i = 0; i < length; i++)
        found = (found ^ key[i]) * 0x100000001B3ULL;
    return mixed(found);
}

/* Index of the winner. `equal`: all weights are the same, and the logarithm need not be taken: it is monotonous. */
static inline uint32_t rendezvous(uint64_t hashed, const uint64_t *seeds, const double *weights, uint32_t count, int equal)
{
    uint32_t best = 0;
    if (equal) {
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
    double first = INFINITY;
    for (uint32_t i = 0; i < count; i++) {
        double arrival = -log(((double)(mixed(hashed ^ seeds[i]) >> 11) + 0.5) / 9007199254740992.0) / weights[i];
        if (arrival < first) {
            first = arrival;
            best = i;
        }
    }
    return best;
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
