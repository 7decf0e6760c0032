"""Tests of atomic file creation, complete writes and directory sizes."""

from __future__ import annotations

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest

from profdeck_traces.base.files import append_file, directory_size, file_size, new_file, write_all


def test_new_file_appears_when_the_block_ends(tmp_path: Path) -> None:
    with new_file(tmp_path / "new") as file:
        write_all(file, b"text")
        assert not (tmp_path / "new").exists()

    assert [path.name for path in tmp_path.iterdir()] == ["new"]
    assert (tmp_path / "new").read_bytes() == b"text"


def test_failed_write_creates_no_file(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), new_file(tmp_path / "new"):
        raise KeyboardInterrupt

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("during_write", [False, True])
def test_new_file_does_not_replace_an_existing_file(tmp_path: Path, *, during_write: bool) -> None:
    def write() -> None:
        with new_file(tmp_path / "taken"):
            (tmp_path / "taken").write_bytes(b"precious")

    (tmp_path / "taken").write_bytes(b"precious")
    if during_write:
        (tmp_path / "taken").unlink()
    with pytest.raises(FileExistsError):
        write()

    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"precious"]


class PartialWriter(io.BytesIO):
    """File that writes at most three bytes per call. Pipes and full disks can also write less than requested."""

    def write(self, data: Any) -> int:
        return super().write(bytes(data[:3]))


def test_write_all_repeats_partial_writes() -> None:
    file = PartialWriter()
    write_all(file, b"0123456789")
    assert file.getvalue() == b"0123456789"


@pytest.mark.parametrize("in_kernel", [False, True])
def test_append_file_copies_with_and_without_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, in_kernel: bool
) -> None:
    def raise_exdev(*_: Any) -> None:
        raise OSError(errno.EXDEV, "other file systems")

    if not in_kernel:
        monkeypatch.setattr(os, "copy_file_range", raise_exdev, raising=False)
    (tmp_path / "part").write_bytes(bytes(3_000_000))
    with (tmp_path / "whole").open("wb", buffering=0) as file:
        for text in (b"a", b"b"):
            write_all(file, text)
            append_file(file, tmp_path / "part")

    assert (tmp_path / "whole").read_bytes() == b"a" + bytes(3_000_000) + b"b" + bytes(3_000_000)


def test_directory_size_excludes_links_and_special_files(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    (tree / "a" / "b").mkdir(parents=True)
    (tree / "one").write_bytes(bytes(10))
    (tree / "a" / "b" / "two").write_bytes(bytes(300))
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "large").write_bytes(bytes(5000))
    (tree / "link").symlink_to(tmp_path / "elsewhere")
    (tree / "file").symlink_to(tmp_path / "elsewhere" / "large")
    (tree / "nowhere").symlink_to("nothing")
    os.mkfifo(tree / "pipe")

    assert directory_size(tree) == 310
    assert directory_size(tmp_path / "none") == file_size(tmp_path / "none") == 0
