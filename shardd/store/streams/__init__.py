"""Keep the messages of streams: logs that are read any number of times.

README.md draws the files of a stream and shows how to use one.
"""

from shardmq.shardd.store.streams.log import StreamLog, filter_of, wanted_filters
from shardmq.shardd.store.streams.positions import TooManyNames
from shardmq.shardd.store.streams.reading import Messages, StreamCache

__all__ = [
    "Messages",
    "StreamCache",
    "StreamLog",
    "TooManyNames",
    "filter_of",
    "wanted_filters",
]
