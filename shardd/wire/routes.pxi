"""Remember the routes of publishes, by the line of a publish or for all keys of an exchange.

The packer (packer.pxi) looks up each message, and without the GIL. How a key chooses one queue of
several is written down in key_hash.h, and once more, slow and obvious, in
broker/routing/hashing.py.
"""

from cpython cimport array
from cpython.bytes cimport PyBytes_AS_STRING
from libc.stdint cimport uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, malloc, realloc
from libc.string cimport memcmp, memcpy, memset

from shardmq.shardd.wire.publishes cimport Target

cdef extern from "key_hash.h" nogil:
    uint32_t rendezvous(
        uint64_t hashed, const uint64_t *seeds, const double *weights, uint32_t count, int equal
    )
    void rendezvous_each(
        const uint64_t *hashed, uint32_t n, const uint64_t *seeds, const double *weights,
        uint32_t count, int equal, uint32_t *winners
    )
    uint32_t jump_among(uint64_t hashed, const uint64_t *ends, uint32_t count)

cdef enum:
    # Routes remembered; past it the memory is emptied and learnt anew.
    ROUTES_MAX = 1 << 16
    # Exchanges remembered that choose one queue for each key, or do not look at it.
    SPREADS_MAX = 64

# Kinds of route.
TARGETS = 0
NOWHERE = 1
CALLER = 2
HERE = 3  # one queue whose consumer is at this front door

# How a spread chooses.
RENDEZVOUS = 0
MODULUS = 1
CHANCE = 2
JUMP = 3

cdef int set_targets(Route *route, int kind, list targets, bint durable) except -1:
    cdef uint32_t i, k
    cdef list ids
    route.kind = kind
    route.durable = durable
    route.targets = <Target *> calloc(len(targets) + 1, sizeof(Target))
    if route.targets == NULL:
        raise MemoryError()
    route.count = <uint32_t> len(targets)
    for i in range(route.count):
        route.targets[i].shard = targets[i][0]
        ids = targets[i][1]
        route.targets[i].queues = len(ids)
        route.targets[i].ids = <uint32_t *> malloc(4 * len(ids) + 4)
        if route.targets[i].ids == NULL:
            raise MemoryError()
        for k in range(<uint32_t> len(ids)):
            route.targets[i].ids[k] = ids[k]
    return 0

cdef void free_targets(Route *route) noexcept:
    cdef uint32_t i
    for i in range(route.count):
        free(route.targets[i].ids)
    free(route.targets)

cdef inline uint64_t hash_line(const uint8_t *p, size_t n) noexcept nogil:
    """FNV-like over 8-byte words, mixed at the end; only this process ever sees it."""
    cdef uint64_t h = <uint64_t> 0xcbf29ce484222325ULL ^ n
    cdef uint64_t w
    while n >= 8:
        memcpy(&w, p, 8)
        h = (h ^ w) * 0x9e3779b97f4a7c15ULL
        h ^= h >> 32
        p += 8
        n -= 8
    if n:
        w = 0
        memcpy(&w, p, n)
        h = (h ^ w) * 0x9e3779b97f4a7c15ULL
        h ^= h >> 32
    h *= 0xff51afd7ed558ccdULL
    return h ^ (h >> 29)

cdef uint64_t generations = 0

cdef uint64_t next_generation() noexcept:
    global generations
    generations += 1
    return generations


cdef class Published:
    """What was published to each exchange of a vhost, and to how many queues it went.

    The Routes of the vhost's users share it. A route knows the place of its exchange here, so
    `forget` may be called only when all these Routes are empty.
    """

    def __cinit__(self):
        self.places = {}

    def __dealloc__(self):
        free(self.counts)

    cdef uint32_t place_of(self, bytes exchange) except? 0xffffffff:
        cdef Passed *grown
        cdef uint32_t place
        known = self.places.get(exchange)
        if known is not None:
            return known
        place = <uint32_t> len(self.places)
        if place == self.room:
            grown = <Passed *> realloc(self.counts, (2 * <size_t> self.room + 8) * sizeof(Passed))
            if grown == NULL:
                raise MemoryError()
            self.counts = grown
            self.room = 2 * self.room + 8
        memset(&self.counts[place], 0, sizeof(Passed))
        self.places[exchange] = place
        return place

    def add(self, bytes exchange not None, uint64_t came, uint64_t left):
        """Count messages that did not come by a route.

        `came` messages came to the exchange, which gave them to `left` queues.
        """
        cdef uint32_t place = self.place_of(exchange)  # which may move the memory
        self.counts[place].came += came
        self.counts[place].left += left

    def report(self) -> dict:
        """Return {exchange: (came, left)} of those that some message came to."""
        cdef uint32_t place
        found = {}
        for exchange, place in self.places.items():
            if self.counts[place].came:
                found[exchange] = (self.counts[place].came, self.counts[place].left)
        return found

    def forget(self, gone not None):
        """Forget the exchanges for which `gone(exchange)` is true."""
        cdef dict places = self.places
        cdef uint32_t place, left = 0
        self.places = {}
        # They come by place: each is moved to where nothing is needed any more.
        for exchange, place in places.items():
            if not gone(exchange):
                self.counts[left] = self.counts[place]
                self.places[exchange] = left
                left += 1


cdef class Routes:
    """A hash table of routes by publish line (exchange, key, bits), read without the GIL.

    The caller empties the table (`clear`) whenever the catalog changes. `generation` is another one
    after each clear, so that a run begun with a forgotten route is never continued.
    """

    def __cinit__(self, uint64_t seed=1, Published published=None):
        self.published = Published() if published is None else published
        self.chance = seed
        self.slots = <Route **> calloc(64, sizeof(Route *))
        self.size = 64
        self.generation = next_generation()
        if self.slots == NULL:
            raise MemoryError()

    def __dealloc__(self):
        self.free_list(self.kept, self.used)
        self.free_spreads()
        free(self.slots)

    cdef void free_spreads(self) noexcept:
        cdef uint32_t i, k
        cdef Spread *spread
        for i in range(self.spread_count):
            spread = &self.spreads[i]
            for k in range(spread.count):
                free_targets(&spread.routes[k])
            free(spread.routes)
            free(spread.seeds)
            free(spread.weights)
            free(spread.shares)
            free(spread.exchange)
        self.spread_count = 0

    cdef Spread *find_spread(self, const uint8_t *line, uint32_t length) noexcept nogil:
        cdef uint32_t i
        for i in range(self.spread_count):
            if goes_to(line, length, &self.spreads[i]):
                return &self.spreads[i]
        return NULL

    cdef void choose(
        self, Spread *spread, const uint64_t *hashed, uint32_t count, uint32_t *chosen
    ) noexcept nogil:
        """Choose one of the spread's queues for each of these hashes."""
        cdef uint32_t i
        if spread.how == H_RENDEZVOUS:
            rendezvous_each(
                hashed, count, spread.seeds, spread.weights, spread.count, spread.equal, chosen
            )
        elif spread.how == H_JUMP:
            for i in range(count):
                chosen[i] = jump_among(hashed[i], spread.seeds, spread.count)
        elif spread.how == H_ANY:
            memset(chosen, 0, 4 * <size_t> count)
        else:
            for i in range(count):
                chosen[i] = hashed[i] % spread.count

    def learn_spread(self, bytes exchange not None, int how, list members not None) -> bool:
        """Note that messages to `exchange` go to one of `members`, chosen by their key.

        `members` has at least one (weight, seed, shard, queue id, durable). Return False if too
        many exchanges are known already.
        """
        cdef Spread *spread
        cdef uint32_t i
        if not members or not self.begin_spread(exchange, how, len(members)):
            return False
        spread = &self.spreads[self.spread_count - 1]
        spread.equal = True
        for i, (weight, seed, shard, queue, durable) in enumerate(members):
            set_targets(&spread.routes[i], TARGETS, [(shard, [queue])], durable)
            spread.routes[i].exchange, spread.routes[i].reach = self.published.place_of(exchange), 1
            spread.weights[i], spread.seeds[i] = weight, seed
            spread.equal = spread.equal and spread.weights[i] == spread.weights[0]
            if how == H_JUMP:
                spread.seeds[i] = <uint64_t> spread.weights[i] + (spread.seeds[i - 1] if i else 0)
        return True

    def learn_exchange(self, bytes exchange not None, int kind, list targets not None, bint durable,
                       uint32_t reach=0) -> bool:
        """Note that all messages to `exchange`, whatever their key, have one route.

        The route is as in learn(). Return False if too many exchanges are known already.
        """
        cdef Route *route
        if not self.begin_spread(exchange, H_ANY, 1):
            return False
        route = &self.spreads[self.spread_count - 1].routes[0]
        set_targets(route, kind, targets, durable)
        route.exchange, route.reach = self.published.place_of(exchange), reach
        return True

    cdef bint begin_spread(self, bytes exchange, int how, uint32_t count) except -1:
        """Begin a spread with `count` routes that lead nowhere yet; return False if it is too many.
        """
        cdef Spread *spread = &self.spreads[self.spread_count]
        if self.spread_count >= SPREADS_MAX or len(exchange) > 255:
            return False
        memset(spread, 0, sizeof(Spread))
        spread.how = how
        spread.exchange_len = <uint32_t> len(exchange) + 1
        spread.exchange = <uint8_t *> malloc(spread.exchange_len)
        spread.routes = <Route *> calloc(count, sizeof(Route))
        spread.seeds = <uint64_t *> calloc(count, 8)
        spread.weights = <double *> calloc(count, 8)
        spread.shares = <Share *> calloc(count, sizeof(Share))
        self.spread_count += 1
        if (
            spread.exchange == NULL
            or spread.routes == NULL
            or spread.seeds == NULL
            or spread.weights == NULL
            or spread.shares == NULL
        ):
            raise MemoryError()
        spread.count = count
        spread.exchange[0] = <uint8_t> len(exchange)
        memcpy(spread.exchange + 1, PyBytes_AS_STRING(exchange), len(exchange))
        return True

    cdef void free_list(self, Route **routes, uint32_t count) noexcept:
        cdef uint32_t i
        if routes == NULL:
            return
        for i in range(count):
            free_targets(routes[i])
            free(routes[i].line)
            free(routes[i])
        free(routes)

    cdef Route *find(self, const uint8_t *line, uint32_t length) noexcept nogil:
        cdef uint64_t hashed = hash_line(line, length)
        cdef uint32_t at = hashed & (self.size - 1)
        cdef Route *route
        while True:
            route = self.slots[at]
            if route == NULL:
                return NULL
            if (
                route.hashed == hashed
                and route.line_len == length
                and memcmp(route.line, line, length) == 0
            ):
                return route
            at = (at + 1) & (self.size - 1)

    def __len__(self):
        return self.used

    def clear(self):
        """Forget all routes."""
        if not self.used and not self.spread_count:
            return
        self.free_list(self.kept, self.used)
        self.free_spreads()
        self.generation = next_generation()
        self.kept = NULL
        self.used = 0
        memset(self.slots, 0, self.size * sizeof(Route *))

    def learn(
        self, bytes line not None, int kind, list targets not None, bint durable, uint32_t reach=0
    ):
        """Note the route of a line.

        `line` has exactly the bytes of the table's line, bits included. `targets` is [(shard,
        [queue id, ...]), ...]. `reach` is how many queues the counter of the exchange says that
        each message goes to.
        """
        cdef Route *route
        cdef Route **grown
        if self.used >= ROUTES_MAX:
            self.clear()
        if 2 * (self.used + 1) > self.size:
            self.grow()
        if self.used & (self.used - 1) == 0:
            grown = <Route **> realloc(self.kept, (2 * self.used + 1) * sizeof(Route *))
            if grown == NULL:
                raise MemoryError()
            self.kept = grown
        route = <Route *> calloc(1, sizeof(Route))
        if route == NULL:
            raise MemoryError()
        route.line_len = len(line)
        route.line = <uint8_t *> malloc(len(line) + 1)
        if route.line == NULL:
            raise MemoryError()
        memcpy(route.line, PyBytes_AS_STRING(line), len(line))
        route.hashed = hash_line(route.line, route.line_len)
        route.exchange, route.reach = self.published.place_of(line[1:line[0] + 1]), reach
        set_targets(route, kind, targets, durable)
        self.kept[self.used] = route
        self.used += 1
        self.place(route)

    cdef void place(self, Route *route) noexcept:
        cdef uint32_t at = route.hashed & (self.size - 1)
        while self.slots[at] != NULL:
            at = (at + 1) & (self.size - 1)
        self.slots[at] = route

    cdef int grow(self) except -1:
        cdef Route **slots = <Route **> calloc(self.size * 4, sizeof(Route *))
        cdef uint32_t i
        if slots == NULL:
            raise MemoryError()
        free(self.slots)
        self.slots = slots
        self.size *= 4
        for i in range(self.used):
            self.place(self.kept[i])
        return 0


def key_hash(const unsigned char[::1] key not None) -> int:
    """Return the hash of a routing key, as spreads take it."""
    return c_key_hash(&key[0] if key.shape[0] else NULL, key.shape[0])


def jump_winner(uint64_t hashed, list weights not None) -> int:
    """Return the index of the one of `weights` that a spread by jump hash would choose."""
    cdef uint32_t count = <uint32_t> len(weights), i
    cdef uint64_t *ends = <uint64_t *> malloc(8 * count + 8)
    if ends == NULL:
        raise MemoryError()
    try:
        for i in range(count):
            ends[i] = <uint64_t> weights[i] + (ends[i - 1] if i else 0)
        return jump_among(hashed, ends, count)
    finally:
        free(ends)


def winner(uint64_t hashed, list members not None) -> int:
    """Return the index of the member (weight, seed) that a spread would choose for this hash."""
    cdef uint32_t count = <uint32_t> len(members), i
    cdef uint64_t *seeds = <uint64_t *> malloc(8 * count + 8)
    cdef double *weights = <double *> malloc(8 * count + 8)
    cdef int equal = True
    if seeds == NULL or weights == NULL:
        free(seeds)
        free(weights)
        raise MemoryError()
    try:
        for i in range(count):
            weights[i], seeds[i] = members[i]
            equal = equal and weights[i] == weights[0]
        return rendezvous(hashed, seeds, weights, count, equal)
    finally:
        free(seeds)
        free(weights)


def winners(list hashes not None, list members not None) -> list:
    """Return winner() of each hash, all at once as for the messages of a read."""
    cdef uint32_t n = <uint32_t> len(hashes), i
    cdef Routes routes = Routes()
    cdef array.array hashed = array.array("Q", hashes), found = array.array("I", bytes(4 * n))
    routes.learn_spread(b"", RENDEZVOUS, [(weight, seed, 0, 0, False) for weight, seed in members])
    routes.choose(
        &routes.spreads[0], <uint64_t *> hashed.data.as_ulonglongs, n,
        <uint32_t *> found.data.as_uints
    )
    return found.tolist()
