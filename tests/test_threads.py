from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmosaic import cli
from kvmosaic.container import SPINS, Machine, this_machine, thread_variables

SPIN = {"GOMP_SPINCOUNT": str(SPINS)}
SLEEP = {"OMP_WAIT_POLICY": "PASSIVE"}
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "OMP_NUM_THREADS", "MKL_NUM_THREADS")


@pytest.mark.parametrize(
    ("machine", "wanted"),
    [
        (Machine(2, 2, load=0.0), SPIN),
        (Machine(2, 2, load=0.5), SPIN),
        (Machine(2, 2, load=0.6), SLEEP),
        (Machine(2, 2, load=1.0), SLEEP),
        (Machine(2, 2, load=None), SLEEP),
        (Machine(64, 64, load=16.0), SPIN),
        (Machine(64, 64, load=17.0), SLEEP),
        (Machine(4, 64, load=50.0), SPIN),  # pinned to four cores of a host that has others for its own work
        (Machine(4, 64, load=62.0), SLEEP),
        (Machine(64, 64, quota=2.0, load=40.0), SPIN | {"OMP_NUM_THREADS": "2"}),
        (Machine(64, 64, quota=2.5, load=64.0), SLEEP | {"OMP_NUM_THREADS": "3"}),
        (Machine(64, 64, quota=0.1, load=0.0), SPIN | {"OMP_NUM_THREADS": "1"}),
        (Machine(2, 2, quota=2.0, load=0.0), SPIN),
        (Machine(2, 64, quota=8.0, load=0.0), SPIN),
    ],
    ids=str,
)
def test_threads_spin_where_cores_are_free_and_are_as_many_as_the_container_allows(
    machine: Machine, wanted: dict[str, str]
) -> None:
    assert thread_variables({}, machine) == wanted


@given(
    set_by_user=st.sets(st.sampled_from(VARIABLES)),
    cores=st.integers(1, 512),
    others=st.integers(0, 512),
    quota=st.none() | st.floats(0.001, 1_000),
    load=st.none() | st.floats(0, 10_000),
)
def test_what_the_user_set_stays(
    set_by_user: set[str], cores: int, others: int, quota: float | None, load: float | None
) -> None:
    machine = Machine(cores, cores + others, quota, load)
    wanted = thread_variables(dict.fromkeys(set_by_user, "7"), machine)
    assert not set_by_user & set(wanted)
    assert 1 <= machine.threads <= cores
    waits = set(wanted) & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
    assert len(waits) == (0 if set_by_user & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} else 1)
    if set_by_user & {"OMP_NUM_THREADS", "MKL_NUM_THREADS"}:
        assert "OMP_NUM_THREADS" not in wanted


def test_command_sets_them_before_it_does_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.setenv(name, "1")  # so that it is put back
        monkeypatch.delenv(name)
    seen = {}
    monkeypatch.setattr("kvmosaic.container.this_machine", lambda: Machine(8, 8, quota=3.0, load=1.0))
    monkeypatch.setattr(cli, "app", lambda prog_name: seen.update(os.environ))
    cli.main()
    assert {name: seen[name] for name in VARIABLES if name in seen} == {**SPIN, "OMP_NUM_THREADS": "3"}


def test_torch_keeps_to_the_number() -> None:
    code = (
        "import os\n"
        "from kvmosaic.container import Machine, thread_variables\n"
        "os.environ.update(thread_variables({}, Machine(64, 64, quota=1.5, load=0.0)))\n"
        "import torch; print(torch.get_num_threads())"
    )
    environment = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    result = subprocess.run((sys.executable, "-c", code), env=environment, capture_output=True, text=True, check=True)
    assert result.stdout == "2\n"


def test_this_machine_is_described() -> None:
    machine = this_machine()
    assert 1 <= machine.threads <= machine.cores <= machine.all_cores
    assert machine.load is None or machine.load >= 0
