"""Bodies in the OpenAPI document, as the server takes them: without --strict, most have unknown fields."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any

from kvmosaic.server.json_body import TOLERANT

_REFERENCE = re.compile(r'"#/components/schemas/([^"]+)"')
_SUFFIX = "WithUnknown"


def open_tolerant_bodies(document: dict[str, Any]) -> None:
    """Allows unknown fields in the bodies of routes that leave them out; other routes go on refusing them.

    A schema that both kinds of routes take gets an open copy, with a name of its own.
    """
    schemas: dict[str, Any] = document["components"]["schemas"]
    operations = [each for of_path in document["paths"].values() for each in of_path.values() if "requestBody" in each]
    tolerant = [each for each in operations if TOLERANT in each]
    refusing = [each for each in operations if TOLERANT not in each]
    taken = _reached(schemas, tolerant)
    shared = taken & _reached(schemas, refusing)
    for name in shared:
        schemas[name + _SUFFIX] = schemas[name]
    for name in sorted(taken):
        target = name + _SUFFIX if name in shared else name
        schemas[target] = _without_closure(_renamed(schemas[name], shared))
    for operation in tolerant:
        operation["requestBody"] = _renamed(operation["requestBody"], shared)


def _reached(schemas: dict[str, Any], operations: Iterable[dict[str, Any]]) -> set[str]:
    """Names of the schemas that the bodies of these operations use, also through others."""
    reached: set[str] = set()
    left = [name for operation in operations for name in _REFERENCE.findall(json.dumps(operation["requestBody"]))]
    while left:
        name = left.pop()
        if name not in reached:
            reached.add(name)
            left += _REFERENCE.findall(json.dumps(schemas[name]))
    return reached


def _renamed(part: Any, shared: set[str]) -> Any:
    """A part of the document with references to the open copies of shared schemas."""
    text = _REFERENCE.sub(lambda found: found[0][:-1] + (_SUFFIX if found[1] in shared else "") + '"', json.dumps(part))
    return json.loads(text)


def _without_closure(schema: Any) -> Any:
    """A schema that allows unknown fields, at any depth."""
    if isinstance(schema, list):
        return [_without_closure(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in ("examples", "default", "enum") else _without_closure(value)
        for key, value in schema.items()
        if not (key == "additionalProperties" and value is False)
    }
