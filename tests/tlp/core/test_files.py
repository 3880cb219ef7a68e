"""A file is replaced whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from tlp.core.files import replacing, write_text


def test_the_new_content_takes_the_place_of_the_old(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_text(path, "old")
    with replacing(path) as stream:
        stream.write("für".encode())
        assert path.read_text() == "old"
    assert path.read_text() == "für"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_body_that_fails_leaves_the_old_content_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "state.json"
    write_text(path, "old")
    with pytest.raises(KeyboardInterrupt), replacing(path) as stream:
        stream.write(b"half")
        raise KeyboardInterrupt
    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["state.json"]


def test_a_folder_that_is_not_there_is_an_os_error(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        write_text(tmp_path / "nowhere" / "file", "text")
