"""Publishing: where messages go, confirms, transactions, deduplication, dead letters."""
