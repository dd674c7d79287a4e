"""What our own server and the middleware inside vLLM have in common: routes of documents, bodies, errors, streams."""
