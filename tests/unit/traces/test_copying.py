"""Tests of copied events. Both parsers must write the same text and change only the requested values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from profdeck_traces.base.errors import TraceError
from profdeck_traces.reading.compiled import CompiledParser, load_library
from profdeck_traces.reading.copying import copy_events
from profdeck_traces.reading.fallback import PythonParser
from profdeck_traces.reading.walking import Changes, Kind, Mark, Parser, walk

EVENTS = [
    '{"ph": "X", "pid": 1, "tid": "a", "ts": 5, "dur": 1 , "id": 7}',
    '{"ts":"12.5","ph":"s","id" : "0xFf","pid":null , "args": {"id": 1, "pid": 2, "ts": 3}}',
    '{"ph": "f", "pid": 1, "pid": 2, "id": "x", "ts": 1e3}',
    '{"ph": "i", "ts": "soon"}',
    "{ }",
    '{"pid": 1}',
    '[{"ph": "X"}]',
    "null",
    '{"p\\u0069d": [1], "ph": 3, "args": NaN, "ts": -0.0005, "name": "\\ud800 }, {\\"ph\\": "}',
]  # fmt: skip
COPIED = [
    '{"ph": "X", "pid": 70, "tid": "b", "ts": 6.500, "dur": 1 , "id": 7}',
    '{"tid": "b", "ts":"14.000","ph":"s","id" : 40,"pid":70 , "args": {"id": 1, "pid": 2, "ts": 3}}',
    '{"ph": "f", "pid": 1, "pid": 80, "id": 41, "ts": 1001.500}',
    '{"pid": 80, "ph": "i", "ts": "soon"}',
    '{"p\\u0069d": [1], "ph": 3, "args": NaN, "ts": 1.500, "name": "\\ud800 }, {\\"ph\\": "}',
]
ROWS = len(COPIED)


def parsers(args: dict[str, int]) -> list[Parser]:
    library = load_library()
    return [PythonParser(args), *([] if library is None else [CompiledParser(library, args)])]


def copied(parser: Parser, data: bytes, size: int, changes: Changes) -> tuple[bytes, list[Mark], str | None]:
    parser.copy_events(changes)
    text = b""
    marks: list[Mark] = []

    def chunks() -> Any:
        nonlocal text
        for at in range(0, len(data), size):
            yield data[at : at + size]
            part, part_marks = parser.take_copied()
            marks.extend(Mark(mark.row, mark.begin + len(text), mark.end + len(text)) for mark in part_marks)
            text += part

    result = walk(chunks(), parser, max_json_bytes=1 << 30)
    part, part_marks = parser.take_copied()
    marks.extend(Mark(mark.row, mark.begin + len(text), mark.end + len(text)) for mark in part_marks)
    return text + part, marks, result.problem


@pytest.mark.parametrize("size", [1, 7, 100, 10_000])
@pytest.mark.parametrize("number", [0, -1], ids=["python", "compiled"])
def test_only_selected_values_change(number: int, size: int) -> None:
    parser = parsers({})[number]
    changes = Changes(
        keep=np.array([1, 1, 2, 1, 1]),
        lane=np.array([0, 0, 1, 1, -1]),
        lanes=[(b"70", b'"b"'), (b"80", b"")],
        ids=np.array([-1, 40, 41, 42, -1]),
        shift_ns=1500,
        separator=b"\n",
    )

    text, marks, problem = copied(parser, f"[{', '.join(EVENTS)}]".encode(), size, changes)

    assert problem is None
    assert text.decode().split("\n") == COPIED
    assert [(mark.row, text[mark.begin : mark.end].decode()) for mark in marks] == [(2, COPIED[2])]
    assert (parser.copied, parser.rows) == (ROWS, ROWS)


@given(
    st.lists(st.sampled_from([*EVENTS, '{"ph": "X", "name": "\x01"}', "{", '{"ph" 1}', "]"]), max_size=12),
    st.lists(st.sampled_from([0, 1, 2]), min_size=6, max_size=6),
    st.lists(st.sampled_from([-1, 0, 1]), min_size=6, max_size=6),
    st.sampled_from([0, 1, -7_250_000]),
    st.sampled_from([5, 64, 1000]),
)
def test_parsers_copy_equal_texts(
    events: list[str], keep: list[int], lane: list[int], shift_ns: int, size: int
) -> None:
    changes = Changes(
        keep=np.array(keep), lane=np.array(lane), lanes=[(b"7", b""), (b"8", b"9")], ids=np.arange(6), shift_ns=shift_ns
    )
    data = f'{{"a": 1, "traceEvents": [{", ".join(events)}], "b": 2}}'.encode()
    results = [copied(parser, data, size, changes) for parser in parsers({})]

    assert results[0][:2] == results[-1][:2]
    assert (results[0][2] is None) == (results[-1][2] is None)


def test_events_without_a_row_in_the_arrays_are_not_copied() -> None:
    for parser in parsers({}):
        assert copied(parser, b'[{"ph": "X"}, {"ph": "i"}]', 99, Changes(keep=np.array([1])))[0] == b'{"ph": "X"}'


def test_trace_that_changed_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    path.write_text('[{"ph": "X"}]')
    written: list[bytes] = []

    assert copy_events(path, Changes(keep=np.ones(1, np.uint8)), written.append) == 1
    with pytest.raises(TraceError, match="changed while it was being read"):
        copy_events(path, Changes(keep=np.ones(2, np.uint8)), written.append)
    assert written == [b'{"ph": "X"}'] * 2


def test_changes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="different lengths"):
        Changes(keep=np.ones(3, np.uint8), ids=np.zeros(2, np.int64))
    with pytest.raises(ValueError, match="not in `lanes`"):
        Changes(lane=np.array([0]))
    with pytest.raises(ValueError, match="cannot be shifted"):
        Changes(shift_ns=-(2**63))


IDS = [
    5,
    0,
    -1,
    2**62,
    2**63,
    "10",
    "0x1F",
    "1f",
    "0x",
    "",
    "g",
    "f" * 15,
    "f" * 16,
    "\u00e9",
    None,
    True,
    5.0,
    [1],
    {},
]


def test_numbers_and_hexadecimal_ids_are_integers() -> None:
    data = json.dumps([{"ph": "s", "id": flow_id, "bind_id": flow_id, "args": {"@id": 3, "id": 4}} for flow_id in IDS])
    for parser in parsers({"@id": Kind.ID, "@bind_id": Kind.TEXT}):
        walk((chunk for chunk in [data.encode()]), parser, max_json_bytes=1 << 30)
        rows, values = parser.pairs("@id")
        texts = [json.loads(text) for text in parser.texts("@id")]
        found = [value if value >= 0 else texts[-2 - value] for value in values.tolist()]
        assert rows.tolist() == [row for row, flow_id in enumerate(IDS) if flow_id is not None]
        assert repr(found) == repr(
            [5, 0, -1, 2**62, 2**63, 16, 31, 31, "0x", "", "g", 2**60 - 1, "f" * 16, "é", True, 5.0, [1], {}]
        )
        rows, values = parser.pairs("@bind_id")
        texts = [json.loads(text) for text in parser.texts("@bind_id")]
        assert [texts[value] for value in values.tolist()] == [flow_id for flow_id in IDS if flow_id is not None]


@pytest.mark.parametrize("text", [b"\xed\xa0\x80", b"\xf0\x9f\x98\x80", b"\xc3\xa9"])
def test_characters_can_be_cut_at_the_end_of_a_chunk(text: bytes) -> None:
    event = b'{"ph": "X", "name": "%b"}' % text
    for parser in parsers({}):
        assert copied(parser, b"[%b]" % event, 1, Changes()) == (event, [], None)


def test_members_state_where_the_events_are() -> None:
    for parser in parsers({}):
        walk((chunk for chunk in [b'{"a": [1,\n2], "traceEvents": [{"ph": "X"}], "b": 3}']), parser, max_json_bytes=99)
        assert parser.members() == [(b'"a"', b"[1, 2]"), (b'"traceEvents"', b""), (b'"b"', b"3")]
