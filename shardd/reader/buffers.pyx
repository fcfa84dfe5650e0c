# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Read and send the buffers of Arrow's arrays, at the two ends of the reader.

publishes.pxi makes publishes of columns that clients write. sending.pxi sends the columns of a
stream to clients that read.
"""

include "publishes.pxi"
include "sending.pxi"
