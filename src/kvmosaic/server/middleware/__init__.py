"""ASGI middleware that every request passes before its route.

From the outside in: `startup` (with `throttle`), `tracing` (if spans are sent), `response_headers`, `access_log`,
`authentication`, and `web.request_body`.
"""
