"""What the device can do at most: everything else is set against it."""

from __future__ import annotations

import torch

from benchmarks.gpu.stage import Stage

GIB = 2**30


def measure(stage: Stage) -> None:
    """Rates of copies, reads and products, and what a launch costs."""
    num_bytes = 2**20 if stage.is_dry else 4 * GIB
    with stage.part("copy", bytes=num_bytes) as row:
        source = torch.ones(num_bytes, dtype=torch.uint8, device=stage.device)
        target = torch.empty_like(source)
        row["read_and_written_per_second"] = 2 * num_bytes / stage.seconds(lambda: target.copy_(source))
    with stage.part("read", bytes=num_bytes) as row:
        # one row times a matrix: every weight of a decode step is read once
        matrix = torch.ones(num_bytes // 2 // 4096, 4096, dtype=torch.bfloat16, device=stage.device)
        vector = torch.ones(4096, dtype=torch.bfloat16, device=stage.device)
        row["read_per_second"] = num_bytes / stage.seconds(lambda: matrix @ vector)
    size = 256 if stage.is_dry else 8_192
    with stage.part("square product", size=size, dtype="bfloat16") as row:
        left, right = torch.randn(2, size, size, device=stage.device).to(torch.bfloat16)
        row["operations_per_second"] = 2 * size**3 / stage.seconds(lambda: left @ right)
    with stage.part("launch") as row:
        one = torch.zeros(1, device=stage.device)
        row["seconds"] = stage.seconds(lambda: one.add_(1), calls=20 if stage.is_dry else 1_000)
    with stage.part("host to device", bytes=num_bytes // 16) as row:
        host = torch.ones(num_bytes // 16, dtype=torch.uint8, pin_memory=stage.device.type == "cuda")
        target = torch.empty(num_bytes // 16, dtype=torch.uint8, device=stage.device)
        row["per_second"] = num_bytes / 16 / stage.seconds(lambda: target.copy_(host, non_blocking=True))
