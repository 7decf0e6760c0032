"""Step schedules and windows, compared with a reference implementation of the grammar."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, strategies as st

from profdeck.config.schedule import Schedule, TimedSteps, Window, WindowPhase, parse_span

STEPS = st.integers(0, 60)


@st.composite
def specs(draw: st.DrawFn) -> int | str:
    kind = draw(st.sampled_from(["step", "range", "every", "from", "to", "for", "for to"]))
    first, every = draw(STEPS), draw(st.integers(1, 12))
    count = draw(st.integers(1, max(1, every - 1)))
    last = first + draw(STEPS)
    return {
        "step": first,
        "range": f"{first}..{last}",
        "every": f"every {every}",
        "from": f"every {every} from {first}",
        "to": f"every {every} from {first} to {last}",
        "for": f"every {every} for {count}",
        "for to": f"every {every} for {count} from {first} to {last}",
    }[kind]


def select_steps(spec: int | str, horizon: int = 200) -> set[int]:
    """Return the steps that a spec selects. This is the reference implementation of the grammar."""
    if isinstance(spec, int):
        return {spec}
    if ".." in spec:
        first, last = spec.split("..")
        return set(range(int(first), int(last) + 1))
    values = dict(zip(spec.split()[::2], map(int, spec.split()[1::2]), strict=True))
    last = values.get("to", horizon)
    starts = range(values.get("from", values["every"]), last + 1, values["every"])
    return {step for start in starts for step in range(start, start + values.get("for", 1)) if step <= last}


@given(st.lists(specs(), max_size=5))
def test_selection_matches_the_reference_implementation(entries: list[int | str]) -> None:
    schedule = Schedule.from_list(entries)
    expected = set().union(*map(select_steps, entries))
    assert {step for step in range(201) if step in schedule} == {step for step in expected if step <= 200}
    assert list(schedule.steps(0, 200)) == sorted(step for step in expected if step <= 200)


@given(st.lists(specs(), min_size=1, max_size=5), STEPS)
def test_after_returns_the_next_selected_step(entries: list[int | str], step: int) -> None:
    schedule = Schedule.from_list(entries)
    later = [candidate for candidate in range(step + 1, 201) if candidate in schedule]
    next_step = schedule.after(step)
    assert next_step == later[0] if later else next_step is None or next_step > 200


@given(st.lists(specs(), min_size=1, max_size=5), STEPS, STEPS)
def test_runs_join_adjacent_steps(entries: list[int | str], first: int, length: int) -> None:
    schedule = Schedule.from_list(entries)
    runs = list(schedule.runs(first, first + length))
    covered = [step for start, end in runs for step in range(start, end + 1)]
    assert covered == list(schedule.steps(first, first + length))
    assert all(next_start > end + 1 for (_, end), (next_start, _) in itertools.pairwise(runs))


@given(st.lists(specs(), min_size=1, max_size=5), STEPS, st.one_of(st.none(), st.integers(0, 200)))
def test_is_last_depends_only_on_later_steps(entries: list[int | str], step: int, final_step: int | None) -> None:
    schedule = Schedule.from_list(entries)
    horizon = 400 if final_step is None else final_step
    assert schedule.is_last(step, final_step) == (not any(later in schedule for later in range(step + 1, horizon + 1)))


def test_is_last_considers_the_final_step_of_the_job() -> None:
    schedule = Schedule.from_list([1, 2, 100])
    assert not schedule.is_last(2)
    assert schedule.is_last(2, final_step=50)
    assert not schedule.is_last(1, final_step=50)


@given(st.lists(specs(), max_size=5))
def test_schedule_is_restored_from_its_specs(entries: list[int | str]) -> None:
    schedule = Schedule.from_list(entries)
    assert Schedule.from_list([span.spec for span in schedule.spans]) == schedule


@pytest.mark.parametrize(
    "spec",
    [
        "x",
        "",
        "5..3",
        "every 0",
        "-1",
        -1,
        "1..",
        "every 5 from 9 to 3",
        "1.5",
        "1,2",
        "every 5 for 5",
        "every 5 for 0",
    ],
)
def test_invalid_steps_are_rejected(spec: int | str) -> None:
    with pytest.raises(ValueError, match=r"step|empty|interval|selects|[05] steps do not fit in an interval of 5"):
        parse_span(spec)


@pytest.mark.parametrize("spec", [True, 1.5, None, [1]])
def test_steps_of_other_types_are_rejected(spec: object) -> None:
    with pytest.raises(TypeError, match="is not a step"):
        parse_span(spec)  # type: ignore[arg-type]


@given(
    active=st.integers(1, 5),
    wait=st.integers(0, 4),
    warmup=st.integers(0, 4),
    repeat=st.integers(0, 4),
    skip_first=st.integers(0, 4),
)
def test_window_phases_follow_the_cycle(active: int, wait: int, warmup: int, repeat: int, skip_first: int) -> None:
    window = Window(active=active, wait=wait, warmup=warmup, repeat=repeat, skip_first=skip_first)
    cycle = wait + warmup + active
    phases = [window.phase(iteration) for iteration in range(skip_first + 6 * cycle)]
    cycle_phases = (
        [WindowPhase.OFF] * wait
        + [WindowPhase.WARMUP] * warmup
        + [WindowPhase.RECORD] * (active - 1)
        + [WindowPhase.RECORD_LAST]
    )
    cycles = repeat or 6
    assert phases == [WindowPhase.OFF] * skip_first + cycle_phases * cycles + [WindowPhase.OFF] * (6 - cycles) * cycle


@given(
    st.integers(1, 999_999), st.sampled_from(["s", "min", "h"]), st.integers(1, 999_999), st.lists(specs(), max_size=3)
)
def test_timed_steps_are_kept_but_not_selected(every: int, unit: str, count: int, entries: list[int | str]) -> None:
    timed = f"every {every} {unit} for {count}"
    schedule = Schedule.from_list([timed, *entries])
    assert schedule.timed == (TimedSteps(every, unit, count),)
    assert schedule.timed[0].every_s == every * {"s": 1, "min": 60, "h": 3600}[unit]
    assert schedule.spans == Schedule.from_list(entries).spans
    assert schedule.last is None
    assert Schedule.from_list(schedule.to_list()) == schedule


@pytest.mark.parametrize("spec", ["every 0 min", "every 5 min for 0"])
def test_zero_intervals_and_counts_are_rejected(spec: str) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        Schedule.from_list([spec])


@pytest.mark.parametrize("spec", ["every 5 minutes", "every min", "every 5 min from 3", "every -1 s", "every 1.5 h"])
def test_other_time_notations_are_rejected_with_the_grammar(spec: str) -> None:
    with pytest.raises(ValueError, match="'every 10 min'"):
        Schedule.from_list([spec])
