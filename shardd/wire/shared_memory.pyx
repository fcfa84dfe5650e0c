# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Move messages and bodies between processes through memory that both see.

ring.pxi has the rings of a lane, and how to wait for them. bodies.pxi has the memory of large
bodies, which a front door lends to its shards.
"""

include "ring.pxi"
include "bodies.pxi"
