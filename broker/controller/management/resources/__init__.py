"""One file for each resource of the HTTP API, each with its routes."""
