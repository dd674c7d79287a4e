from __future__ import annotations

from pathlib import Path

import pytest

from kvmosaic.console import folder as folders
from kvmosaic.console.folder import find_files, read_folder
from kvmosaic.errors import InvalidDocument


def test_documents_are_text_files_sorted_by_name(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "b.md").write_text("second\n")
    (tmp_path / "a.txt").write_text("\ufefffirst")
    (tmp_path / "c.png").write_bytes(b"PNG")
    (tmp_path / "d.pdf").write_bytes(b"%PDF")
    (tmp_path / ".hidden.txt").write_text("hidden")
    (tmp_path / "folder.txt").mkdir()
    (tmp_path / "folder.txt" / "c.txt").write_text("third")
    (tmp_path / "e.txt").write_bytes(b"")
    assert read_folder(tmp_path) == [
        {"id": "a.txt", "title": "a.txt", "text": "first"},
        {"id": "b.md", "title": "b.md", "text": "second"},
        {"id": "folder.txt/c.txt", "title": "c.txt", "text": "third"},
    ]
    assert caplog.messages[0].startswith("left out: 'd.pdf' cannot be read") and len(caplog.messages) == 2
    assert caplog.messages[1].startswith("left out: 1 .png, 1 empty; read are .txt, ")


def test_a_folder_of_empty_files_says_so(tmp_path: Path) -> None:
    (tmp_path / "a.txt").touch()
    with pytest.raises(InvalidDocument, match=r"all documents of .* are empty"):
        read_folder(tmp_path)


def test_folder_that_is_missing_or_a_file_is_named_in_the_error(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocument, match="nowhere does not exist"):
        read_folder(tmp_path / "nowhere")
    (tmp_path / "file.txt").write_text("text")
    with pytest.raises(InvalidDocument, match=r"file\.txt is not a folder"):
        read_folder(tmp_path / "file.txt")


def test_folder_without_text_files_says_what_it_looks_for(tmp_path: Path) -> None:
    with pytest.raises(InvalidDocument, match=r"has no file that can be read; suffixes: \.txt, "):
        read_folder(tmp_path)


def test_undecodable_and_empty_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("caf\xe9".encode("latin-1"))
    with pytest.raises(InvalidDocument, match=r"latin\.txt' is not UTF-8 text \(byte 3\)"):
        read_folder(tmp_path)
    (tmp_path / "latin.txt").write_text(" \n")
    with pytest.raises(InvalidDocument, match=r"latin\.txt' has no text"):
        read_folder(tmp_path)


def test_sizes_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("x" * 100)
    for limit, value, message in [
        ("MAX_FILES", 1, "has 2 documents; at most 1"),
        ("MAX_FILE_BYTES", 99, "has 100 bytes; at most 99"),
        ("MAX_FOLDER_BYTES", 150, "longer than 150 characters"),
    ]:
        with monkeypatch.context() as patch, pytest.raises(InvalidDocument, match=message):
            patch.setattr(folders, limit, value)
            read_folder(tmp_path)


@pytest.mark.parametrize("pattern", [None, "**/*.txt"])
def test_links_that_lead_out_of_the_folder_are_left_out(tmp_path: Path, pattern: str | None) -> None:
    outside, folder = tmp_path / "outside.txt", tmp_path / "folder"
    folder.mkdir()
    for path in (outside, folder / "own.txt"):
        path.write_text("a text")
    (folder / "out.txt").symlink_to(outside)
    (folder / "in.txt").symlink_to(folder / "own.txt")
    assert set(find_files(folder, pattern).readable) == {"own.txt", "in.txt"}
