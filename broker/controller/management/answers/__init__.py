"""How the HTTP API answers: long lists, pages, schemas, the description of itself."""
