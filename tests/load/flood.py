"""A program that floods a server from a process of its own: flood.py URL CLIENTS SECONDS; prints counts as JSON."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter

import httpx


async def client(url: str, number: int, until: float, seen: Counter[str]) -> None:
    body = {"prompt": f"Number {number} asks where the ferry goes", "max_tokens": 200, "ignore_eos": True}
    async with httpx.AsyncClient(timeout=300) as http:
        while time.monotonic() < until:
            reply = await http.post(f"{url}/v1/completions", json=body)
            seen[str(reply.status_code)] += 1
            if reply.status_code != 200:
                assert int(reply.headers["retry-after"]) >= 1
                assert reply.json()["error"]["message"]
                await asyncio.sleep(0.2)


async def main(url: str, clients: int, seconds: float) -> None:
    seen: Counter[str] = Counter()
    until = time.monotonic() + seconds
    await asyncio.gather(*[client(url, number, until, seen) for number in range(clients)])
    print(json.dumps(seen))


asyncio.run(main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3])))
