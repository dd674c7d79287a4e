"""What is kept from one start to the next: read back whole, or made again; bounded, private, and never in the way."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from kvmosaic import kept
from kvmosaic.kept import VARIABLE, keep, kept_folder


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    return tmp_path / "cache"


def write(text):
    return lambda draft: (draft / "a.txt").write_text(text)


def test_what_was_written_is_found_by_its_sources_alone(home):
    folder = kept_folder("checks", b"ab", b"c")
    assert folder.parent == home / "checks" and not home.exists()
    assert folder == kept_folder("checks", b"ab", b"c") != kept_folder("checks", b"a", b"bc")
    keep(folder, write("x"))
    assert (folder / "a.txt").read_text() == "x"
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700
    assert [path.name for path in folder.parent.iterdir()] == [folder.name], "no draft is left"


def test_a_failure_leaves_nothing_and_harms_nobody(home):
    folder = kept_folder("checks", b"a")

    def fail(draft):
        (draft / "half").write_text("")
        raise ValueError("no")

    keep(folder, fail)
    assert not list(folder.parent.iterdir())
    home.joinpath("checks").rmdir()
    home.joinpath("checks").write_text("a file in its way")
    keep(folder, write("x"))
    assert home.joinpath("checks").read_text() == "a file in its way"


def test_a_later_one_takes_the_place_of_a_damaged_one_and_the_oldest_leave(home, monkeypatch):
    monkeypatch.setattr(kept, "MAX_KEPT", 3)
    folders = [kept_folder("checks", bytes([number])) for number in range(5)]
    for folder in folders:
        keep(folder, write("first"))
        keep(folder, write("second"))
        assert (folder / "a.txt").read_text() == "second"
    assert len(list((home / "checks").iterdir())) == 3 and folders[-1].is_dir()


def test_nothing_is_kept_where_that_is_asked_for(monkeypatch):
    monkeypatch.setenv(VARIABLE, "none")
    assert kept_folder("checks", b"a") is None
    keep(None, write("x"))


def test_a_user_has_a_folder_of_their_own(monkeypatch, tmp_path):
    monkeypatch.setenv(VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert kept_folder("checks", b"a").parent.parent.name == "kvmosaic"
    assert isinstance(kept_folder("checks", b"a"), Path)
