"""An operator's probe: /livez and /readyz every second, /metrics every five.

It is a process of its own, so that no interpreter lock delays it.

    python benchmarks/soak_probe.py URL KEY SECONDS

One line per reply: what was asked, seconds, status.
"""

from __future__ import annotations

import http.client
import sys
import time
from urllib.parse import urlsplit

TIMEOUT = 60


def main(url: str, key: str, pause: float) -> None:
    place = urlsplit(url)
    assert place.hostname is not None
    number = 0
    while True:
        for path in ("/livez", "/readyz", *(["/metrics"] if number % 5 == 0 else [])):
            begin = time.monotonic()
            connection = http.client.HTTPConnection(place.hostname, place.port or 80, timeout=TIMEOUT)
            try:
                connection.request("GET", path, headers={"Authorization": f"Bearer {key}"})
                reply = connection.getresponse()
                reply.read()
                status = reply.status
            except (OSError, http.client.HTTPException):
                status = 0
            finally:
                connection.close()
            print(path[1:], f"{time.monotonic() - begin:.6f}", status, flush=True)
        number += 1
        time.sleep(pause)


if __name__ == "__main__":
    try:
        main(sys.argv[1], sys.argv[2], float(sys.argv[3]))
    except (KeyboardInterrupt, BrokenPipeError):
        sys.exit(0)
