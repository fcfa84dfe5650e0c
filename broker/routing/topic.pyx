# cython: boundscheck=False, wraparound=False, cdivision=True, initializedcheck=False
"""Topic patterns as a trie of words: `*` is one word, `#` any number of words or none.

A key is followed word by word through the set of places that it can be at, each place at most once.
So a pattern of many `#` costs as much as its length, however many ways it has. The slow twin is
tests/reference/topic.py.
"""

from libc.stdint cimport uint64_t


cdef class _Place:
    """A place in the trie, reached by the words so far.

    `targets` of patterns that end here, with how often each was added.
    """

    cdef dict words
    cdef _Place star
    cdef _Place hash
    cdef _Place parent
    cdef object word
    cdef dict targets
    cdef bint is_hash
    cdef uint64_t seen

    cdef bint is_bare(self):
        return (
            self.words is None and self.star is None and self.hash is None and self.targets is None
        )


cdef list _words(str text):
    # RabbitMQ: the empty key has no word at all, "a." has two.
    return text.split(".") if text else []


cdef class TopicTrie:
    cdef _Place root
    cdef uint64_t step

    def __cinit__(self):
        self.root = _Place()
        self.step = 0

    def add(self, str pattern not None, object target):
        cdef _Place place = self.root
        for word in _words(pattern):
            place = self._make(place, word)
        if place.targets is None:
            place.targets = {}
        place.targets[target] = place.targets.get(target, 0) + 1

    def remove(self, str pattern not None, object target):
        """Take back one add. Raise KeyError if there was none."""
        cdef _Place place = self.root
        for word in _words(pattern):
            place = self._find(place, word)
            if place is None:
                raise KeyError(pattern)
        if place.targets is None or target not in place.targets:
            raise KeyError(pattern)
        if place.targets[target] > 1:
            place.targets[target] -= 1
            return
        del place.targets[target]
        if not place.targets:
            place.targets = None
        while place is not self.root and place.is_bare():
            place = self._cut(place)

    def match(self, str key not None):
        """Return the set of targets of all patterns that match."""
        cdef set found = set()
        cdef list here = [], there
        cdef _Place place, next
        self.step += 1
        self._enter(self.root, here)
        for word in _words(key):
            there = []
            self.step += 1
            for item in here:
                place = <_Place>item
                if place.is_hash:
                    self._enter(place, there)
                if place.words is not None:
                    next = <_Place>place.words.get(word)
                    if next is not None:
                        self._enter(next, there)
                if place.star is not None:
                    self._enter(place.star, there)
            here = there
            if not here:
                return found
        for item in here:
            place = <_Place>item
            if place.targets is not None:
                found.update(place.targets)
        return found

    cdef void _enter(self, _Place place, list places):
        # Behind a place lies its `#` at no cost: that one may stand for no word.
        while place is not None and place.seen != self.step:
            place.seen = self.step
            places.append(place)
            place = place.hash

    cdef _Place _find(self, _Place place, object word):
        if word == "*":
            return place.star
        if word == "#":
            return place.hash
        return None if place.words is None else <_Place>place.words.get(word)

    cdef _Place _make(self, _Place place, object word):
        cdef _Place next = self._find(place, word)
        if next is not None:
            return next
        next = _Place()
        next.parent = place
        next.word = word
        if word == "*":
            place.star = next
        elif word == "#":
            next.is_hash = True
            place.hash = next
        else:
            if place.words is None:
                place.words = {}
            place.words[word] = next
        return next

    cdef _Place _cut(self, _Place place):
        cdef _Place parent = place.parent
        if place.word == "*":
            parent.star = None
        elif place.word == "#":
            parent.hash = None
        else:
            del parent.words[place.word]
            if not parent.words:
                parent.words = None
        place.parent = None
        return parent
