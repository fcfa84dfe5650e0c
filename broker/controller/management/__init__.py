"""The operators' door: HTTP API, health, metrics. Asks and shows; decides nothing about what exists."""
