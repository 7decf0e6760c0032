"""Tests of the final copy of a trace: compression, verification, existing files and clock anchors."""

from __future__ import annotations

import errno
import gzip
import json
import os
import sys
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from isal import igzip
from parsers import chunks

from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import publish
from profdeck_traces.reading import compiled
from profdeck_traces.reading.integrity import TraceChecker, check_trace
from profdeck_traces.writing import compression
from profdeck_traces.writing.compression import compress_in_child, compress_trace
from profdeck_traces.writing.deflate import SmallGzip

ANCHOR = "profdeck.clock_anchor"
BASE_TIME_NS = 1711964646000000000


def trace_text(events: list[dict[str, Any]]) -> bytes:
    return json.dumps({"schemaVersion": 1, "traceEvents": events, "baseTimeNanoseconds": BASE_TIME_NS}).encode()


def anchor(ts: Any, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "name": ANCHOR, "ts": ts, **more}


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("as_gzip", [False, True])
def test_copy_has_the_content_and_check_of_the_source(tmp_path: Path, *, as_gzip: bool) -> None:
    data = trace_text([anchor(4203669603018.756, dur=1.5), {"ph": "M"}] * 2000)
    destination = tmp_path / "packed"

    packed = compress_trace(write(tmp_path / "raw", data), destination, gzip=as_gzip, anchor_name=ANCHOR)

    written = destination.read_bytes()
    assert (gzip.decompress(written) if as_gzip else written) == data
    assert packed.check == check_trace(destination)
    assert packed.check.whole
    assert packed.check.events == 4000
    assert packed.base_time_ns == BASE_TIME_NS
    assert packed.anchors_ns == (4203669603018756,) * 2000
    assert names_in(tmp_path) == ["packed", "raw"]


@given(
    chunks=st.lists(st.binary(max_size=200) | st.builds(bytes.__mul__, st.binary(max_size=9), st.integers(0, 9000))),
    ending=st.integers(0, 9),
)
def test_chunks_are_one_member_with_and_without_threads(chunks: list[bytes], ending: int) -> None:
    written: list[bytes] = []
    packer = SmallGzip(written.append)
    for number, chunk in enumerate(chunks):
        if number == ending:
            packer.close()  # as during interpreter shutdown
        again = bytearray(chunk)
        packer.compress(again)
        again[:] = bytes(len(again))  # the buffer is reused
    packer.finish()
    packer.close()
    inflater = zlib.decompressobj(31)
    assert inflater.decompress(b"".join(written)) == b"".join(chunks)
    assert (inflater.eof, inflater.unused_data) == (True, b"")
    assert igzip.decompress(b"".join(written)) == b"".join(chunks)


def test_gzip_copy_is_one_member(tmp_path: Path) -> None:
    source = write(tmp_path / "raw", trace_text([{"ph": "X", "name": "n" * 100}] * 30_000))

    compress_trace(source, tmp_path / "packed", gzip=True, anchor_name=ANCHOR)

    written = (tmp_path / "packed").read_bytes()
    inflater = zlib.decompressobj(31)
    assert inflater.decompress(written) == source.read_bytes()
    assert inflater.eof
    assert not inflater.unused_data


@given(
    st.lists(st.tuples(st.integers(0, 300), st.booleans()), max_size=30),
    st.sampled_from([None, 4]),
    st.integers(20, 400),
)
def test_anchors_are_found_for_any_chunk_size(
    texts: list[tuple[int, bool]], indent: int | None, feed_bytes: int
) -> None:
    events: list[dict[str, Any]] = []
    for number, (padding, is_anchor) in enumerate(texts):
        events.append(
            anchor(number, dur=0.25) if is_anchor else {"ph": "X", "name": "x" * padding, "args": {"a": ANCHOR}}
        )
    data = json.dumps({"traceEvents": events, "baseTimeNanoseconds": 7}, indent=indent).encode()
    for library in {compiled.load_library(), None}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "load_library", lambda library=library: library)
            checker = TraceChecker(ANCHOR)

        checker.read(chunks(data, feed_bytes))
        assert checker.finish(len(data)).events == len(events)

        found = compression._anchors_ns(checker.parser)
        assert list(found) == [1000 * number for number, (_, is_anchor) in enumerate(texts) if is_anchor]
        assert compression._base_time_ns(checker.parser) == 7


def test_only_complete_events_with_the_name_and_a_time_are_anchors(tmp_path: Path) -> None:
    events = [
        anchor("1704161511420306.491"),
        anchor(5, ph="B"),
        anchor(6, name=ANCHOR + "2"),
        anchor(None),
        anchor(float("nan")),
        anchor("soon"),
        {"ph": "X", "name": "other", "args": {"name": ANCHOR}},
        anchor(7, dur=2),
    ]

    packed = compress_trace(
        write(tmp_path / "raw", trace_text(events)), tmp_path / "out", gzip=True, anchor_name=ANCHOR
    )

    assert packed.anchors_ns == (1704161511420306491, 7000)


def test_corrupt_trace_is_kept_and_reported(tmp_path: Path) -> None:
    data = trace_text([anchor(1)] * 3)[:-30]

    packed = compress_trace(write(tmp_path / "raw", data), tmp_path / "out", gzip=True, anchor_name=ANCHOR)

    assert gzip.decompress((tmp_path / "out").read_bytes()) == data
    assert not packed.check.whole
    assert packed.base_time_ns is None
    assert len(packed.anchors_ns) == 3


def test_existing_file_is_not_overwritten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, destination = write(tmp_path / "raw", trace_text([anchor(1)])), write(tmp_path / "out", b"precious")

    with pytest.raises(FileExistsError):
        compress_trace(source, destination, gzip=True, anchor_name=ANCHOR)
    monkeypatch.setattr(os.path, "lexists", lambda _: False)  # simulates a concurrent write by another process
    with pytest.raises(FileExistsError):
        compress_trace(source, destination, gzip=True, anchor_name=ANCHOR)

    assert destination.read_bytes() == b"precious"
    assert names_in(tmp_path) == ["out", "raw"]


@pytest.mark.parametrize("taken", [False, True])
def test_existing_file_is_not_overwritten_without_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, taken: bool
) -> None:
    def no_links(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    source, destination = write(tmp_path / "new", b"new"), tmp_path / "out"
    if taken:
        write(destination, b"precious")
        with pytest.raises(FileExistsError):
            publish(source, destination)
        assert destination.read_bytes() == b"precious"
    else:
        publish(source, destination)
        assert destination.read_bytes() == b"new"


def test_failed_write_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    source = write(tmp_path / "raw", trace_text([anchor(1)]))
    monkeypatch.setattr(compression, "write_all", full)
    with pytest.raises(OSError, match="No space left"):
        compress_trace(source, tmp_path / "out", gzip=True, anchor_name=ANCHOR)

    assert names_in(tmp_path) == ["raw"]


def test_missing_source_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="Cannot read"):
        compress_trace(tmp_path / "nowhere", tmp_path / "out", gzip=True, anchor_name=ANCHOR)
    assert names_in(tmp_path) == []


def test_anchor_name_with_escapable_characters_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="letters, digits"):
        compress_trace(tmp_path / "raw", tmp_path / "out", gzip=True, anchor_name='a"b')


@pytest.mark.parametrize("as_gzip", [False, True])
@pytest.mark.parametrize("cut", [0, 30])
def test_child_process_writes_the_same_copy(tmp_path: Path, cut: int, *, as_gzip: bool) -> None:
    data = trace_text([anchor("1704161511420306.491", dur=2), {"ph": "M"}] * 3 + [anchor(4203669603018.756)])
    source = write(tmp_path / "ra w", data[: len(data) - cut])

    here = compress_trace(source, tmp_path / "here", gzip=as_gzip, anchor_name=ANCHOR)
    packed = compress_in_child(source, tmp_path / "there", gzip=as_gzip, anchor_name=ANCHOR)

    assert packed == here
    assert packed.check.whole == (not cut)
    assert len(packed.anchors_ns) == 4
    assert (tmp_path / "there").read_bytes() == (tmp_path / "here").read_bytes()
    assert names_in(tmp_path) == ["here", "ra w", "there"]


def test_failure_in_a_child_process_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="nowhere could not be packed: .*Cannot read"):
        compress_in_child(tmp_path / "nowhere", tmp_path / "out", gzip=True, anchor_name=ANCHOR)
    source, existing = write(tmp_path / "raw", trace_text([anchor(1)])), write(tmp_path / "taken", b"precious")
    with pytest.raises(TraceError, match="FileExistsError"):
        compress_in_child(source, existing, gzip=True, anchor_name=ANCHOR)
    with pytest.raises(TraceError, match="No such file or directory"):
        compress_in_child(source, tmp_path / "none" / "out", gzip=True, anchor_name=ANCHOR)
    with pytest.raises(TraceError, match="letters, digits"):
        compress_in_child(source, tmp_path / "out", gzip=True, anchor_name='a"b')
    assert names_in(tmp_path) == ["raw", "taken"]
    assert existing.read_bytes() == b"precious"


def test_child_process_does_not_inherit_preloads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LD_PRELOAD", str(tmp_path / "no_such_library.so"))  # the dynamic loader would write a warning
    source = write(tmp_path / "raw", trace_text([anchor(1)]))

    assert compress_in_child(source, tmp_path / "out", gzip=True, anchor_name=ANCHOR).check.whole
    assert os.environ["LD_PRELOAD"]


def test_child_process_without_output_is_a_trace_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(TraceError, match="could not be packed: exit code 1"):
        compress_in_child(tmp_path / "raw", tmp_path / "out", gzip=True, anchor_name=ANCHOR)


def test_child_process_has_a_separate_group_in_the_same_session(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "python"
    code = "import os; raise SystemExit(f'{os.getsid(0)} {os.getpgrp() == os.getpid()}')"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{code}"\n')
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(TraceError, match=f"could not be packed: {os.getsid(0)} True"):
        compress_in_child(tmp_path / "raw", tmp_path / "out", gzip=True, anchor_name=ANCHOR)
