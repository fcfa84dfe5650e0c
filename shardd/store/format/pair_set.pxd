# cython: language_level=3, cdivision=True
"""A set of settled pairs (queue id << 32 | position) that is filled once. Whoever has one frees `pairs`."""

from libc.stdint cimport uint8_t, uint64_t
from libc.stdlib cimport calloc

from shardmq.shardd.store.format.layout cimport u64


cdef struct PairSet:
    uint64_t *pairs  # 0: free; no message is at position 0
    uint64_t mask


cdef inline uint64_t pair_place(const PairSet *known, uint64_t pair) noexcept nogil:
    cdef uint64_t at = ((pair * <uint64_t>0x9E3779B97F4A7C15) >> 20) & known.mask
    while known.pairs[at] != 0 and known.pairs[at] != pair:
        at = (at + 1) & known.mask
    return at


cdef inline bint pair_set_has(const PairSet *known, uint64_t pair) noexcept nogil:
    return known.pairs[pair_place(known, pair)] != 0


cdef inline int pair_set_fill(PairSet *known, const uint8_t *pairs, size_t count) except -1 nogil:
    """With `count` pairs of 8 bytes, in any order, repeats and zeros among them."""
    cdef uint64_t size = 16, pair
    cdef size_t i
    while size < count * 2:
        size *= 2
    known.pairs = <uint64_t*>calloc(size, 8)
    if known.pairs == NULL:
        with gil:
            raise MemoryError
    known.mask = size - 1
    for i in range(count):
        pair = u64(pairs + 8 * i)
        if pair != 0:
            known.pairs[pair_place(known, pair)] = pair
    return 0
