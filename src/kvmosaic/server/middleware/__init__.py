"""ASGI middleware that every request passes before its route.

From the outside in: `startup` (with `throttle`), `response_headers`, `authentication`, `request_body`.
"""
