"""The numbers of all processes, gathered and shown to Prometheus."""
