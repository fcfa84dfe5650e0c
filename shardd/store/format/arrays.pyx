# cython: language_level=3, boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Where the arrays of a batch lie: as Arrow counts them, nodes (an array and those within it, parents first) and the
buffers of all nodes. Pointers to what somebody else writes, who is kept alive; they are noted once, and hold for batch after
batch, as long as buffers are looked up through `Grown`.
"""

from libc.stdint cimport int32_t, uint8_t, uint64_t
from libc.string cimport memcpy

from shardmq.shardd.grown cimport Grown, reserve
from shardmq.shardd.store.format.growing cimport Text, free_text


cdef class Arrays:
    """Filled by `Columns.lay_out` and `repeat`, in the order of the columns."""

    def __cinit__(self):
        self.values = []

    def __dealloc__(self):
        cdef int i
        for i in range(self.repeats):
            free_text(&self.repeated[i].text)

    def repeat(self, bytes value, bint is_text) -> None:
        """A column that says the same in each row: a text, or a number by its bytes."""
        cdef Repeated *repeated = &self.repeated[self.repeats]
        if self.repeats == REPEATED_MAX or self.rows == NULL:
            raise ValueError("two columns may repeat, of a batch that has rows")
        self.repeats += 1
        self.values.append(value)
        repeated.value, repeated.size = <const uint8_t*><const char*>value, len(value)
        self.add_node(self.rows, NULL, NULL)
        if is_text:
            self.add_buffer(&repeated.text.ends)
        self.add_buffer(&repeated.text.data)

    cdef int add_node(self, const uint64_t *rows, const uint64_t *nulls, Grown *bits) except -1:
        """With the buffer of its bits."""
        if self.nodes == NODES_MAX:
            raise ValueError("too many arrays")
        self.node[self.nodes].rows, self.node[self.nodes].nulls = rows, nulls
        self.nodes += 1
        self.add_buffer(bits)
        self.buffer[self.buffers - 1].nulls = nulls
        return 0

    cdef int add_buffer(self, Grown *memory) except -1:
        if self.buffers == BUFFERS_MAX:
            raise ValueError("too many buffers")
        self.buffer[self.buffers].memory, self.buffer[self.buffers].nulls = memory, NULL
        self.buffers += 1
        return 0

    cdef int add_text(self, const uint64_t *rows, Text *text, bint nullable) except -1:
        self.add_node(rows, &text.nulls if nullable else NULL, &text.valid if nullable else NULL)
        self.add_buffer(&text.ends)
        return self.add_buffer(&text.data)

    cdef int settle(self) except -1 nogil:
        """What repeats, as long as the batch is: made for the longest so far, of which others are the beginning."""
        cdef int i
        cdef uint64_t row, rows = self.rows[0]
        cdef Repeated *repeated
        for i in range(self.repeats):
            repeated = &self.repeated[i]
            repeated.text.ends.used = repeated.text.data.used = 0
            reserve(&repeated.text.ends, 4 * (rows + 1))
            reserve(&repeated.text.data, repeated.size * rows)
            if rows > repeated.rows or repeated.rows == 0:
                for row in range(rows + 1):
                    (<int32_t*>repeated.text.ends.data)[row] = <int32_t>(row * repeated.size)
                for row in range(rows):
                    memcpy(repeated.text.data.data + row * repeated.size, repeated.value, repeated.size)
                repeated.rows = rows
            repeated.text.ends.used = 4 * (rows + 1)
            repeated.text.data.used = repeated.size * rows
        return 0


cdef class Sink:
    """Takes batch after batch out of compiled code."""

    cdef bint take(self) except -1 nogil:
        """The batch is done; what it was made of is cleared when this returns. Whether there may be another at once."""
        with gil:
            raise NotImplementedError
