/* CRC-32C (Castagnoli), as iSCSI and ext4 have it, for all compiled modules that make or check
   records.

   With the instruction for it, three streams hide its latency (3 cycles, and one can start each
   cycle). Tables that shift a crc over a block of zeros join the streams. With carry-less
   multiplication of 512 bits, four of them run at once, which is three to five times as fast.
   Without the instruction there are eight tables. crc32c_start() chooses one of the ways: call it
   once, at import, before all else. */
#ifndef SHARDD_CRC32C_H
#define SHARDD_CRC32C_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CRC32C_POLY 0x82f63b78u
/* Bytes per stream: long blocks for bodies, short blocks for the rest and for small records. */
#define CRC32C_LONG 2048
#define CRC32C_SHORT 128

static uint32_t crc32c_table[8][256];
static uint32_t crc32c_long[4][256], crc32c_short[4][256];
static int crc32c_hardware, crc32c_multiplies;
/* To move 128 bits over 2048, 512, 384, 256 and 128 bits of message: x^(distance + 32) for the
   first half, x^(distance - 32) for the second, bits reflected, times x. (Gopal et al., Fast CRC
   Computation Using PCLMULQDQ, Intel 2009) */
static uint64_t crc32c_fold[5][2];

/* Vector times matrix over GF(2). */
static uint32_t crc32c_times(const uint32_t *matrix, uint32_t vector) {
    uint32_t sum = 0;
    for (; vector; vector >>= 1, matrix++)
        if (vector & 1) sum ^= *matrix;
    return sum;
}

/* Make tables of the effect of that many zero bytes on a crc: the matrix of one zero bit, raised to
   the power of 8 * bytes. */
static void crc32c_zeros(uint32_t out[4][256], uint64_t bytes) {
    uint32_t power[32], square[32], effect[32];
    for (int i = 0; i < 32; i++) {
        effect[i] = 1u << i;
        power[i] = i ? 1u << (i - 1) : CRC32C_POLY;
    }
    for (uint64_t bits = bytes * 8; bits; bits >>= 1) {
        if (bits & 1)
            for (int i = 0; i < 32; i++) effect[i] = crc32c_times(power, effect[i]);
        for (int i = 0; i < 32; i++) square[i] = crc32c_times(power, power[i]);
        memcpy(power, square, sizeof power);
    }
    for (uint32_t n = 0; n < 256; n++)
        for (int k = 0; k < 4; k++) out[k][n] = crc32c_times(effect, n << (8 * k));
}

/* x^n, reflected, times x. */
static uint64_t crc32c_power(int n) {
    uint32_t power = 0x80000000u;
    for (; n; n--) power = power & 1 ? (power >> 1) ^ CRC32C_POLY : power >> 1;
    return (uint64_t)power << 1;
}

static uint32_t crc32c_tables(uint32_t crc, const unsigned char *p, size_t n) {
    crc = ~crc;
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        w ^= crc;
        crc = crc32c_table[7][w & 255] ^ crc32c_table[6][(w >> 8) & 255]
            ^ crc32c_table[5][(w >> 16) & 255] ^ crc32c_table[4][(w >> 24) & 255]
            ^ crc32c_table[3][(w >> 32) & 255] ^ crc32c_table[2][(w >> 40) & 255]
            ^ crc32c_table[1][(w >> 48) & 255] ^ crc32c_table[0][w >> 56];
    }
    while (n--) crc = crc32c_table[0][(crc ^ *p++) & 255] ^ (crc >> 8);
    return ~crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

static inline uint32_t crc32c_shift(uint32_t t[4][256], uint32_t crc) {
    return t[0][crc & 255] ^ t[1][(crc >> 8) & 255] ^ t[2][(crc >> 16) & 255] ^ t[3][crc >> 24];
}

#define CRC32C_STREAMS(BLOCK, TABLE)                                                            \
    for (; n >= 3 * BLOCK; n -= 3 * BLOCK, p += 3 * BLOCK) {                                    \
        uint64_t b = 0, c = 0;                                                                  \
        for (size_t i = 0; i < BLOCK; i += 8) {                                                 \
            uint64_t x, y, z;                                                                   \
            memcpy(&x, p + i, 8); memcpy(&y, p + BLOCK + i, 8); memcpy(&z, p + 2 * BLOCK + i, 8); \
            a = _mm_crc32_u64(a, x); b = _mm_crc32_u64(b, y); c = _mm_crc32_u64(c, z);          \
        }                                                                                       \
        a = crc32c_shift(TABLE, (uint32_t)a) ^ (uint32_t)b;                                     \
        a = crc32c_shift(TABLE, (uint32_t)a) ^ (uint32_t)c;                                     \
    }

__attribute__((target("sse4.2")))
static uint32_t crc32c_sse(uint32_t crc, const unsigned char *p, size_t n) {
    uint64_t a = (uint32_t)~crc;
    CRC32C_STREAMS(CRC32C_LONG, crc32c_long)
    CRC32C_STREAMS(CRC32C_SHORT, crc32c_short)
    for (; n >= 8; n -= 8, p += 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        a = _mm_crc32_u64(a, w);
    }
    while (n--) a = _mm_crc32_u8((uint32_t)a, *p++);
    return ~(uint32_t)a;
}

#define CRC32C_WIDE __attribute__((target("sse4.2,avx512f,vpclmulqdq")))
/* The bytes of a round, which pays from the first. */
#define CRC32C_WIDE_MIN 256

CRC32C_WIDE
static inline __m512i crc32c_folded(__m512i x, __m512i by, __m512i more) {
    return _mm512_ternarylogic_epi64(
        _mm512_clmulepi64_epi128(x, by, 0x00), _mm512_clmulepi64_epi128(x, by, 0x11), more, 0x96);
}

CRC32C_WIDE
static inline __m512i crc32c_by(const uint64_t *distance) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)distance));
}

/* A message that is folded until 128 bits are left has the same remainder. The last bytes take the
   way with streams. */
CRC32C_WIDE
static uint32_t crc32c_wide(uint32_t crc, const unsigned char *p, size_t n) {
    const __m512i far = crc32c_by(crc32c_fold[0]), near = crc32c_by(crc32c_fold[1]);
    const __m512i nothing = _mm512_setzero_si512();
    const __m512i first = _mm512_zextsi128_si512(_mm_cvtsi32_si128((int)~crc));
    __m512i a = _mm512_xor_si512(_mm512_loadu_si512(p), first), b = _mm512_loadu_si512(p + 64);
    __m512i c = _mm512_loadu_si512(p + 128), d = _mm512_loadu_si512(p + 192);
    for (p += 256, n -= 256; n >= 256; p += 256, n -= 256) {
        a = crc32c_folded(a, far, _mm512_loadu_si512(p));
        b = crc32c_folded(b, far, _mm512_loadu_si512(p + 64));
        c = crc32c_folded(c, far, _mm512_loadu_si512(p + 128));
        d = crc32c_folded(d, far, _mm512_loadu_si512(p + 192));
    }
    d = crc32c_folded(crc32c_folded(crc32c_folded(a, near, b), near, c), near, d);
    const __m512i each = _mm512_set_epi64(0, 0,
        (int64_t)crc32c_fold[4][1], (int64_t)crc32c_fold[4][0],
        (int64_t)crc32c_fold[3][1], (int64_t)crc32c_fold[3][0],
        (int64_t)crc32c_fold[2][1], (int64_t)crc32c_fold[2][0]);
    const __m512i moved = crc32c_folded(d, each, nothing);
    __m128i left = _mm512_extracti32x4_epi32(d, 3);
    left = _mm_xor_si128(left, _mm512_extracti32x4_epi32(moved, 0));
    left = _mm_xor_si128(left, _mm512_extracti32x4_epi32(moved, 1));
    left = _mm_xor_si128(left, _mm512_extracti32x4_epi32(moved, 2));
    const uint64_t half = _mm_crc32_u64(0, (uint64_t)_mm_cvtsi128_si64(left));
    crc = ~(uint32_t)_mm_crc32_u64(half, (uint64_t)_mm_extract_epi64(left, 1));
    return crc32c_sse(crc, p, n);
}
#endif

/* The ways without carry-less multiplication. */
static inline uint32_t crc32c_narrow(uint32_t crc, const unsigned char *p, size_t n) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (crc32c_hardware) return crc32c_sse(crc, p, n);
#endif
    return crc32c_tables(crc, p, n);
}

/* `crc` is that of the bytes before these, 0 at the beginning. */
static uint32_t crc32c(uint32_t crc, const unsigned char *p, size_t n) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (crc32c_multiplies && n >= CRC32C_WIDE_MIN) return crc32c_wide(crc, p, n);
#endif
    return crc32c_narrow(crc, p, n);
}

static void crc32c_start(void) {
    for (uint32_t n = 0; n < 256; n++) {
        uint32_t c = n;
        for (int k = 0; k < 8; k++) c = c & 1 ? (c >> 1) ^ CRC32C_POLY : c >> 1;
        crc32c_table[0][n] = c;
    }
    for (int k = 1; k < 8; k++)
        for (int n = 0; n < 256; n++)
            crc32c_table[k][n] =
                crc32c_table[0][crc32c_table[k - 1][n] & 255] ^ (crc32c_table[k - 1][n] >> 8);
    crc32c_zeros(crc32c_long, CRC32C_LONG);
    crc32c_zeros(crc32c_short, CRC32C_SHORT);
    static const int distances[5] = {2048, 512, 384, 256, 128};
    for (int i = 0; i < 5; i++) {
        crc32c_fold[i][0] = crc32c_power(distances[i] + 32);
        crc32c_fold[i][1] = crc32c_power(distances[i] - 32);
    }
#if defined(__x86_64__) && defined(__GNUC__)
    __builtin_cpu_init();
    crc32c_hardware = __builtin_cpu_supports("sse4.2") != 0;
    crc32c_multiplies = crc32c_hardware && __builtin_cpu_supports("avx512f")
        && __builtin_cpu_supports("vpclmulqdq");
#endif
}
#endif
