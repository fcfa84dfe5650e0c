"""The resources of the HTTP API: each file has the handlers and the ROUTES of one resource."""
