"""Queue logic: what becomes of a message. No transport, no files; the time is an argument (`now`, seconds, float)."""
