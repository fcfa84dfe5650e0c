# cython: language_level=3, cdivision=True
"""A table of queue ids: each id gets the next slot when it is seen first.

A table whose bytes are all zero is not ready: clear it before use.
"""

from libc.stdint cimport int64_t, uint32_t
from libc.stdlib cimport free, malloc
from libc.string cimport memset


cdef struct IdTable:
    uint32_t *keys
    uint32_t *slots  # slot + 1, 0: free
    uint32_t mask
    uint32_t count


cdef inline int id_table_clear(IdTable *table, uint32_t size) except -1 nogil:
    """Make the table empty, with `size` places (a power of two)."""
    if table.keys == NULL or table.mask + 1 != size:
        free(table.keys)
        free(table.slots)
        table.keys = <uint32_t*>malloc(<size_t>size * 4)
        table.slots = <uint32_t*>malloc(<size_t>size * 4)
        if table.keys == NULL or table.slots == NULL:
            with gil:
                raise MemoryError
        table.mask = size - 1
    memset(table.slots, 0, <size_t>size * 4)
    table.count = 0
    return 0


cdef inline uint32_t id_table_place(IdTable *table, uint32_t key) noexcept nogil:
    cdef uint32_t at = ((key * <uint32_t>2654435761) >> 7) & table.mask
    while table.slots[at] != 0 and table.keys[at] != key:
        at = (at + 1) & table.mask
    return at


cdef inline int id_table_grow(IdTable *table) except -1 nogil:
    cdef IdTable old = table[0]
    cdef uint32_t i, at
    table.keys = NULL
    table.slots = NULL
    id_table_clear(table, (old.mask + 1) * 2)
    for i in range(old.mask + 1):
        if old.slots[i] != 0:
            at = id_table_place(table, old.keys[i])
            table.keys[at] = old.keys[i]
            table.slots[at] = old.slots[i]
    table.count = old.count
    free(old.keys)
    free(old.slots)
    return 0


cdef inline int64_t id_table_add(IdTable *table, uint32_t key) except -1 nogil:
    """Return the slot of `key`; new slots count up."""
    cdef uint32_t at = id_table_place(table, key)
    if table.slots[at] == 0:
        if table.count * 2 > table.mask:
            id_table_grow(table)
            at = id_table_place(table, key)
        table.count += 1
        table.keys[at] = key
        table.slots[at] = table.count
    return table.slots[at] - 1
