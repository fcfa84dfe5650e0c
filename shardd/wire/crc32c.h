/* CRC-32C (Castagnoli), as iSCSI and ext4 use it: hardware where the CPU has it, else tables. */
#ifndef SHARDMQ_CRC32C_H
#define SHARDMQ_CRC32C_H
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define CRC32C_POLY 0x82f63b78u
/* Bytes per stream where three are computed at once: the instruction takes 3 cycles but can start every cycle. */
#define CRC32C_STREAM 1024

static uint32_t crc32c_table[8][256];
static uint32_t crc32c_shift[4][256]; /* the effect of CRC32C_STREAM zero bytes, a byte of the state at a time */
static int crc32c_hardware;

static uint32_t crc32c_soft(uint32_t crc, const unsigned char *p, size_t n) {
    while (n && ((uintptr_t)p & 7)) { crc = crc32c_table[0][(crc ^ *p++) & 255] ^ (crc >> 8); n--; }
    while (n >= 8) {
        uint64_t w;
        memcpy(&w, p, 8);
        w ^= crc;
        crc = crc32c_table[7][w & 255] ^ crc32c_table[6][(w >> 8) & 255] ^ crc32c_table[5][(w >> 16) & 255]
            ^ crc32c_table[4][(w >> 24) & 255] ^ crc32c_table[3][(w >> 32) & 255] ^ crc32c_table[2][(w >> 40) & 255]
            ^ crc32c_table[1][(w >> 48) & 255] ^ crc32c_table[0][w >> 56];
        p += 8; n -= 8;
    }
    while (n--) crc = crc32c_table[0][(crc ^ *p++) & 255] ^ (crc >> 8);
    return crc;
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <nmmintrin.h>
static inline uint32_t crc32c_shifted(uint32_t crc) {
    return crc32c_shift[0][crc & 255] ^ crc32c_shift[1][(crc >> 8) & 255]
         ^ crc32c_shift[2][(crc >> 16) & 255] ^ crc32c_shift[3][crc >> 24];
}

__attribute__((target("sse4.2")))
static uint32_t crc32c_sse(uint32_t crc, const unsigned char *p, size_t n) {
    uint64_t a = crc, w, w1, w2;
    while (n >= 3 * CRC32C_STREAM) {
        uint64_t b = 0, c = 0;
        for (size_t i = 0; i < CRC32C_STREAM; i += 8) {
            memcpy(&w, p + i, 8);
            memcpy(&w1, p + CRC32C_STREAM + i, 8);
            memcpy(&w2, p + 2 * CRC32C_STREAM + i, 8);
            a = _mm_crc32_u64(a, w);
            b = _mm_crc32_u64(b, w1);
            c = _mm_crc32_u64(c, w2);
        }
        a = crc32c_shifted((uint32_t)a) ^ b;
        a = crc32c_shifted((uint32_t)a) ^ c;
        p += 3 * CRC32C_STREAM; n -= 3 * CRC32C_STREAM;
    }
    while (n >= 8) { memcpy(&w, p, 8); a = _mm_crc32_u64(a, w); p += 8; n -= 8; }
    while (n--) a = _mm_crc32_u8((uint32_t)a, *p++);
    return (uint32_t)a;
}
#endif

static void crc32c_init(void) {
    for (uint32_t i = 0; i < 256; i++) {
        uint32_t crc = i;
        for (int k = 0; k < 8; k++) crc = (crc >> 1) ^ (CRC32C_POLY & (0u - (crc & 1)));
        crc32c_table[0][i] = crc;
    }
    for (uint32_t i = 0; i < 256; i++)
        for (int k = 1; k < 8; k++)
            crc32c_table[k][i] = crc32c_table[0][crc32c_table[k - 1][i] & 255] ^ (crc32c_table[k - 1][i] >> 8);
#if defined(__x86_64__) && defined(__GNUC__)
    static const unsigned char zeros[CRC32C_STREAM];
    __builtin_cpu_init();
    crc32c_hardware = __builtin_cpu_supports("sse4.2");
    for (int k = 0; k < 4; k++)
        for (uint32_t i = 0; i < 256; i++)
            crc32c_shift[k][i] = crc32c_soft(i << (8 * k), zeros, CRC32C_STREAM);
#endif
}

static uint32_t crc32c(const unsigned char *p, size_t n) {
#if defined(__x86_64__) && defined(__GNUC__)
    if (crc32c_hardware) return ~crc32c_sse(0xffffffffu, p, n);
#endif
    return ~crc32c_soft(0xffffffffu, p, n);
}
#endif
