"""The numbers of all processes: collected, compared, and shown to Prometheus."""
