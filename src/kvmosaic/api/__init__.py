"""The HTTP API's bodies, replies and errors, the same in our own server and inside vLLM; no web framework, no torch.

fields.py               field types of bodies: every number, text and list with a bound
validation_message.py   messages for bodies that do not fit their type
errors.py               one table from error types to statuses
documents.py            documents in bodies, and bodies and replies of /v1/documents
served_documents.py     what routes of documents need of a server
"""
