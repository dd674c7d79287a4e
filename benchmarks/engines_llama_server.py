"""Worker over JSON lines that asks a server of llama.cpp; imports nothing of kvmosaic.

The server is a `llama-server` that was named, or else the one inside the package xllamacpp, in this process.
"""

from __future__ import annotations

import http.client
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from threading import Thread
from typing import Any

_NUM_SLOTS = 8
"""Maximum number of prompts answered at once; further ones wait."""
_SECONDS_TO_START = 600.0
_SECONDS_TO_ANSWER = 1_800.0


def main() -> None:
    """Answers requests until its input ends."""
    # what the library prints must not mix with the lines of JSON
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    options = json.loads(sys.argv[1])
    server = Binary(options) if options["server"] else Package(options)
    try:
        client = Client(server.address)
        client.wait_until_ready(server)
        _say(replies, {"version": server.version, "process_id": server.process_id})
        for line in sys.stdin:
            message = json.loads(line)
            if "reset" in message:
                client.forget()
                _say(replies, {})
            else:
                _say(replies, client.answer(message["prompts"], message["max_tokens"]))
    finally:
        server.close()


class Package:
    """The server in xllamacpp."""

    def __init__(self, options: dict[str, Any]) -> None:
        library: Any = importlib.import_module("xllamacpp")
        params = library.CommonParams()
        params.model.path = options["model"]
        params.n_parallel = _NUM_SLOTS
        params.n_ctx = _NUM_SLOTS * options["max_tokens"]
        params.kv_unified = True
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options["threads"]
        params.port = 0
        self._server = library.Server(params)
        self.address = self._server.listening_address.removeprefix("http://")
        self.version = f"{library.__version__} of xllamacpp"
        self.process_id = os.getpid()

    def close(self) -> None:
        """Nothing: it ends with the process."""

    def has_ended(self) -> bool:
        """It would have ended this process."""
        return False


class Binary:
    """A `llama-server`."""

    def __init__(self, options: dict[str, Any]) -> None:
        port = _free_port()
        self.address = f"127.0.0.1:{port}"
        command = [options["server"], "--model", options["model"], "--port", port, "--threads", options["threads"]]
        command += ["--parallel", _NUM_SLOTS, "--ctx-size", _NUM_SLOTS * options["max_tokens"], "--kv-unified"]
        self._process = subprocess.Popen([str(part) for part in command], stdout=2)
        self.process_id = self._process.pid
        shown = subprocess.run([options["server"], "--version"], capture_output=True, text=True, check=False)
        lines = (shown.stdout + shown.stderr).splitlines()
        self.version = next((line for line in lines if line.startswith("version")), "unknown")

    def close(self) -> None:
        """Ends it."""
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def has_ended(self) -> bool:
        """Whether it is gone."""
        return self._process.poll() is not None


class Client:
    """Streams completions of a server of llama.cpp."""

    def __init__(self, address: str) -> None:
        self._address = address

    def wait_until_ready(self, server: Package | Binary) -> None:
        """Waits until the model is loaded."""
        end = time.monotonic() + _SECONDS_TO_START
        while time.monotonic() < end:
            if server.has_ended():
                sys.exit("the server of llama.cpp ended while it started")
            with suppress(OSError):
                connection = http.client.HTTPConnection(self._address, timeout=10)
                connection.request("GET", "/health")
                if connection.getresponse().status == 200:
                    return
            time.sleep(0.1)
        sys.exit(f"the server of llama.cpp was not ready after {_SECONDS_TO_START:.0f} s")

    def forget(self) -> None:
        """Empties the slots but for a token; its cache in host memory keeps what was computed, as it does for users."""
        for slot in range(_NUM_SLOTS):
            self._complete([1], 1, time.monotonic(), {}, slot)

    def answer(self, prompts: list[list[int]], max_tokens: int) -> dict[str, Any]:
        """Answers prompts with exactly `max_tokens` tokens each, greedily."""
        begin = time.monotonic()
        readings: list[dict[str, Any]] = [{} for _ in prompts]
        threads = [
            Thread(target=self._complete, args=(prompt, max_tokens, begin, reading))
            for prompt, reading in zip(prompts, readings, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors := [reading["error"] for reading in readings if "error" in reading]:
            sys.exit(f"the server of llama.cpp refused a prompt: {errors[0]}")
        return {"seconds": time.monotonic() - begin, "readings": readings}

    def _complete(
        self, prompt: list[int], max_tokens: int, begin: float, reading: dict[str, Any], slot: int = -1
    ) -> None:
        body = {
            "prompt": prompt,
            "n_predict": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "return_tokens": True,
            "id_slot": slot,
        }
        connection = http.client.HTTPConnection(self._address, timeout=_SECONDS_TO_ANSWER)
        connection.request("POST", "/completion", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            reading["error"] = response.read(500).decode(errors="replace")
            return
        for line in response:
            if not line.startswith(b"data: {"):
                continue
            event = json.loads(line[6:])
            if event.get("tokens"):
                reading.setdefault("first", time.monotonic() - begin)
                reading["last"] = time.monotonic() - begin
            if event.get("stop"):
                reading["reused"] = event["timings"]["cache_n"]
        reading.setdefault("first", time.monotonic() - begin)
        reading.setdefault("last", reading["first"])


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port: int = found.getsockname()[1]
        return port


def _say(replies: Any, message: dict[str, Any]) -> None:
    replies.write(json.dumps(message) + "\n")
    replies.flush()


if __name__ == "__main__":
    main()
