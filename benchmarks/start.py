"""Start of the server: from the command to the first answer, of a GGUF file, beside llama.cpp's own server.

    python benchmarks/start.py FILE.gguf [--rounds 5]

In turns, one at a time, medians of wall time, processor time, and the most memory that was resident:

    new     kvmosaic serve, nothing is kept from an earlier start: its tokenizer is built, its answers are checked
    seen    kvmosaic serve, started before
    peer    the server of llama.cpp, as the package xllamacpp brings it, with a context as long as the model's

The question is a chat of one sentence, and the answer one token. Results go to benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from facts import save
from rich.console import Console
from rich.table import Table

PEER = """
import sys, time, xllamacpp
params = xllamacpp.CommonParams()
params.model.path, params.port, params.n_ctx = sys.argv[1], int(sys.argv[2]), 0
server = xllamacpp.Server(params)
time.sleep(600)
"""
BODY = {"messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 1, "temperature": 0}
KINDS = ("new", "seen", "peer")


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def has_answered(port: int) -> bool:
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    request = urllib.request.Request(url, json.dumps(BODY).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return bool(json.load(reply)["choices"])
    except OSError:
        return False


def measured(kind: str, model: Path, kept: Path) -> dict[str, float]:
    """Wall seconds, processor seconds, and mebibytes of one start."""
    port = free_port()
    serve = [sys.executable, "-m", "kvmosaic", "serve", str(model), "--port", str(port)]
    command = [sys.executable, "-c", PEER, str(model), str(port)] if kind == "peer" else serve
    with tempfile.TemporaryDirectory() as fresh:
        folder = fresh if kind == "new" else str(kept)
        environment = {**os.environ, "KVMOSAIC_CACHE_DIR": folder, "KVMOSAIC_DOCUMENTS_DIR": fresh}
        begin = time.monotonic()
        process = subprocess.Popen(
            command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        try:
            while not has_answered(port):
                if process.poll() is not None or time.monotonic() - begin > 300:
                    sys.exit(f"{' '.join(command)} does not answer")
                time.sleep(0.02)
            wall = time.monotonic() - begin
            fields = Path(f"/proc/{process.pid}/stat").read_text().rpartition(") ")[2].split()
            ticks = int(fields[11]) + int(fields[12])
            status = Path(f"/proc/{process.pid}/status").read_text()
            peak = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1])
            return {"wall": wall, "cpu": ticks / os.sysconf("SC_CLK_TCK"), "mebibytes": peak / 1024}
        finally:
            process.terminate()
            process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in KINDS}
    with tempfile.TemporaryDirectory() as kept:
        measured("seen", options.model, Path(kept))
        for _ in range(options.rounds):
            for kind in KINDS:
                found[kind].append(measured(kind, options.model, Path(kept)))
    medians = {
        kind: {name: statistics.median(each[name] for each in found[kind]) for name in found[kind][0]} for kind in KINDS
    }
    table = Table("start", "first answer", "processor", "resident", "to peer's time", "to peer's memory")
    peer = medians["peer"]
    for kind, each in medians.items():
        shares = f"{each['wall'] / peer['wall']:.1f}x", f"{each['mebibytes'] / peer['mebibytes']:.1f}x"
        table.add_row(kind, f"{each['wall']:.1f} s", f"{each['cpu']:.1f} s", f"{each['mebibytes']:.0f} MiB", *shares)
    Console().print(table)
    report: dict[str, Any] = {"model": options.model.name, "rounds": options.rounds, "medians": medians}
    save("start", report)


if __name__ == "__main__":
    main()
