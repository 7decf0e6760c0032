"""Tests of step annotations: names, device times and statistics."""

from __future__ import annotations

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from distributions import install
from profdeck_sglang import trace_names as sglang
from profdeck_traces.analysis.detail_model import BatchDetails
from profdeck_traces.analysis.model import IterationStatistics, PerStep
from profdeck_traces.analysis.step_names import TRACE_NAMES, StepName, StepNames
from profdeck_traces.analysis.step_times import StepTimes, median_and_deviation
from profdeck_traces.analysis.steps import GLOBAL_STEP, ITERATION, find_steps
from profdeck_traces.reading.columns import (
    ANNOTATION,
    DEVICE_ANNOTATION,
    DEVICE_CATEGORIES,
    OPERATOR,
    Columns,
    CompleteEvent,
    columns_of,
)
from profdeck_vllm import trace_names as vllm

NAMES = StepNames([sglang.ITERATION, vllm.ITERATION])
KERNEL = "kernel"
HOST, STREAM, OTHER_STREAM = (10, 10), (0, 7), (0, 20)

Event = tuple[str, str, tuple[int, int], int, int]
"""Category, name, track, start and end in microseconds."""


def columns(events: list[Event]) -> Columns:
    return columns_of(
        CompleteEvent(name, category, *track, 1000 * start, 1000 * (end - start))
        for category, name, track, start, end in events
    )


def times_of(events: list[Event]) -> tuple[StepTimes, list[str]]:
    """Find the steps in the events and sum the times per step.

    Operators must not be nested, because their durations are used as self times.

    Returns:
        The times, and the names indexed by name code.
    """
    recorded = columns(events)
    of_device, of_operators, of_annotations = (
        recorded[recorded.tables.names_of_categories(frozenset(categories))[recorded.name]]
        for categories in (DEVICE_CATEGORIES, {OPERATOR}, {ANNOTATION})
    )
    steps = find_steps(recorded, NAMES)
    operators = of_operators, of_operators.duration_ns
    times = StepTimes(steps, of_device, operators, of_annotations, np.zeros(len(steps), dtype=bool))
    return times, recorded.tables.names


def per_step(values: dict[int, PerStep], names: list[str]) -> dict[str, PerStep]:
    return {names[code]: value for code, value in values.items()}


def host(name: str, start: int, end: int, track: tuple[int, int] = HOST) -> Event:
    return (ANNOTATION, name, track, start, end)


def operator(name: str, start: int, end: int) -> Event:
    return ("cpu_op", name, HOST, start, end)


def twin(name: str, start: int, end: int, track: tuple[int, int] = STREAM) -> Event:
    return (DEVICE_ANNOTATION, name, track, start, end)


def kernel(name: str, start: int, end: int, track: tuple[int, int] = STREAM) -> Event:
    return (KERNEL, name, track, start, end)


def decode(number: int = 2) -> str:
    return f"execute_context_0(0)_generation_{number}({number})"


def batch(
    stage: str | None,
    prefill: tuple[int, int | None],
    decode: tuple[int, int | None],
    details: BatchDetails | None = None,
) -> StepName:
    """Return an iteration's name, given the numbers of requests and tokens in prefill and in decode."""
    return StepName(
        ITERATION,
        stage=stage,
        requests=prefill[0] + decode[0],
        prefill_requests=prefill[0],
        prefill_tokens=prefill[1],
        decode_requests=decode[0],
        decode_tokens=decode[1],
        details=details,
    )


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("ProfilerStep#12", StepName(GLOBAL_STEP, 12)),
        (
            "execute_context_1(6)_generation_3(3)",
            batch("mixed", (1, 6), (3, 3)),
        ),
        (
            "execute_context_0(0)_generation_4(4)",
            batch("decode", (0, 0), (4, 4)),
        ),
        (
            "execute_context_2(9)_generation_0(0)",
            batch("prefill", (2, 9), (0, 0)),
        ),
        (
            "execute_9_context_1(sq6sk6sqsq36sqsk36)_generation_3(sq3sk30sqsq3sqsk30)",
            batch("mixed", (1, 6), (3, 3)),
        ),
        (
            "execute_context_0(0)_generation_0(0)",
            batch(None, (0, 0), (0, 0)),
        ),
        (
            "execute_context_1(40)_generation_3(12)_resumed_1(40)_draft_9_rejected_4",
            batch(
                "mixed",
                (1, 40),
                (3, 12),
                BatchDetails(resumed_requests=1, resumed_tokens=40, draft_tokens=9, rejected_tokens=4),
            ),
        ),
        (
            "execute_context_0(0)_generation_3(3)_waiting_2_kv_87",
            batch("decode", (0, 0), (3, 3), BatchDetails(waiting_requests=2, kv_percent=87)),
        ),
        (
            "execute_context_0(0)_generation_3(12)_draft_9",
            batch("decode", (0, 0), (3, 12), BatchDetails(draft_tokens=9)),
        ),
        (
            "run_batch[c=1 g=2 c_toks=40 g_toks=2 resumed=1 resumed_toks=40 waiting=5 kv=83]",
            batch(
                "mixed",
                (1, 40),
                (2, 2),
                BatchDetails(resumed_requests=1, resumed_tokens=40, waiting_requests=5, kv_percent=83),
            ),
        ),
        (
            "run_batch[c=1 g=0 c_toks=40 g_toks=0 resumed=0 resumed_toks=0 running=3 waiting=0]",
            batch(
                "prefill",
                (1, 40),
                (0, 0),
                BatchDetails(resumed_requests=0, resumed_tokens=0, running_requests=3, waiting_requests=0),
            ),
        ),
        ("run_batch[c=0 g=2]", batch("decode", (0, None), (2, None))),
        ("execute_new_1_cached_3", StepName(ITERATION)),
        ("step[EXTEND bs=1 toks=6]", StepName(ITERATION, stage="prefill", requests=1, prefill_tokens=6)),
        ("step[DECODE bs=2]", StepName(ITERATION, stage="decode", requests=2)),
        (
            "step[DECODE bs=2 g_sq=2 g_sqsq=2 g_sqsk=9 g_sk=9 forward_id=7]",
            StepName(ITERATION, stage="decode", requests=2, decode_tokens=2),
        ),
        (
            "step[EXTEND bs=1 toks=6 c_sq=6 c_sqsq=36 c_sqsk=36 c_sk=6]",
            StepName(ITERATION, stage="prefill", requests=1, prefill_tokens=6),
        ),
        (
            "step[MIXED bs=3 c=1 g=2 c_sq=6 c_sk=6 c_sqsq=36 c_sqsk=36 g_sq=2 g_sk=20 g_sqsq=2 g_sqsk=20]",
            StepName(ITERATION, stage="mixed", requests=3, prefill_tokens=6, decode_tokens=2),
        ),
        ("step[VERIFY bs=2]", StepName(ITERATION, stage="verify", requests=2)),
        ("step[TARGET_VERIFY bs=2]", StepName(ITERATION, stage="verify", requests=2)),
        ("step[DRAFT_LOOP raw_bs=2 bs=4 topk=1]", StepName(ITERATION, stage="draft_loop", requests=2)),
        ("step[IDLE bs=0]", StepName(ITERATION, stage="idle", requests=0)),
        ("ProfilerStep", None),
        ("ProfilerStep#1234567890123456789", None),
        ("aten::execute_context_1(6)_generation_3(3)", None),
        ("step", None),
        ("", None),
    ],
)
def test_step_names_are_parsed(name: str, expected: StepName | None) -> None:
    assert NAMES.parse(name) == expected


@given(st.text(max_size=60) | st.from_regex(vllm.ITERATION) | st.from_regex(sglang.ITERATION))
def test_any_text_can_be_parsed(name: str) -> None:
    parsed = NAMES.parse(name)
    assert parsed is None or parsed.kind in {GLOBAL_STEP, ITERATION}


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Return a function that installs patterns as plugins of a distribution."""

    def make(**patterns: str) -> None:
        (tmp_path / "offered_names.py").write_text("".join(f"{name} = {code}\n" for name, code in patterns.items()))
        points = "".join(f"{name} = offered_names:{name}\n" for name in [*patterns, "missing"])
        install(tmp_path, "offered_names", f"[{TRACE_NAMES}]\n{points}")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield make
    sys.modules.pop("offered_names", None)


def test_broken_plugin_is_skipped_with_a_warning(offer: Any, caplog: pytest.LogCaptureFixture) -> None:
    offer(good=repr(r"forward (?P<stage>\w+) (?P<requests>\w+)"), unbalanced=repr("("), number="7")
    with caplog.at_level(logging.WARNING, logger="profdeck"):
        names = StepNames.load()

    assert names.parse("forward Encode 5") == StepName(ITERATION, stage="encode", requests=5, engine="good")
    assert names.parse("forward Encode many") == StepName(ITERATION, stage="encode", engine="good")
    assert len(caplog.messages) == 3
    for name in ("unbalanced", "number", "missing"):
        assert any(message.startswith(f"Iterations of '{name}' are not recognised") for message in caplog.messages)


def test_steps_of_all_threads_are_sorted_by_start() -> None:
    steps = find_steps(
        columns([host(decode(), 30, 40), host("ProfilerStep#1", 5, 45), host(decode(), 10, 20, (10, 11))]), NAMES
    )
    assert [steps.names[name] for name in steps.name] == ["ProfilerStep#1", decode(), decode()]
    assert steps.start_ns.tolist() == [5000, 10_000, 30_000]


def test_iteration_with_two_annotations_is_counted_once() -> None:
    inner = "execute_context_1(2)_generation_1(1)"
    events = [host(decode(), 0, 10), host(inner, 1, 9), host(decode(), 20, 30), host(decode(), 20, 30)]
    steps = find_steps(columns(events), NAMES)

    assert steps.start_ns.tolist() == [0, 20_000]
    assert len(steps.names) == 1


def test_global_step_around_an_iteration_is_counted() -> None:
    steps = find_steps(columns([host("ProfilerStep#1", 0, 10), host(decode(), 1, 9)]), NAMES)
    assert [step_name.kind for step_name in steps.marks] == [GLOBAL_STEP, ITERATION]


def test_trace_without_steps_has_no_statistics() -> None:
    times, _ = times_of([kernel("gemm", 0, 5), (OPERATOR, "aten::mm", HOST, 0, 5)])

    assert times.summaries(0) == ()
    assert times.statistics() == ()
    assert times.per_step(times.kernels) == times.per_step(times.operators) == {}


def test_empty_trace_has_no_steps() -> None:
    assert times_of([])[0].summaries(0) == ()


def test_device_time_is_unknown_without_a_device() -> None:
    (step,) = times_of([host(decode(), 3, 10)])[0].summaries(1000)

    assert (step.kind, step.name, step.step, step.stage, step.pid) == (ITERATION, decode(), None, "decode", 10)
    assert (step.start_us, step.duration_us, step.device_us) == (2.0, 7.0, None)
    assert (step.requests, step.prefill_tokens, step.decode_tokens) == (2, 0, 2)


def device_us(steps: StepTimes) -> list[float | None]:
    return [step.device_us for step in steps.summaries(0)]


def test_step_without_device_annotations_lasts_until_the_next_step() -> None:
    events = [host("ProfilerStep#0", 10, 20), host("ProfilerStep#1", 20, 30)]
    kernels = [kernel("a", 5, 9), kernel("a", 10, 12), kernel("a", 19, 26), kernel("a", 20, 21), kernel("a", 90, 99)]

    assert device_us(times_of([*events, *kernels])[0]) == [9.0, 10.0]


def test_iteration_time_is_the_time_of_its_kernels() -> None:
    events = [host(decode(), 0, 2), host(decode(), 3, 5), twin(decode(), 4, 10), twin(decode(), 11, 20)]
    kernels = [kernel("a", 4, 7), kernel("b", 8, 10), kernel("a", 11, 20), kernel("sample", 21, 24)]

    assert device_us(times_of([*events, *kernels])[0]) == [5.0, 9.0]


def test_stream_not_used_by_all_iterations_is_ignored() -> None:
    events = [host(decode(), 0, 2), host(decode(), 3, 5), twin(decode(), 4, 10), twin(decode(), 11, 20)]
    copies = [twin(decode(), 15, 30, OTHER_STREAM), kernel("copy", 15, 17, OTHER_STREAM), kernel("copy", 25, 30)]

    assert device_us(times_of([*events, *copies])[0]) == [0.0, 2.0]


def test_step_includes_all_streams_with_its_annotations() -> None:
    events = [host(decode(), 0, 2), twin(decode(), 4, 10), twin(decode(), 12, 14, OTHER_STREAM)]
    assert device_us(times_of([*events, kernel("a", 4, 10), kernel("b", 12, 14, OTHER_STREAM)])[0]) == [8.0]


def test_global_step_has_the_kernels_of_its_annotations() -> None:
    # The device is one step behind the host. Kineto assigns a kernel only to the innermost annotation.
    events = [
        *(host(f"ProfilerStep#{step}", 10 * step, 10 * step + 10) for step in range(3)),
        *(host("forward", 10 * step + 1, 10 * step + 5) for step in range(3)),
        *(twin("forward", 10 * step + 12, 10 * step + 16) for step in range(3)),
        *(kernel("forward", 10 * step + 12, 10 * step + 16) for step in range(3)),
        *(kernel("backward", 10 * step + 17, 10 * step + 20) for step in range(3)),
    ]
    assert device_us(times_of(events)[0]) == [7.0, 7.0, 7.0]


def test_global_step_operators_have_their_kernels() -> None:
    # Ascend traces contain all kernels of a step. Here, the device runs them during the host's next step. An iteration
    # during which the next step begins does not have its kernels.
    events = [
        *(operator(f"ProfilerStep#{step}", 10 * step, 10 * step + 10) for step in range(2)),
        host(decode(), 9, 12),
        *(twin(f"ProfilerStep#{step}", 10 * step + 12, 10 * step + 20) for step in range(2)),
        *(kernel("a", 10 * step + 12, 10 * step + 20) for step in range(2)),
    ]
    assert device_us(times_of(events)[0]) == [8.0, 16.0, 8.0]


def test_operator_with_the_name_of_an_annotation_is_not_a_step() -> None:
    events = [
        *(host(f"ProfilerStep#{step}", 10 * step, 10 * step + 9) for step in range(2)),
        *(operator(f"ProfilerStep#{step}", 10 * step + 1, 10 * step + 8) for step in range(2)),
        *(twin(f"ProfilerStep#{step}", 10 * step + 12, 10 * step + 20) for step in range(2)),
        *(kernel("a", 10 * step + 12, 10 * step + 20) for step in range(2)),
    ]
    assert device_us(times_of(events)[0]) == [8.0, 8.0]


def test_step_without_launches_has_no_device_time() -> None:
    events = [host("ProfilerStep#0", 0, 10), host("forward", 1, 2), host("ProfilerStep#1", 10, 11)]
    assert device_us(times_of([*events, twin("forward", 20, 30), kernel("a", 20, 30)])[0]) == [10.0, 0.0]


def test_host_times_are_used_if_a_step_lacks_device_annotations() -> None:
    events = [host(decode(1), 0, 2), host(decode(2), 10, 12), host(decode(2), 20, 22)]
    twins = [twin(decode(1), 11, 14), twin(decode(2), 15, 18)]

    assert device_us(times_of([*events, *twins, kernel("a", 11, 14), kernel("b", 25, 28)])[0]) == [0.0, 3.0, 3.0]


def test_operators_are_assigned_to_the_step_of_their_start() -> None:
    events = [
        host("ProfilerStep#0", 0, 10),
        host("ProfilerStep#1", 10, 20),
        host(decode(), 2, 8),
        host(decode(), 12, 18),
    ]
    operators: list[Event] = [
        (OPERATOR, name, thread, start, start + length)
        for name, thread, start, length in (
            ("mm", HOST, 3, 2),
            ("mm", (10, 11), 13, 4),
            ("sample", HOST, 9, 1),
            ("sample", HOST, 19, 1),
            ("before", HOST, -5, 2),
            ("once", HOST, 4, 1),
        )
    ]
    times, names = times_of([*events, *operators])

    assert per_step(times.per_step(times.operators), names) == {
        "mm": PerStep(kind=ITERATION, stage="decode", steps=2, measured=2, median_us=3.0, mad_us=1.0),
        "sample": PerStep(kind=GLOBAL_STEP, stage=None, steps=2, measured=2, median_us=1.0, mad_us=0.0),
        "once": PerStep(kind=ITERATION, stage="decode", steps=2, measured=2, median_us=0.5, mad_us=0.5),
    }


def phases() -> list[Event]:
    """Return three prefills and five decodes. Attention kernels run in both."""
    events = []
    for number, (name, length) in enumerate(
        [("step[EXTEND bs=1 toks=8]", 40 + extra) for extra in (0, 4, 10)]
        + [("step[DECODE bs=3]", 4 + extra) for extra in (0, 1, 1, 2, 9)]
    ):
        begin = 100 * number
        events += [host(name, begin, begin + 50), kernel("attention", begin + 5, begin + 5 + length)]
        if "DECODE" in name:
            events.append(kernel("sample", begin + 90, begin + 93))
    return events


def test_noise_is_computed_per_stage() -> None:
    times, names = times_of(phases())

    attention = PerStep(kind=ITERATION, stage="prefill", steps=3, measured=3, median_us=44.0, mad_us=4.0)
    assert per_step(times.per_step(times.kernels), names) == {
        "attention": attention,
        "sample": PerStep(kind=ITERATION, stage="decode", steps=5, measured=5, median_us=3.0, mad_us=0.0),
    }
    one_class = np.zeros(len(names), dtype=np.int64)
    assert times.classes(one_class) == {0: attention}


def test_all_of_many_steps_are_measured() -> None:
    events = []
    for step in range(1000):
        length = 2 if step < 400 else 3 if step < 700 else 9
        events += [host(decode(), 10 * step, 10 * step + 5), kernel("gemm", 10 * step, 10 * step + length)]
    times, names = times_of(events)
    gemm = per_step(times.per_step(times.kernels), names)["gemm"]

    assert (gemm.steps, gemm.measured, gemm.median_us, gemm.mad_us) == (1000, 1000, 3.0, 1.0)
    assert sum(time for time in device_us(times) if time) == 4400.0


@given(
    st.integers(1, 9).flatmap(
        lambda steps: st.lists(
            st.lists(st.integers(0, 5) | st.integers(0, 10**15), min_size=steps, max_size=steps).filter(any),
            min_size=1,
            max_size=5,
        )
    )
)
def test_medians_equal_those_of_the_dense_matrix(times: list[list[int]]) -> None:
    dense = np.array(times)
    row, step = np.nonzero(dense)
    expected = np.median(dense, axis=1)

    median, deviation = median_and_deviation(row, dense[row, step], np.full(len(dense), dense.shape[1]))

    assert median.tolist() == expected.tolist()
    assert deviation.tolist() == np.median(np.abs(dense - expected[:, None]), axis=1).tolist()


def test_statistics_are_computed_per_stage() -> None:
    events = [
        host("step[EXTEND bs=1 toks=8]", 0, 40),
        *(host("step[DECODE bs=3]", 50 + 10 * n, 52 + 11 * n) for n in range(5)),
    ]
    assert times_of(events)[0].statistics() == (
        IterationStatistics(
            kind=ITERATION,
            stage="prefill",
            count=1,
            mean_us=40.0,
            p50_us=40.0,
            p90_us=40.0,
            p99_us=40.0,
            max_us=40.0,
            tokens_per_s=200_000.0,
            tokens_per_wall_s=8 / 50e-6,
        ),
        IterationStatistics(
            kind=ITERATION,
            stage="decode",
            count=5,
            mean_us=4.0,
            p50_us=4.0,
            p90_us=5.6,
            p99_us=5.96,
            max_us=6.0,
            tokens_per_s=750_000.0,
            tokens_per_wall_s=pytest.approx(15 / 46e-6),
        ),
    )


def test_tokens_per_second_use_device_time() -> None:
    events = [host(decode(), 0, 1), host(decode(), 2, 3), twin(decode(), 4, 10), twin(decode(), 10, 20)]
    (statistics,) = times_of([*events, kernel("a", 4, 10), kernel("a", 10, 20)])[0].statistics()

    assert statistics.mean_us == 1.0
    assert statistics.tokens_per_s == 4 / 16e-6


@pytest.mark.parametrize(
    "events",
    [
        [host(decode(), 0, 1), kernel("a", 4, 10)],
        [host("step[MIXED bs=2]", 0, 5)],
        [host("execute_new_1_cached_3", 0, 5)],
        [host("ProfilerStep#1", 0, 5)],
        [host(decode(), 3, 3)],
    ],
    ids=["the device's time is not known", "tokens not stated", "no tokens", "global step", "no time"],
)
def test_tokens_per_second_are_unknown(events: list[Event]) -> None:
    (statistics,) = times_of(events)[0].statistics()
    assert statistics.tokens_per_s is None


def test_decode_tokens_are_unknown_with_speculative_decoding() -> None:
    def tokens(*names: str) -> list[int | None]:
        events = [host(name, 10 * number, 10 * number + 5) for number, name in enumerate(names)]
        return [step.decode_tokens for step in times_of(events)[0].summaries(0)]

    assert tokens("step[DECODE bs=3]", "step[EXTEND bs=1 toks=8]", "step[IDLE bs=0]") == [3, None, None]
    assert tokens("step[DECODE bs=3]", "step[VERIFY bs=3]") == [None, None]


@given(
    marks=st.lists(
        st.tuples(st.sampled_from([decode(1), decode(2), "ProfilerStep#3"]), st.integers(0, 60), st.integers(0, 20))
    ),
    kernels=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 100), st.integers(0, 9)), max_size=30),
)
def test_step_times_add_up_to_kernel_times(
    marks: list[tuple[str, int, int]], kernels: list[tuple[str, int, int]]
) -> None:
    events = [host(name, start, start + length) for name, start, length in marks]
    work = [kernel(name, start, start + length) for name, start, length in kernels]
    times, _ = times_of([*events, *work])
    by_kind = dict.fromkeys((GLOBAL_STEP, ITERATION), 0.0)
    for step in times.summaries(0):
        by_kind[step.kind] += step.device_us or 0.0
        assert step.duration_us >= 0
    for kind, first in (
        (kind, [start for name, start, _ in marks if ("#" in name) == (kind == GLOBAL_STEP)]) for kind in by_kind
    ):
        begun = [length for _, start, length in kernels if first and start >= min(first)]
        assert by_kind[kind] == sum(begun)


@pytest.mark.parametrize(("last_step", "numbers"), [(None, [3, 4, 5]), (4, [3, 4]), (5, [3, 4, 5]), (3, [3, 4, 5])])
def test_step_that_the_job_did_not_reach_is_not_counted(last_step: int | None, numbers: list[int]) -> None:
    """The recorder annotates an extra step if the end of the last step is reported before the recorder stops."""
    annotations = [host(f"ProfilerStep#{number}", 10 * number, 10 * number + 9) for number in (3, 4, 5)]
    steps = find_steps(columns(annotations), NAMES, last_step=last_step)
    assert [steps.marks[code].step for code in steps.name] == numbers
