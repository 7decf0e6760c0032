"""Tests of trace verification, compared with the standard library's json."""

from __future__ import annotations

import bz2
import codecs
import gzip
import io
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st
from parsers import chunks

from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading import compiled
from profdeck_traces.reading.integrity import TraceCheck, TraceChecker, check_trace

NASTY = ["{", "}", "[", "]", '"', "\\", '"ph"', '"ph": "X"', '}, {"ph": "X"', "é", "\u2028", "😀", "\n", "\x00", ","]
TEXTS = st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=4)), max_size=5).map("".join)
NUMBERS = st.one_of(
    st.integers(-(10**20), 10**20),
    st.floats(allow_nan=True),
    st.sampled_from([0, -1, 1e-9, 1.5e300, 4203669603018.756]),
)
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=6,
)
EVENTS = st.fixed_dictionaries(
    {"ph": st.sampled_from(["X", "M", "i", "s", "f"])},
    optional={"name": TEXTS, "cat": TEXTS, "pid": VALUES, "ts": NUMBERS, "dur": NUMBERS, "args": VALUES},
)
ELEMENTS = st.lists(st.one_of(EVENTS, EVENTS, EVENTS, VALUES), max_size=12)
TRACES = st.one_of(
    ELEMENTS,
    st.builds(
        lambda before, events, after: {**before, "traceEvents": events, **after},
        st.dictionaries(TEXTS.filter(lambda key: key != "traceEvents"), VALUES, max_size=2),
        ELEMENTS,
        st.dictionaries(TEXTS.filter(lambda key: key != "traceEvents"), VALUES, max_size=2),
    ),
)
LAYOUTS = st.fixed_dictionaries(
    {
        "indent": st.sampled_from([None, None, 0, 1, 4, "\t"]),
        "separators": st.sampled_from([None, (",", ":"), (" ,\n ", " : "), (",\r\n", ":")]),
        "ensure_ascii": st.booleans(),
    }
)
FEED_BYTES = st.sampled_from([1, 2, 3, 7, 16, 61, 200, 1 << 20])


def check_bytes(data: bytes, feed_bytes: int = 1 << 20) -> TraceCheck:
    """Check a document with the compiled and the Python parser, which must agree."""
    checks = []
    for library in {compiled.load_library(), None}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "load_library", lambda library=library: library)
            checker = TraceChecker()
        checker.read(chunks(data, feed_bytes))
        checks.append(checker.finish(len(data)))
    first, last = checks[0], checks[-1]
    assert (first.events, first.whole) == (last.events, last.whole), checks
    return first


def events_by_json(data: bytes) -> int | None:
    """Return the number of events, or None if the text is not exactly one complete Chrome trace."""
    try:
        document = json.loads(data)
    except ValueError:
        return None
    if isinstance(document, dict):
        document = document.get("traceEvents")
    if not isinstance(document, list):
        return None
    return sum("ph" in event for event in document if isinstance(event, dict))


@given(TRACES, LAYOUTS, FEED_BYTES)
def test_event_count_and_completeness_equal_those_of_json(trace: Any, layout: dict[str, Any], feed_bytes: int) -> None:
    data = json.dumps(trace, **layout).encode("utf-8", "surrogatepass")

    check = check_bytes(data, feed_bytes)

    assert check.events == events_by_json(data)
    assert check.whole == (check.events > 0)
    assert check.problem is None or check.problem == "There are no events in the trace."
    assert check.json_bytes == len(data)


@given(TRACES, LAYOUTS, FEED_BYTES, st.data())
def test_mutated_trace_is_complete_only_if_json_accepts_it(
    trace: Any, layout: dict[str, Any], feed_bytes: int, data: st.DataObject
) -> None:
    text = bytearray(json.dumps(trace, **layout).encode("utf-8", "surrogatepass"))
    for _ in range(data.draw(st.integers(1, 2))):
        offset = data.draw(st.integers(0, len(text) - 1))
        new = data.draw(
            st.one_of(st.binary(max_size=2), st.sampled_from([b"{", b"}", b"]", b'"', b",", b"\\", b"0", b"\0"]))
        )
        text[offset : offset + data.draw(st.integers(0, 2))] = new
        text = text or bytearray(b" ")
    mutated = bytes(text)

    check = check_bytes(mutated, feed_bytes)
    expected = events_by_json(mutated)

    # Here, the checker is stricter than json in only one respect: it rejects a second array of events.
    if check.problem is None or "a second array of events" not in check.problem:
        assert check.whole == bool(expected), check
    if check.whole:
        assert check.events == expected


@given(TRACES, LAYOUTS, st.sampled_from([16, 61, 1 << 20]), st.data())
def test_strict_prefix_of_a_trace_is_not_complete(
    trace: Any, layout: dict[str, Any], feed_bytes: int, data: st.DataObject
) -> None:
    text = json.dumps(trace, **layout).encode("utf-8", "surrogatepass")

    check = check_bytes(text[: data.draw(st.integers(0, len(text) - 1))], feed_bytes)

    assert not check.whole
    assert check.problem


@pytest.mark.parametrize("as_gzip", [False, True])
def test_each_prefix_of_a_trace_is_truncated(tmp_path: Path, *, as_gzip: bool) -> None:
    data = json.dumps({"traceEvents": [{"ph": "X", "name": '}]"'}] * 3, "n": [1]}).encode()
    json_bytes = len(data)
    data = gzip.compress(data) if as_gzip else data
    path = tmp_path / "trace"

    for size in range(len(data)):
        path.write_bytes(data[:size])
        assert not check_trace(path).whole, size
    path.write_bytes(data)
    assert check_trace(path) == TraceCheck(len(data), json_bytes, 3, whole=True, problem=None)


@pytest.mark.parametrize("separator", ['}, {"ph"', '},{"ph"'])
def test_truncation_inside_an_event_is_detected(separator: str) -> None:
    inner = json.dumps([{"ph": 1}, {"ph": 2}]).replace('}, {"ph"', separator)
    event = f'{{"ph": "X", "args": {inner}, "name": "{"x" * 300}"}}'

    check = check_bytes(f"[{', '.join([event] * 50)}]".replace('}, {"ph"', separator).encode(), 1000)

    assert check.whole
    assert check.events == 50


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", "The file is empty."),
        (b"   ", "The JSON is not closed: it ends after 3 bytes."),
        (b"[]", "There are no events in the trace."),
        (b'{"traceEvents": [{"name": "no phase"}]}', "There are no events in the trace."),
        (b"{}", 'It is not a Chrome trace: neither an array nor an object with "traceEvents".'),
        (b'"text"', "Malformed JSON at offset 0: neither an object nor an array begins."),
        (b'{"a": {"traceEvents": [{"ph": "X"}]}}', "It is not a Chrome trace: neither an array nor"),
        (b'{"traceEvents": null}', "Malformed JSON at offset 16: traceEvents is not an array."),
        (b'{"traceEvents": [{"ph": "X"}]', "The JSON is not closed: it ends after 29 bytes."),
        (b'[{"ph": "X"}]{', "Malformed JSON at offset 13: something follows the document."),
        (b'[{"ph": "X"}, \0\0\0\0', "Malformed JSON at offset 14: a value is expected."),
        (b'[{"ph": "X",}]', "Malformed JSON at offset 12:"),
        (b'[{"ph": "\xff"}]', "Malformed JSON at offset 9: bytes that are not UTF-8."),
        (b'[{"ph": "X"}, "\xc3', "Malformed JSON at offset 15: bytes that are not UTF-8."),
        (b'[{"ph": "X", "a": 01}]', "Malformed JSON at offset 18:"),
        (b'{"traceEvents": [{"ph": "X"}], "traceEvents": []}', "Malformed JSON at offset 46: a second array of events"),
    ],
)
@pytest.mark.parametrize("feed_bytes", [1, 1 << 20])
def test_problem_has_the_cause_and_the_offset(text: bytes, problem: str, feed_bytes: int) -> None:
    check = check_bytes(text, feed_bytes)

    assert not check.whole
    assert check.problem is not None
    assert check.problem.startswith(problem)


@pytest.mark.parametrize("key", ["ph", "p\\u0068", "\\u0070\\u0068"])
def test_escaped_key_equals_the_unescaped_key(key: str) -> None:
    text = f'{{"trace\\u0045vents": [{{"{key}": "X"}}, {{"not ph": 1}}]}}'.encode()

    assert check_bytes(text, 5).events == 1
    assert check_bytes(text).whole


def test_phase_of_an_event_can_be_any_value() -> None:
    assert check_bytes(json.dumps([{"ph": None}, {"ph": "X"}, {}, 5, [{"ph": "X"}]] * 50).encode(), 500).events == 100


@pytest.mark.parametrize(
    ("value", "whole"),
    [
        ("[" * 512 + "]" * 512, True),
        ("[" * 513 + "]" * 513, False),
        ("[" * 10_000 + "]" * 10_000, False),
        ("[" * 10_000, False),
        ('{"a":' * 512 + "1" + "}" * 512, True),
        ('{"a":' * 10_000 + "1" + "}" * 10_000, False),
        ("9" * 200_000, True),
        ("1." + "9" * 200_000 + "e9", True),
        ("0" * 200_000, False),
        ("1" * 200_000 + "-", False),
        ("a" * 200_000, False),
        ('"' + "x" * 200_000 + '"', True),
        ('"' + "\\u0041" * 10_000 + '"', True),
        ('"' + "x" * 200_000, False),
        (" " * 200_000 + "1", True),
        ("1" + " " * 200_000, True),
    ],
    ids=lambda value: str(value)[:12],
)
@pytest.mark.parametrize("feed_bytes", [4099, 1 << 20])
def test_extreme_values_have_a_result(value: str, feed_bytes: int, *, whole: bool) -> None:
    text = f'[{{"ph": "X"}}, {{"ph": "X"}}, {{"ph": "X", "args": {value}}}, {{"ph": "X"}}]'.encode()

    assert check_bytes(text, feed_bytes).whole == whole


def test_unlimited_nesting_is_rejected() -> None:
    assert "nested too deeply" in str(check_bytes(b"[" * 2000).problem)


def archived(data: bytes, **more: bytes) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in {"trace.json": data, **more}.items():
            archive.writestr(name, content)
    return file.getvalue()


@pytest.mark.parametrize("pack", [bytes, gzip.compress, bz2.compress, archived])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be"])
def test_compressed_and_encoded_traces_are_checked(
    tmp_path: Path, pack: Callable[[bytes], bytes], encoding: str
) -> None:
    text = json.dumps([{"ph": "X", "name": "é😀"}] * 2000, ensure_ascii=False)
    path = tmp_path / "trace"
    data = pack(text.encode(encoding))
    path.write_bytes(data)
    assert check_trace(path) == TraceCheck(len(data), len(text.encode()), 2000, whole=True, problem=None)
    for size in (len(data) - 1, len(data) - 9, len(data) // 2):
        path.write_bytes(data[:size])
        assert not check_trace(path).whole


def test_mark_alone_is_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(codecs.BOM_UTF8)
    assert check_trace(path).problem == "The file is empty."


def test_archive_of_several_files_is_a_trace_error(tmp_path: Path) -> None:
    path = tmp_path / "trace.zip"
    path.write_bytes(archived(b"[]", other=b"[]"))
    with pytest.raises(TraceError, match=r"is a zip archive of 2 files \(trace.json, other"):
        check_trace(path)


def test_members_that_are_kept_are_bounded() -> None:
    members = {"short": 1, "long": "x" * (2 << 20), **{str(number): "y" * 1000 for number in range(3000)}}
    data = json.dumps({"traceEvents": [{"ph": "X"}], **members}).encode()
    kept = []
    for library in {compiled.load_library(), None}:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compiled, "load_library", lambda library=library: library)
            checker = TraceChecker()
        checker.read(chunks(data))
        assert checker.finish(len(data)).whole
        kept.append(checker.parser.members())
    assert kept[0] == kept[-1]
    assert (b'"short"', b"1") in kept[0]
    assert 900_000 < sum(map(len, [text for pair in kept[0] for text in pair])) <= 1 << 20


def test_zip_bomb_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    path.write_bytes(gzip.compress(b"[" + b" " * 8_000_000))

    check = check_trace(path, max_json_bytes=3_000_000)

    assert check.problem == "The JSON has more than 3,000,000 bytes: the remainder was not read."
    assert check.json_bytes <= 3_000_000


def test_stream_error_is_reported_before_json_errors(tmp_path: Path) -> None:
    path = tmp_path / "trace.gz"
    path.write_bytes(gzip.compress(b'[{"ph": "X"}]')[:-1])

    check = check_trace(path)

    assert check.events == 1
    assert check.problem == "The gzip stream ends after 32 bytes, before its trailer: the file was cut off."


def test_progress_ends_at_the_file_size(tmp_path: Path) -> None:
    path = tmp_path / "trace"
    path.write_bytes(json.dumps([{"ph": "X"}] * 200_000).encode())
    progress: list[tuple[int, int]] = []

    check_trace(path, on_progress=lambda read, total: progress.append((read, total)))

    size = path.stat().st_size
    assert len(progress) > 1
    assert progress[-1] == (size, size)


def test_missing_file_is_a_trace_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"Cannot read .*nowhere: No such file"):
        check_trace(tmp_path / "nowhere")
    with pytest.raises(TraceError, match="Is a directory"):
        check_trace(tmp_path)


@pytest.mark.parametrize("member", [0, 1, 2])
@pytest.mark.parametrize("flag", [0x20, 0x40, 0x80])
def test_unknown_gzip_flags_are_an_error(tmp_path: Path, member: int, flag: int) -> None:
    text = json.dumps({"traceEvents": [{"ph": "X", "ts": n, "name": "x"} for n in range(99)]}).encode()
    members = [bytearray(gzip.compress(content)) for content in (text[:500], text[500:900], text[900:])]
    path = tmp_path / "a.trace.json.gz"
    path.write_bytes(b"".join(members))
    assert check_trace(path).whole
    members[member][3] |= flag
    path.write_bytes(b"".join(members))
    check = check_trace(path)
    assert not check.whole
    assert "flags that no version of gzip knows" in (check.problem or "")
