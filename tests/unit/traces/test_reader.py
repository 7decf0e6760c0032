"""Tests that compare the compiled parser, the Python parser, and a reference based on `json` and `Decimal`."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
from decimal import ROUND_HALF_EVEN, Context, Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from parsers import MAX_JSON_BYTES, chunks, pack, parsers, read_both
from real_traces import each
from test_fuzz import base, mutated

from profdeck_traces.reading.compiled import demangle, load_library
from profdeck_traces.reading.walking import walk
from seeds import FIRST_SEED

EXACT = Context(prec=2000, rounding=ROUND_HALF_EVEN)
EVENT = '{"ph": "X", "cat": "kernel", "name": "k", "pid": 0, "tid": 7, "ts": 1.5, "dur": 2}'


def decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text)
    except ArithmeticError:  # not a number, or the exponent exceeds the limits of `Decimal`
        return Decimal(0) if re.fullmatch(r"[-.0-9]+[eE]-[0-9]+", text) else None


def loads(data: bytes) -> Any:
    return json.loads(data, parse_float=decimal, parse_constant=lambda _: None, parse_int=decimal)


def reference(data: bytes) -> list[tuple[Any, ...]] | None:
    """Return the phase, name and times of each row in a valid trace, or None for other data."""
    try:
        document = loads(data)
    except (ValueError, RecursionError):
        return None
    events = document.get("traceEvents") if isinstance(document, dict) else document
    if not isinstance(events, list):
        return None
    return [row_of(event) for event in events if isinstance(event, dict) and "ph" in event]


def row_of(event: dict[str, Any]) -> tuple[Any, ...]:
    phase, name = event["ph"], event.get("name")
    is_phase = isinstance(phase, str) and len(phase) == 1 and " " <= phase < "\x80"
    times = [time_ns(event.get(key)) for key in ("ts", "dur")]
    return ord(phase) if is_phase else 1, name if isinstance(name, str) else None, *times


def time_ns(value: Any) -> int | None:
    if isinstance(value, str):
        value = decimal(value)
    if not isinstance(value, Decimal) or not value.is_finite() or value.adjusted() > 20:
        return None
    rounded = int(EXACT.multiply(value, 1000).to_integral_value(context=EXACT))
    return rounded if abs(rounded) < 2**52 * 1000 else None


def compare_with_reference(data: bytes, found: dict[str, Any]) -> None:
    expected = reference(data)
    if expected is None:
        assert not found["whole"]
        return
    if data.count(b"traceEvents") > 1 or data.count(b"ph") > len(expected):
        return  # JSON readers disagree about repeated keys
    assert found["whole"] == bool(expected), found["skipped"]
    assert found["rows"] == len(expected)
    names = [json.loads(b'"%b"' % text) for text in found["strings"]["name"]]
    columns = found["columns"]
    for row, (phase, name, start, duration) in enumerate(expected):
        assert columns["phase"][row] == phase
        assert name is None or names[columns["name"][row]] == name
        assert columns["start_ns"][row] == (np.iinfo(np.int64).min if start is None else start)
        assert columns["duration_ns"][row] == (-1 if duration is None else duration)


def check_mutations(seeds: range) -> None:
    for seed in seeds:
        chance = random.Random(seed)  # noqa: S311 - reproducible input
        data = mutated(base(chance), chance)
        try:
            found = read_both(data, chance.choice([37, 1000, 1 << 20])) if data else None
            if found is not None and len(data) < 10_000 and data.isascii():
                compare_with_reference(data, found)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


@pytest.mark.parametrize("part", range(5))
def test_parsers_are_equal_after_mutations(part: int) -> None:
    check_mutations(range(FIRST_SEED + 100 * part, FIRST_SEED + 100 * (part + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(20))
def test_parsers_are_equal_after_many_mutations(part: int) -> None:
    check_mutations(range(FIRST_SEED + 1000 * (part + 1), FIRST_SEED + 1000 * (part + 2)))


@pytest.mark.shared_data
@each("gpu/*.json.gz", "npu/trace_view.json", "public/*.json.gz", "attack/*.json*", "reports/**/*.json")
def test_parsers_are_equal_on_real_traces(path: Path) -> None:
    assert read_both(path)["rows"]


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("is_array", [False, True])
@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("size", [1, 7, 1 << 20])
def test_all_layouts_are_read(indent: int | None, is_array: bool, is_late: bool, size: int) -> None:
    events = [
        {"args": {"correlation": 5, "x": {"y": [None, True, -1.5e3]}}, "ts": "10.0005", "ph": "X", "name": 'a"\\é'},
        None,
        {"name": "process_name", "ph": "M", "pid": 0, "args": {"name": "GPU 0"}},
        {"cat": None, "tid": None, "pid": "host", "args": None, "ph": "i", "s": "t", "ts": None, "id": None},
        {"no": "phase", "args": {"correlation": 9}},
        {"ph": "X", "ts": 1712195495519123456, "dur": 1e3, "pid": -1, "tid": 2**70, "args": {"bytes": "256"}},
    ]
    members: dict[str, Any] = {"schemaVersion": 1, "properties": [{"ph": "X"}], "empty": {}, "nothing": None}
    document: Any = (
        events if is_array else members | {"traceEvents": events} if is_late else {"traceEvents": events} | members
    )
    data = json.dumps(document, indent=indent, separators=(",", ":") if indent is None else None).encode()
    found = read_both(data, size)
    assert found["whole"]
    compare_with_reference(data, found)
    assert found["columns"]["start_ns"][0] == 10_000
    assert found["args"]["correlation"] == ([0], [5])
    assert found["args"]["bytes"] == ([3], [256])
    assert [json.loads(value) for _, value in found["members"] if value] == ([] if is_array else list(members.values()))


@pytest.mark.parametrize(
    ("text", "start_ns"),
    [
        ("2199023255552.001", 2199023255552001),
        ("4398046511103.999", 4398046511103999),
        ("1712195495519123.457", 1712195495519123457),
        ('"1712195495519123.457"', 1712195495519123457),
        ('" 5.25 "', 5250),
        ("0.0005", 0),
        ("0.0015", 2),
        ("0.00150000000000000000000000000000000000000000000000001", 2),
        ("0.00050000000000000000000000000000000000000000000000001", 1),
        ("-0.0015", -2),
        ("1.5e2", 150_000),
        ("15E-1", 1500),
        ("100000000000000000000000000000000000000000000000e-44", 100_000 * 10),
        ("4503599627370495.999", 4503599627370495999),
        ("4503599627370496", None),
        ("1e400", None),
        ("1e-400", 0),
        ("NaN", None),
        ("true", None),
        ('"soon"', None),
        ('""', None),
        ("[5]", None),
        ("null", None),
    ],
)
def test_times_are_exact(text: str, start_ns: int | None) -> None:
    found = read_both(pack([f'{{"ph": "X", "ts": {text}}}']))
    assert found["columns"]["start_ns"] == [np.iinfo(np.int64).min if start_ns is None else start_ns]


@pytest.mark.parametrize(
    "bad",
    [
        '{"ph": "X", "name": "a\x01b", "ts": 1}',
        '{"ph": "X", "name": "a\nb", "ts": 1}',
        '{"ph": "X", "name": "a"b", "ts": 1}',
        '{"ph": "X", "name": "a"b"c", "ts": 1, "args": {"name": "x"}}',
        '{"ph": "X", "name": "C:\\q", "ts": 1}',
        '{"ph": "X", "name": "\\u12", "ts": 1}',
        '{"ph": "X", "name": , "ts": 1}',
        '{"ph": "X", "ts": 01}',
        '{"ph": "X", "ts": 1 "dur": 2}',
        '{"ph": "X", "args": {"a": [1, 2}, "ts": 1}',
        '{"ph": "X", "args": {"correlation": 3, "a": tru}}',
        '{"ph": "X", "ts": 1',
        '"ph": "X", "ts": 1}',
        '{"ph": "X", "args": ' + "[" * 600 + "]" * 600 + "}",
    ],
)
@pytest.mark.parametrize("size", [1, 50, 1 << 20])
def test_one_malformed_event_is_skipped(bad: str, size: int) -> None:
    data = pack([EVENT, bad, EVENT.replace("1.5", "9"), EVENT.replace("1.5", "11")])
    found = read_both(data, size)
    assert not found["whole"]
    assert found["columns"]["start_ns"][0] == 1500
    assert found["columns"]["start_ns"][-2:] == [9000, 11_000]
    assert found["args"]["correlation"] == ([], [])
    begin, end = found["skipped"][0]
    assert begin <= data.index(bad.encode()[-12:], 100) < end


def test_bytes_that_are_not_utf8_lose_one_event() -> None:
    data = pack([EVENT, EVENT.replace("k", "§"), EVENT]).replace("§".encode(), b"\xff\xfe")
    assert read_both(data)["rows"] == 2


@pytest.mark.parametrize("size", [10, 100, 150, 200, 333])
def test_text_like_an_event_in_nested_arrays_is_not_an_event(size: int) -> None:
    nested = '{"ph": "X", "ts": 1, "args": {"deps": [{"ph": "X"}, {"ph": "X", "note": "}, {\\"ph\\":"}, {"ph": "i"}]}}'
    found = read_both(pack([nested] * 20), size)
    assert found["whole"]
    assert found["rows"] == 20


def test_many_malformed_events_take_linear_time() -> None:
    data = pack([EVENT.replace('"k"', '"a"b"')] * 20_000 + [EVENT])
    parser = parsers()[0]
    result = walk(chunks(data), parser, max_json_bytes=MAX_JSON_BYTES)
    assert (parser.rows, result.skips) == (1, 20_000)


def test_a_missing_comma_loses_no_event() -> None:
    found = read_both(pack([EVENT + EVENT, EVENT]))
    assert (found["rows"], found["whole"]) == (3, False)


@pytest.mark.parametrize("end", [2, 20, 100])
def test_a_truncated_trace_has_the_events_before_its_end(end: int) -> None:
    found = read_both(pack([EVENT] * 5)[:-end])
    assert not found["whole"]
    assert found["rows"] >= 3


@pytest.mark.parametrize(
    "document", ["", "{}", "[]", '{"traceEvents": null}', '{"traceEvents": []}', "7", '"text"', "[1]"]
)
def test_documents_without_events_are_not_whole(document: str) -> None:
    found = read_both(document.encode())
    assert (found["rows"], found["whole"]) == (0, False)


def test_repeated_keys_have_their_last_value() -> None:
    event = '{"ph": "i", "args": {"correlation": 1}, "ts": 1, "ph": "X", "ts": 2, '
    event += '"args": {"correlation": 2, "correlation": 3}}'
    found = read_both(pack([event, '{"ph": "X", "args": {"correlation": 4}, "args": null}']))
    assert found["columns"]["phase"] == [ord("X")] * 2
    assert found["columns"]["start_ns"][0] == 2000
    assert found["args"]["correlation"] == ([0], [3])


def test_keys_with_escapes_are_equal_to_those_without() -> None:
    found = read_both(pack(['{"p\\u0068": "\\u0058", "\\u006eame": "a\\/b", "args": {"correl\\u0061tion": 7}}']))
    assert found["columns"]["phase"] == [ord("X")]
    assert found["args"]["correlation"] == ([0], [7])


@pytest.mark.parametrize("limit", [0, 256, 512])
def test_all_instruction_sets_read_the_same(limit: int) -> None:
    library = load_library()
    if library is None:
        pytest.skip("the reader is not compiled")
    try:
        library.reader_instructions(limit)
        chance = random.Random(limit)  # noqa: S311 - reproducible input
        for _ in range(20):
            assert read_both(base(chance))["whole"]
    finally:
        library.reader_instructions(512)


def test_names_are_demangled() -> None:
    library = load_library()
    if library is None:
        pytest.skip("the reader is not compiled")
    names = ["_ZN2at6native4copyIfEEvPT_", "_Z", "plain", "_Zé", "_ZN1a1bIDF16bDF16bLi2EEEvPT_PKT0_i", "_ZDF16b"]
    assert demangle(library, names) == [
        "void at::native::copy<float>(float*)",
        *("_Z", "plain", "_Zé"),
        "void a::b<std::bfloat16_t, std::bfloat16_t, 2>(std::bfloat16_t*, std::bfloat16_t const*, int)",
        "_ZDF16b",
    ]


@pytest.mark.slow
def test_sanitizers_find_nothing_in_mutated_traces(tmp_path: Path) -> None:
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    chance = random.Random(FIRST_SEED)  # noqa: S311 - reproducible input
    for number in range(5):
        (tmp_path / f"{number}.json").write_bytes(base(chance))
    source, program = Path(__file__).with_name("fuzz_reader.cpp"), tmp_path / "fuzz"
    checks = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    subprocess.run([compiler, "-w", "-g", "-O1", "-std=c++17", *checks, str(source), "-o", str(program)], check=True)
    mutations = os.environ.get("PROFDECK_FUZZ_READER", "20000")
    files = sorted(map(str, tmp_path.glob("*.json")))
    subprocess.run([str(program), str(FIRST_SEED), mutations, *files], check=True)
