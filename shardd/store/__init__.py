"""Provide the stores of messages as a library, in folders.

`segments` keeps the messages of queues, `streams` those of streams, in the bytes of `format`.
`tools` reads the files of a stopped broker. README.md draws what they share.
"""
