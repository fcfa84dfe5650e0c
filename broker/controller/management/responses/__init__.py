"""Bodies of the HTTP API's responses: lists, pages, schemas, and the API's own description."""
