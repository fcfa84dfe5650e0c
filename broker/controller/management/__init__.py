"""The HTTP API, health checks, metrics and the page. The authority decides what may change."""
