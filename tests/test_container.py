from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic.container import MAX_QUOTA_FILE_BYTES, available_memory, cpu_quota, memory_limit


def tree(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A machine's files: what /proc/self/cgroup says, and files under /sys/fs/cgroup."""
    for name, text in {
        "proc/self/cgroup": groups,
        **{f"sys/fs/cgroup/{name}": text for name, text in files.items()},
    }.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def version_1(folder: str, quota: str) -> dict[str, str]:
    return {f"{folder}/cpu.cfs_quota_us": quota, f"{folder}/cpu.cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("groups", "files", "quota"),
    [
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2.0),
        ("0::/\n", {"cpu.max": "max 100000\n"}, None),
        ("0::/\n", {"cpu.max": "50000 100000\n"}, 0.5),
        ("0::/pod/box\n", {"pod/box/cpu.max": "max 100000", "pod/cpu.max": "150000 100000"}, 1.5),
        ("0::/pod/box\n", {"pod/box/cpu.max": "400000 100000", "pod/cpu.max": "300000 100000"}, 3.0),
        ("0::/of/the/host\n", {"cpu.max": "200000 100000"}, 2.0),
        ("0::/\n", {}, None),
        ("", {"cpu.max": "200000 100000"}, None),
        ("7:cpuset:/\n4:cpu,cpuacct:/box\n", version_1("cpu,cpuacct/box", "250000"), 2.5),
        ("4:cpuacct,cpu:/box\n", version_1("cpu", "250000\n"), 2.5),
        ("1:cpu:/\n0::/\n", version_1("cpu", "-1"), None),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "100000"}, None),
        ("7:cpuset:/\n", version_1("cpuset", "100000"), None),
        ("1:name=systemd:/\n0::/box\n", {"unified/box/cpu.max": "100000 100000"}, 1.0),
    ],
)
def test_tightest_limit_around_the_process_counts(
    tmp_path: Path, groups: str, files: dict[str, str], quota: float | None
) -> None:
    assert cpu_quota(tree(tmp_path, groups, files)) == quota


@pytest.mark.parametrize(
    ("groups", "files", "limit"),
    [
        ("0::/\n", {"memory.max": "1073741824\n"}, 2**30),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/pod/box\n", {"pod/box/memory.max": "4096", "pod/memory.max": "2048"}, 2048),
        ("8:memory:/box\n", {"memory/box/memory.limit_in_bytes": "2048"}, 2048),
        ("8:memory:/box\n", {"memory/box/memory.limit_in_bytes": "9223372036854771712"}, None),
        ("4:cpu:/\n", {"cpu/memory.max": "2048"}, None),
        ("0::/\n", {"memory.max": "-1"}, None),
        ("", {}, None),
    ],
)
def test_smallest_memory_limit_around_the_process_counts(
    tmp_path: Path, groups: str, files: dict[str, str], limit: int | None
) -> None:
    assert memory_limit(tree(tmp_path, groups, files)) == limit


@pytest.mark.parametrize(
    "text", ["0 100000", "100000 0", "100000", "1e5 1e5", "٣ ٣", "-5 -5", "9" * 400 + " 1", "\x00"]
)
def test_files_that_make_no_sense_are_no_limit(tmp_path: Path, text: str) -> None:
    assert cpu_quota(tree(tmp_path, "0::/\n", {"cpu.max": text})) is None


def test_path_that_leads_out_of_the_groups_is_not_followed(tmp_path: Path) -> None:
    assert cpu_quota(tree(tmp_path, "0::/../../box\n", {"../../box/cpu.max": "100000 100000"})) is None


def test_machine_without_groups_has_no_limit(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None


def test_this_machine_can_be_asked() -> None:
    quota = cpu_quota()
    assert quota is None or quota > 0


@given(groups=st.text(max_size=200), content=st.binary(max_size=100))
def test_whatever_the_files_hold_there_is_an_answer(
    tmp_path_factory: pytest.TempPathFactory, groups: str, content: bytes
) -> None:
    root = tree(tmp_path_factory.mktemp("root"), groups.encode(errors="replace").decode(), {})
    (root / "sys/fs/cgroup").mkdir(parents=True)
    (root / "sys/fs/cgroup/cpu.max").write_bytes(content)
    quota = cpu_quota(root)
    assert quota is None or quota > 0


def test_file_without_end_is_read_up_to_a_limit(tmp_path: Path) -> None:
    root = tree(tmp_path, "x" * 2 * MAX_QUOTA_FILE_BYTES + "\n0::/\n", {"cpu.max": "100000 100000"})
    assert cpu_quota(root) is None


@pytest.mark.parametrize(
    ("limit", "available", "expected"),
    [
        ("max", 8_000, 8_000),
        ("4096000", 8_000, 3_000),
        ("40960000", 8_000, 8_000),
        ("1024", 8_000, 0),
        ("max", None, None),
    ],
)
def test_available_memory_is_what_machine_and_container_leave(
    tmp_path: Path, limit: str, available: int | None, expected: int | None
) -> None:
    tree(tmp_path, "0::/\n", {"memory.max": limit})
    (tmp_path / "proc" / "self" / "status").write_text("Name:\tpython\nVmRSS:\t    1000 kB\nThreads: 1\n")
    if available is not None:
        (tmp_path / "proc" / "meminfo").write_text(f"MemTotal: 9 kB\nMemAvailable:   {available} kB\n")
    found = available_memory(tmp_path)
    assert (None if found is None else found // 1_024) == expected
