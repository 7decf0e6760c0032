"""Tests of the reader for communication.json. Fixtures are synthetic and have the keys of real files."""

from __future__ import annotations

import json
import math
import tracemalloc
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from ascend_job import call
from hypothesis import given, strategies as st

from profdeck_npu.traces import communication
from profdeck_npu.traces.communication import OTHER_OPERATIONS, Communication, read_communication
from profdeck_traces.base.errors import TraceError

GROUP, OTHER = "13681369207305868445", "5862276093215481612"


def written(tmp_path: Path, document: Any, **layout: Any) -> Communication:
    path = tmp_path / "communication.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document, **layout))
    return read_communication(path)


def steps(collectives: dict[str, Any], messages: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"step": {"p2p": messages or {}, "collective": collectives}}


def test_calls_are_summed_by_operation_and_group(tmp_path: Path) -> None:
    def allreduce(elapse_us: float) -> dict[str, Any]:
        return call(
            elapse_us=elapse_us,
            transit_us=60,
            wait_us=30,
            synchronisation_us=20,
            links={"RDMA": 0, "HCCS": 12_000_000, "SDMA": 12_000_000},
        )

    send = call(elapse_us=8, transit_us=8, wait_us=0, links={"RDMA": 1_000_000})
    table = written(
        tmp_path,
        {
            "step10": {
                "p2p": {f"hcom_send__612_0_1@{OTHER}": send, "Total Op Info": send},
                "collective": {
                    f"hcom_allReduce__445_0_1@{GROUP}": allreduce(100),
                    f"hcom_allReduce__445_1_1@{GROUP}": allreduce(120),
                    "Total Op Info": allreduce(220),
                },
            },
            "step11": {"p2p": {}, "collective": {f"hcom_allReduce__445_2_1@{GROUP}": allreduce(100)}},
        },
    )

    assert table.problem is None
    assert table.groups == {"445": GROUP, "612": OTHER}
    first, second = table.operations
    assert (first.name, first.kind, first.group, first.count) == ("allReduce", "collective", GROUP, 3)
    assert (first.total_us, first.max_us, first.transit_us, first.wait_us) == (320, 120, 180, 90)
    assert (first.synchronisation_us, first.idle_us) == (60, 50)
    assert [(link.link, link.size_bytes, link.transit_us, link.bytes_per_s) for link in first.links] == [
        ("HCCS", 36_000_000, 180, 2e11),
        ("SDMA", 36_000_000, 180, 2e11),
    ]
    assert [(link.packets, link.large_packet_share) for link in first.links] == [(36, 0.5), (36, 0.5)]
    assert (second.name, second.kind, second.group, second.count) == ("send", "p2p", OTHER, 1)


@pytest.mark.parametrize(
    ("name", "operation", "group"),
    [
        ("hcom_broadcast__303_1_1@4427461525029690303", "broadcast", "4427461525029690303"),
        ("hcom_allReduce__445_0", "allReduce", "445"),
        ("hcom_batchSendRecv__45_1_1@7", "batchSendRecv", "7"),
        ("hcom_scatter_123_1_1", "scatter", "123"),
        ("hcom_reduceScatter_AicpuKernel_503_490_1", "reduceScatter_AicpuKernel", "503"),
        ("allreduce_12", "allreduce", None),
        ("allreduce_1_12@x", "allreduce", None),
        ("12", "12", None),
    ],
)
def test_counters_are_removed_from_names(tmp_path: Path, name: str, operation: str, group: str | None) -> None:
    empty_call = call(elapse_us=1, transit_us=0, wait_us=0, links={})

    (parsed,) = written(tmp_path, steps({name: empty_call})).operations

    assert (parsed.name, parsed.group, parsed.links) == (operation, group, ())


def test_ambiguous_group_digits_are_omitted(tmp_path: Path) -> None:
    empty_call = call(elapse_us=1, transit_us=0, wait_us=0, links={})

    table = written(
        tmp_path, steps({"hcom_allReduce__445_0_1@1445": empty_call, "hcom_allReduce__445_0_1@2445": empty_call})
    )

    assert table.groups == {}
    assert [operation.group for operation in table.operations] == ["1445", "2445"]


def test_link_without_time_or_packets_has_no_rate_and_no_share(tmp_path: Path) -> None:
    link = {"Transit Size(MB)": 0.5, "Transit Time(ms)": 0, "Size Distribution": {"0.5": []}}
    link_call = {"Communication Time Info": {}, "Communication Bandwidth Info": {"SIO": link}}

    ((parsed,),) = [operation.links for operation in written(tmp_path, steps({"x": link_call})).operations]

    assert (parsed.size_bytes, parsed.bytes_per_s, parsed.packets, parsed.large_packet_share) == (
        500_000,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"Communication Time Info": {"Elapse Time(ms)": "long"}}, "Expected `float`, got `str`"),
        ({"Communication Time Info": {"Elapse Time(ms)": 1e300}}, "Expected `float` <="),
        ({}, "missing required field `Communication Time Info`"),
        ([], "Expected `object`, got `array`"),
    ],
)
def test_invalid_call_is_reported_and_skipped(tmp_path: Path, wrong: Any, message: str) -> None:
    good = call(elapse_us=1, transit_us=0, wait_us=0, links={})

    table = written(tmp_path, steps({"a_1": good, "odd": wrong, "odder": wrong, "a_2": good}))

    assert table.operations[0].count == 2
    assert table.problem is not None
    assert table.problem.startswith("communication.json: Invalid call odd: ")
    assert message in table.problem


@pytest.mark.parametrize(
    ("document", "problem"),
    [
        ("", "The file is empty."),
        ("[]", "The text between offsets 0 and 2 is not JSON with steps, kinds and calls."),
        ('{"step": {"p2p": []}}', "The text between offsets 0 and 21 is not JSON with steps, kinds and calls."),
        ('{"step": 7}', "The text between offsets 0 and 11 is not JSON with steps, kinds and calls."),
        ("{}}", "The JSON is truncated at offset 3."),
        ("{} {}", "The text between offsets 0 and 5 is not JSON with steps, kinds and calls."),
        ('{"step": {"p2p": {"a": {"x": "', "The JSON is truncated at offset 30."),
    ],
)
def test_file_problem_is_reported(tmp_path: Path, document: str, problem: str) -> None:
    assert written(tmp_path, document) == Communication((), {}, f"communication.json: {problem}")


def test_document_without_calls_is_intact(tmp_path: Path) -> None:
    assert written(tmp_path, steps({})) == Communication((), {}, None)


def test_missing_file_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match="Cannot read .*communication.json: No such file"):
        read_communication(tmp_path / "communication.json")


def test_progress_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "_CHUNK_BYTES", 7)
    path = tmp_path / "communication.json"
    path.write_text('{"step1": {}}  ')
    reports: list[tuple[int, int]] = []

    read_communication(path, on_progress=lambda *progress: reports.append(progress))

    assert reports == [(7, 15), (14, 15), (15, 15)]


def test_excess_operations_are_summed_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "_MAX_OPERATIONS", 2)
    empty_call = call(elapse_us=1, transit_us=0, wait_us=0, links={})

    table = written(tmp_path, steps({f"kind{letter}": empty_call for letter in "abcd"}))

    assert {operation.name: operation.count for operation in table.operations} == {
        "kinda": 1,
        "kindb": 1,
        OTHER_OPERATIONS: 2,
    }


def test_unterminated_call_is_not_buffered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communication, "_MAX_CALL_BYTES", 4000)
    monkeypatch.setattr(communication, "_CHUNK_BYTES", 1000)

    table = written(tmp_path, '{"step": {"p2p": {"' + "a" * 1_000_000)

    assert table.problem == "communication.json: No call ends within 5,000 bytes after offset 0."


@pytest.mark.slow
def test_memory_is_independent_of_the_file_size(tmp_path: Path) -> None:
    call_text = json.dumps(call(elapse_us=1, transit_us=1, wait_us=0, links={"HCCS": 3_000_000}))
    path = tmp_path / "communication.json"
    with path.open("w") as file:
        file.write('{"step": {"collective": {"a": ' + call_text)
        for number in range(60_000):
            file.write(f', "a_{number}": {call_text}')
        file.write("}}}")
    assert path.stat().st_size > 25_000_000

    tracemalloc.start()
    try:
        table = read_communication(path)
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()

    assert table.operations[0].count == 60_001
    assert peak_bytes < 12_000_000


TIMES = st.integers(0, 10**9).map(lambda time_ns: time_ns / 1e6)
NAMES = st.sampled_from(
    [
        f"hcom_allReduce__445_0_1@{GROUP}",
        f"hcom_allReduce__445_7_1@{GROUP}",
        "hcom_send__3",
        'odd "{[\\',
        "é}]",
        "Total Op Info",
    ]
)
LINKS = st.dictionaries(
    st.sampled_from(["HCCS", "RDMA", 'a}"\\']),
    st.fixed_dictionaries(
        {"Transit Size(MB)": st.integers(0, 10**6).map(lambda size: size / 100), "Transit Time(ms)": TIMES},
        optional={
            "Large Packet Ratio": st.sampled_from([0, 0.5, 1.0]),
            "Size Distribution": st.dictionaries(st.just("1.0"), st.tuples(st.integers(0, 40), TIMES)),
            "Bandwidth(GB/s)": st.floats(allow_nan=False, allow_infinity=False),
        },
    ),
)
CALLS = st.fixed_dictionaries(
    {
        "Communication Time Info": st.fixed_dictionaries(
            {"Elapse Time(ms)": TIMES}, optional={"Wait Time(ms)": TIMES, "more": st.text()}
        )
    },
    optional={"Communication Bandwidth Info": LINKS},
)
DOCUMENTS = st.dictionaries(
    st.sampled_from(["step", "step1", "step2", 'st"ep\\3']),
    st.dictionaries(st.sampled_from(["p2p", "collective"]), st.dictionaries(NAMES, CALLS, max_size=4)),
)


def reference(document: dict[str, Any]) -> dict[Any, Any]:
    """Reference implementation: sum the count, elapse time, wait time and links of a document, in ns and bytes."""
    result: dict[Any, Any] = {}
    for kinds in document.values():
        for kind, calls in kinds.items():
            for name, call_data in calls.items():
                if name == "Total Op Info":
                    continue
                operation, group = {"hcom_a": ("allReduce", GROUP), "hcom_s": ("send", "3")}.get(name[:6], (name, None))
                sums = result.setdefault((kind, operation, group), [0, 0, 0, defaultdict(lambda: [0, 0, 0])])
                times = call_data["Communication Time Info"]
                sums[0] += 1
                sums[1] += round(times["Elapse Time(ms)"] * 1e6)
                sums[2] += round(times.get("Wait Time(ms)", 0) * 1e6)
                for link, values in call_data.get("Communication Bandwidth Info", {}).items():
                    packets = [size[0] for size in values.get("Size Distribution", {}).values()]
                    if values["Transit Size(MB)"] or values["Transit Time(ms)"] or packets:
                        of_link = sums[3][link]
                        of_link[0] += round(values["Transit Size(MB)"] * 1e6)
                        of_link[1] += round(values["Transit Time(ms)"] * 1e6)
                        of_link[2] += sum(packets)
    return result


@given(document=DOCUMENTS, chunk=st.integers(1, 400), indent=st.sampled_from([None, 1]), ascii_only=st.booleans())
def test_sums_are_independent_of_layout_and_chunks(
    document: dict[str, Any], chunk: int, indent: int | None, ascii_only: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("job") / "communication.json"
    path.write_text(json.dumps(document, indent=indent, ensure_ascii=ascii_only), encoding="utf-8")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communication, "_CHUNK_BYTES", chunk)
        table = read_communication(path)

    assert table.problem is None
    assert {
        (operation.kind, operation.name, operation.group): [
            operation.count,
            round(operation.total_us * 1000),
            round(operation.wait_us * 1000),
            {
                link.link: [link.size_bytes, round(link.transit_us * 1000), link.packets or 0]
                for link in operation.links
            },
        ]
        for operation in table.operations
    } == reference(document)


@given(document=DOCUMENTS, chunk=st.integers(1, 200), data=st.data())
def test_truncated_file_is_reported_and_partially_read(
    document: dict[str, Any], chunk: int, data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    text = json.dumps(document).encode()
    cut = data.draw(st.integers(0, len(text) - 1))
    path = tmp_path_factory.mktemp("job") / "communication.json"
    path.write_bytes(text[:cut])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(communication, "_CHUNK_BYTES", chunk)
        table = read_communication(path)

    expected_counts = {key: sums[0] for key, sums in reference(document).items()}
    assert table.problem is not None
    for operation in table.operations:
        assert operation.count <= expected_counts[operation.kind, operation.name, operation.group]


@given(text=st.binary(max_size=200) | st.text(alphabet='{}[],:"\\ 1ep', max_size=80).map(str.encode))
def test_arbitrary_bytes_do_not_raise(text: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.mktemp("job") / "communication.json"
    path.write_bytes(text)

    table = read_communication(path)

    assert all(math.isfinite(operation.total_us) for operation in table.operations)
