"""Consuming: consumers, deliveries, acknowledgements, virtual queues."""
