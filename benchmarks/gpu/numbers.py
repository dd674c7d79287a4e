"""Composed attention on the device against float64, beside torch's own attention in the same type."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from benchmarks.gpu.stage import Stage
from kvmosaic.attention import Piece, RowGroup, StepAttention, TorchBackend
from kvmosaic.attention.triton.backend import TritonBackend
from kvmosaic.layers import AttentionCall, LayerSpec, MaskSpec
from kvmosaic.memory import BlockStorage
from kvmosaic.rope import Rotation, rotate

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TESTS = ("tests/attention/test_triton.py", "tests/attention/test_triton_paged.py", "tests/model/test_step_graphs.py")
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True, slots=True)
class Case:
    """Queries over documents that were computed at 0 and are read one after the other, and over themselves."""

    name: str
    num_heads: int
    num_kv_heads: int
    key_dim: int
    value_dim: int
    documents: tuple[int, ...]
    num_rows: int
    window: int | None = None
    softcap: float | None = None
    has_sinks: bool = False


CASES = (
    Case("decode, 8 x 2,048", 32, 8, 128, 128, (2_048,) * 8, 1),
    Case("question of 64, 8 x 512", 32, 8, 128, 128, (512,) * 8, 64),
    Case("heads of 64", 20, 4, 64, 64, (512,) * 4, 32),
    Case("heads of 256, soft cap", 8, 4, 256, 256, (300, 700), 32, softcap=50.0),
    Case("keys of 192, values of 128", 16, 16, 192, 128, (500, 600), 16),
    Case("window of 1,024", 8, 8, 64, 64, (700, 900, 500), 33, window=1_024),
    Case("sinks", 64, 8, 64, 64, (400, 800), 17, has_sinks=True),
)
SMALL = (
    Case("decode", 4, 2, 16, 16, (20, 30), 1),
    Case("question", 4, 2, 16, 16, (20, 30), 5, window=24, softcap=4.0),
    Case("sinks", 4, 1, 16, 16, (20,), 3, has_sinks=True),
)


class Layer:
    """One layer with keys and values that are exact in float64."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        pairs = case.key_dim // 2
        frequencies = tuple(500_000.0 ** (-pair / pairs) for pair in range(pairs))
        self.rotation = Rotation("half", 0, case.key_dim, 1, frequencies, case.key_dim)
        self.spec = LayerSpec(
            *(0, case.num_kv_heads, case.key_dim, case.value_dim),
            rotation=self.rotation,
            mask=MaskSpec() if case.window is None else MaskSpec("window", case.window),
        )
        torch.manual_seed(0)
        self.position = sum(case.documents)
        total = self.position + case.num_rows
        self.query = self._random(case.num_rows, case.num_heads, case.key_dim)
        self.keys = self._random(total, case.num_kv_heads, case.key_dim)
        self.values = self._random(total, case.num_kv_heads, case.value_dim)
        self.sinks = self._random(case.num_heads) if case.has_sinks else None

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64).to(self.device)

    def _rotated(self, x: Tensor, positions: Tensor) -> Tensor:
        return rotate(x, self.rotation.tables(positions, dtype=torch.float64, device=self.device))

    def composed(self, dtype: torch.dtype, backend: TorchBackend) -> Tensor:
        """Each document's keys are those of its own positions, and read at its place: [T, H, Dv]."""
        case, starts = self.case, [0, *torch.tensor(self.case.documents).cumsum(0).tolist()]
        counts = torch.cat([torch.arange(count) for count in (*case.documents, case.num_rows)])
        counts[self.position :] += self.position
        keys, query = self._rotated(self.keys, counts), self._rotated(self.query, counts[self.position :])
        storage = BlockStorage([self.spec], self.position, 1, dtype, self.device)
        storage.write(0, slice(None), keys[: self.position].to(dtype), self.values[: self.position].to(dtype))
        reads = tuple(
            Piece("chunk_cache", start, count, start, distance=start)
            for start, count in zip(starts, case.documents, strict=False)
        )
        own = slice(self.position, None)
        call = AttentionCall(
            *(0, query.to(dtype), keys[own].to(dtype), self.values[own].to(dtype), case.key_dim**-0.5, case.softcap),
            sinks=None if self.sinks is None else self.sinks.to(dtype),
            module=nn.Identity(),
        )
        groups = [RowGroup(0, case.num_rows, self.position, reads)]
        return StepAttention([self.spec], {"chunk_cache": storage}, groups, (), backend)(call)

    def dense(self, dtype: torch.dtype, *, by_torch: bool = False) -> Tensor:
        """Ordinary attention over all keys at their places; `by_torch`: its kernel, where that can."""
        case, positions = self.case, torch.arange(self.position + self.case.num_rows)
        query = self._rotated(self.query, positions[self.position :]).to(dtype).transpose(0, 1)
        group = case.num_heads // case.num_kv_heads
        keys, values = self._rotated(self.keys, positions).to(dtype), self.values.to(dtype)
        keys, values = (part.repeat_interleave(group, 1).transpose(0, 1) for part in (keys, values))
        seen = positions[None, :] <= positions[self.position :, None]
        if case.window is not None:
            seen &= positions[None, :] > positions[self.position :, None] - case.window
        seen = seen.to(self.device)
        if by_torch and case.softcap is None and self.sinks is None:
            return scaled_dot_product_attention(query[None], keys[None], values[None], seen)[0].transpose(0, 1)
        scores = (query @ keys.mT) * case.key_dim**-0.5
        if case.softcap is not None:
            scores = torch.tanh(scores / case.softcap) * case.softcap
        scores = scores.masked_fill(~seen, -torch.inf)
        if self.sinks is not None:
            scores = torch.cat((scores, self.sinks.to(dtype)[:, None, None].expand(-1, scores.shape[1], 1)), -1)
        weights = torch.softmax(scores, -1, dtype=torch.promote_types(dtype, torch.float32)).to(dtype)
        return (weights[..., : keys.shape[1]] @ values).transpose(0, 1)


def measure(stage: Stage) -> None:
    """Errors of each case in each type; then the tests of the kernels."""
    torch.backends.cuda.matmul.allow_tf32 = False
    for case in SMALL if stage.is_dry else CASES:
        layer = Layer(case, stage.device)
        exact = layer.dense(torch.float64)
        for dtype in DTYPES:
            with stage.part(case.name, dtype=str(dtype).removeprefix("torch.")) as row:
                for name, found in (
                    ("triton", layer.composed(dtype, TritonBackend())),
                    ("torch", layer.composed(dtype, TorchBackend())),
                    ("ordinary", layer.dense(dtype, by_torch=True)),
                ):
                    row[name] = float((found.double() - exact).square().mean().sqrt())
                row["ratio"] = row["triton"] / row["ordinary"]
    with stage.part("tests of the kernels") as row:
        if missing := [name for name in ("pytest", "hypothesis") if find_spec(name) is None]:
            raise RuntimeError(f"{', '.join(missing)} not installed")
        workers = ["-n", "8"] if not stage.is_dry and find_spec("xdist") else []
        chosen = ["-k", "one_row_over_a_long_run"] if stage.is_dry else []
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-W", "default", "--show-capture=no"]
        found = subprocess.run(
            [*command, "-o", "addopts=", "--import-mode=importlib", *workers, *chosen, *TESTS],
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])},
            capture_output=True,
            text=True,
            timeout=max(5.0, stage.seconds_left - 5),
            check=False,
        )
        row["outcome"] = found.stdout.strip().splitlines()[-1] if found.stdout.strip() else found.stderr[-300:]
        row["failing"] = re.findall(r"^(?:FAILED|ERROR) (\S+)(?: - (.{0,200}))?", found.stdout, re.MULTILINE)
        if found.returncode:
            raise RuntimeError(found.stdout[-1_500:] + found.stderr[-500:])
