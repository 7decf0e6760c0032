"""Property tests of merging, compared with a reference that uses complete documents. They include real traces."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from decimal import Decimal, localcontext
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from profdeck_traces.base.errors import TraceError
from profdeck_traces.merge import MergeSource, merge_traces
from profdeck_traces.reading import compiled, stream
from profdeck_traces.reading.integrity import TraceCheck, check_trace

NASTY = [
    '"',
    "\\",
    '"pid": 1',
    '"id"',
    "}, {",
    '{"ph": "X"',
    "é",
    "\u2028",
    "\U0001f600",
    "\ud800",
    "\n",
    "process_name",
    "pid",
]
TEXTS = st.lists(st.one_of(st.sampled_from(NASTY), st.text(max_size=3)), max_size=3).map("".join)
NUMBERS = st.one_of(st.integers(-(10**20), 10**20), st.floats(), st.sampled_from([0, 1.5e300, 4203669603018.756]))
VALUES = st.recursive(
    st.one_of(st.none(), st.booleans(), NUMBERS, TEXTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2),
        st.dictionaries(st.one_of(TEXTS, st.sampled_from(["pid", "id", "ts", "ph"])), inner, max_size=2),
    ),
    max_leaves=4,
)
PIDS = st.sampled_from([0, 1, 7, 4711, 4712, "Spans", "", "7", "\n", 4376751100, -1])
IDS = st.sampled_from([0, 1, 5, 10**12 - 1, 10**12, 1704161511434171181, "0x1f", "a", "G", "0/5", -1])
TIMES = st.one_of(
    st.integers(0, 10**16),
    st.floats(0, 1e13).map(lambda time: round(time, 3)),
    st.decimals(0, 10**16, places=3).map(str),
)
NAMES = st.sampled_from(["aten::mm", "process_name", "process_sort_index", "thread_name"])


def events(**more: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """Draw events like those of profilers."""
    always = {"name": NAMES, "pid": PIDS, "ts": TIMES}
    return st.fixed_dictionaries(always | more, optional={"cat": TEXTS, "tid": PIDS})


REGULAR = st.one_of(
    events(ph=st.sampled_from("XBEiC"), args=st.dictionaries(st.sampled_from(["a", "Input Dims"]), VALUES, max_size=1)),
    events(ph=st.sampled_from("stfbneSTpF"), id=IDS),
    events(ph=st.just("M"), args=st.fixed_dictionaries({}, optional={"name": TEXTS, "sort_index": st.integers(-9, 9)})),
)
ODD = st.fixed_dictionaries(
    {},
    optional={
        "ph": st.one_of(st.sampled_from("XMsb"), VALUES),
        "pid": VALUES,
        "id": VALUES,
        "ts": VALUES,
        "bind_id": IDS,
        "id2": st.one_of(VALUES, st.fixed_dictionaries({"global": IDS, "local": IDS})),
        "args": VALUES,
        "name": NAMES,
    },
)
# Most events, which are merged by text substitution.
BULK = st.one_of(
    events(name=st.just("aten::mm"), ph=st.sampled_from("XBEi"), args=st.just({"a": [1, {}]})),
    events(name=st.just("ac2g"), ph=st.sampled_from("sf"), id=st.sampled_from([0, 5, 10**12, 2**63])),
)
ELEMENTS = st.one_of(
    st.lists(BULK, min_size=8, max_size=40),
    st.tuples(st.lists(BULK, min_size=8, max_size=20), st.lists(REGULAR, max_size=4)).map(lambda two: two[0] + two[1]),
    st.lists(REGULAR, min_size=1, max_size=30),
    st.lists(st.one_of(REGULAR, REGULAR, REGULAR, ODD, VALUES), max_size=12),
)
BASES = st.sampled_from([None, 0, 10**18, 10**18 + 1500, 10**18 + 10**9])
LAYOUTS = st.fixed_dictionaries(
    {
        "indent": st.sampled_from([None, None, 0, 2, "\t"]),
        "separators": st.sampled_from([None, (",", ":"), (" ,\n ", " : ")]),
        "ensure_ascii": st.booleans(),
    }
)
READ_BYTES = st.sampled_from([7, 61, 300, 1000, 1 << 20])


@attrs.frozen
class Trace:
    elements: list[Any]
    base_ns: int | None
    base_first: bool
    layout: dict[str, Any]
    sort_index: int

    def text(self) -> bytes:
        document: Any = {"traceEvents": self.elements, "schemaVersion": 1}
        if self.base_ns is not None:
            base = {"baseTimeNanoseconds": self.base_ns}
            document = base | document if self.base_first else document | base
        return json.dumps(document, **self.layout).encode("utf-8", "surrogatepass")


TRACES = st.builds(Trace, ELEMENTS, BASES, st.booleans(), LAYOUTS, st.integers(0, 2))


def loads(data: bytes) -> Any:
    """Decode with the text of each number in place of its value."""
    return json.loads(
        data.decode("utf-8", "surrogatepass"),
        parse_float=Number,
        parse_int=Number,
        parse_constant=Number,
    )


@attrs.frozen
class Number:
    text: str


def merged(texts: list[tuple[bytes, int]], read_bytes: int, *, in_python: bool = False) -> tuple[TraceCheck, Any]:
    """Merge texts of traces with their sort indices."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(stream.read_chunks, "__defaults__", (read_bytes,))
        if in_python:
            patch.setattr(compiled, "load_library", lambda: None)
        sources = []
        for number, (text, sort_index) in enumerate(texts):
            path = Path(folder) / str(number)
            path.write_bytes(gzip.compress(text) if number % 2 else text)
            sources.append(MergeSource(path, f"s{number}", sort_index))
        destination = Path(folder) / "merged"
        check = merge_traces(sources, destination)
        assert attrs.evolve(check, whole=True, problem=None) == check_trace(destination)
        return check, loads(gzip.decompress(destination.read_bytes()))


def compare(document: Any, originals: list[tuple[str, list[Any], int]]) -> None:
    """Compare a merged document with its sources, in their order: labels, elements and base in nanoseconds.

    New PIDs and IDs can have any value, but each must identify one object of one source.
    """
    base_ns = min(base_ns for _, _, base_ns in originals)
    assert document["baseTimeNanoseconds"] == Number(str(base_ns))
    written = iter(document["traceEvents"])
    renamed = Renamed()
    position_count = 0
    for source, (label, elements, original_base_ns) in enumerate(originals):
        names: dict[str, str] = {}
        indices: dict[str, float] = {}
        for old in elements:
            if not isinstance(old, dict) or "ph" not in old:
                continue
            pid = pid_of(old)
            args = old.get("args")
            metadata = old.get("name") if old.get("ph") == "M" else None
            indices.setdefault(pid, 0)
            if metadata == "process_sort_index":
                index = args.get("sort_index") if isinstance(args, dict) else None
                indices[pid] = float(index.text) if isinstance(index, Number) else 0
            elif metadata == "process_name":
                name = args.get("name") if isinstance(args, dict) else None
                if name is not None:
                    names[pid] = f"{label}: {name}" if name else label
            else:
                compare_event(old, next(written), Context(source, original_base_ns - base_ns, renamed))
        for pid in indices:
            added = next(written)
            assert added["name"] == "process_name"
            renamed.check("pid", source, pid, added["pid"])
            assert pid not in names or added["args"] == {"name": names[pid]}
            assert added["args"]["name"].startswith(label)
        for pid in sorted(indices, key=indices.__getitem__):
            added = next(written)
            assert added["name"] == "process_sort_index"
            assert added["args"] == {"sort_index": Number(str(position_count))}
            renamed.check("pid", source, pid, added["pid"])
            position_count += 1
    assert next(written, None) is None


@attrs.frozen
class Context:
    source: int
    shift_ns: int
    renamed: Renamed


def compare_event(old: dict[str, Any], new: dict[str, Any], context: Context) -> None:
    expected = {**old, "pid": new["pid"]}
    context.renamed.check("pid", context.source, pid_of(old), new["pid"])
    for key in id_keys(old):
        context.renamed.check("id", context.source, str(old[key]), new[key])
        expected[key] = new[key]
    if isinstance(old.get("id2"), dict) and "global" in old["id2"]:
        context.renamed.check("id", context.source, str(old["id2"]["global"]), new["id2"]["global"])
        expected["id2"] = {**old["id2"], "global": new["id2"]["global"]}
    if "ts" in old and context.shift_ns and is_time(old["ts"]):
        check_moved(old["ts"], new["ts"], context.shift_ns)
        expected["ts"] = new["ts"]
    assert new == expected


def pid_of(event: dict[str, Any]) -> str:
    """Return a text that is the same for equal pids. A null pid is treated as missing."""
    pid = event.get("pid")
    if isinstance(pid, Number) and float(pid.text).is_integer():
        return str(int(float(pid.text)) if "." in pid.text or "e" in pid.text else int(pid.text))
    return f"{type(pid)} {pid}"


def id_keys(event: dict[str, Any]) -> list[str]:
    takes_id = isinstance(event.get("ph"), str) and event["ph"] in set("stfbneSTpF")
    return [key for key in ("id", "bind_id") if event.get(key) is not None and (takes_id or key != "id")]


class Renamed:
    """Mapping of new PIDs and IDs. Each must identify one object of one source."""

    def __init__(self) -> None:
        self._pids: dict[tuple[int, str], Any] = {}
        self._old: dict[Any, tuple[int, str]] = {}
        self._source_of_id: dict[Any, int] = {}

    def check(self, kind: str, source: int, old: str, new: Any) -> None:
        if kind == "pid":
            assert self._pids.setdefault((source, old), new) == new
            assert self._old.setdefault(new, (source, old)) == (source, old)
            assert 0 < int(new.text) < 2**31
            return
        if isinstance(new, str) and re.fullmatch("0x[0-9a-f]+", new):  # the same to Perfetto
            new = Number(str(int(new, 16)))
        assert self._source_of_id.setdefault(new, source) == source


def text_of(ts: Any) -> Any:
    return ts.text if isinstance(ts, Number) else ts


def nanoseconds(ts: Any) -> int | None:
    text = text_of(ts)
    if not isinstance(text, str) or not re.fullmatch(r"[-+]?[0-9]+(\.[0-9]*)?([eE][-+]?[0-9]+)?", text):
        return None
    with localcontext(prec=2000):
        time = Decimal(text) * 1000
        return int(time.to_integral_value()) if abs(time) < 2**52 * 1000 else None


def is_time(ts: Any) -> bool:
    return nanoseconds(ts) is not None


def check_moved(old: Any, new: Any, shift_ns: int) -> None:
    assert type(new) is type(old)
    assert nanoseconds(new) == (nanoseconds(old) or 0) + shift_ns


def in_order(traces: list[Trace]) -> list[tuple[str, Any, int]]:
    labelled = [(f"s{number}", trace) for number, trace in enumerate(traces)]
    return [
        (label, loads(trace.text())["traceEvents"], trace.base_ns or 0)
        for label, trace in sorted(labelled, key=lambda pair: pair[1].sort_index)
    ]


def has_events(trace: Trace) -> bool:
    return any("ph" in element for element in trace.elements if isinstance(element, dict))


@given(st.lists(TRACES.filter(has_events), min_size=1, max_size=3), READ_BYTES)
def test_merged_trace_equals_the_reference(traces: list[Trace], read_bytes: int) -> None:
    texts = [(trace.text(), trace.sort_index) for trace in traces]

    check, document = merged(texts, read_bytes)

    assert check.whole
    compare(document, in_order(traces))
    assert merged(texts, read_bytes, in_python=True)[1] == document, "both parsers give the same answer"


@given(TRACES.filter(has_events), TRACES, READ_BYTES, st.data())
def test_mutated_trace_does_not_affect_other_sources(
    good: Trace, bad: Trace, read_bytes: int, data: st.DataObject
) -> None:
    text = bytearray(attrs.evolve(bad, base_ns=good.base_ns).text())
    for _ in range(data.draw(st.integers(1, 2))):
        offset = data.draw(st.integers(0, len(text) - 1))
        new = data.draw(st.one_of(st.binary(max_size=2), st.sampled_from([b"{", b"}", b"]", b'"', b",", b"0", b"\0"])))
        text[offset : offset + data.draw(st.integers(0, 2))] = new
        text = text or bytearray(b" ")

    check, document = merged([(good.text(), 0), (bytes(text), 1)], read_bytes)

    assert check.whole == (check.problem is None)
    assert check.problem is None or check.problem.startswith("s1 (")
    if document["baseTimeNanoseconds"] == Number(
        str(good.base_ns or 0)
    ):  # the mutation may have changed the other value
        alone = merged([(good.text(), 0)], read_bytes)[1]["traceEvents"]
        assert document["traceEvents"][: len(alone)] == alone


@given(TRACES.filter(has_events), READ_BYTES, st.data())
def test_first_events_of_a_truncated_trace_are_merged(trace: Trace, read_bytes: int, data: st.DataObject) -> None:
    text = trace.text()
    cut = text[: data.draw(st.integers(0, len(text) - 1))]

    def events_of(text: bytes) -> list[Any]:
        events = merged([(text, 0)], read_bytes)[1]["traceEvents"]
        new_ids = {"id", "bind_id", "id2"}  # new ids depend on all events in the trace
        return [
            {key: value for key, value in event.items() if key not in new_ids}
            for event in events
            if list(event) != ["ph", "name", "pid", "tid", "args"]
        ]

    all_events = events_of(text)
    try:
        merged_events = events_of(cut)
    except TraceError:
        merged_events = []

    assert merged_events == all_events[: len(merged_events)]
    assert len(merged_events) >= text[: len(cut)].count(b"}") - text.count(b"}") + len(all_events)
    assert len(merged_events) <= len(all_events)


def real_elements(path: Path) -> tuple[list[Any], int]:
    data = path.read_bytes()
    document = loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    if isinstance(document, list):
        return document, 0
    base = document.get("baseTimeNanoseconds")
    return document["traceEvents"], int(base.text) if base else 0


@pytest.mark.shared_data
@pytest.mark.parametrize(
    "pattern", ["gpu/*.json.gz", "gpu/pair_rank*", "npu/trace_view.json"], ids=["all", "pair", "npu"]
)
def test_real_traces_are_merged_like_the_reference(tmp_path: Path, data: Path, pattern: str) -> None:
    paths = sorted(data.glob(pattern)) * (2 if pattern.startswith("npu") else 1)
    sources = [MergeSource(path, f"rank {number}", number) for number, path in enumerate(paths)]
    destination = tmp_path / "merged.json.gz"

    check = merge_traces(sources, destination)

    assert check.whole
    assert check == check_trace(destination)
    originals = [(source.label, *real_elements(source.path)) for source in sources]
    compare(loads(gzip.decompress(destination.read_bytes())), originals)
