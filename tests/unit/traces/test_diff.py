from __future__ import annotations

import json
import math
import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import example, given, strategies as st
from invented_summaries import DECODE, PREFILL, STEP, deviation, kernel, per_step, run, trace

from profdeck_traces import load
from profdeck_traces.analysis.contributions import bursts_of
from profdeck_traces.analysis.detail_model import HostState, HostTimes, PerStep, StageSummary
from profdeck_traces.analysis.diff import diff_runs, is_summary, load_summary
from profdeck_traces.analysis.diff_model import Change, Judge, RoleDiff
from profdeck_traces.analysis.diff_text import verdict_of
from profdeck_traces.analysis.host_states import NOTHING
from profdeck_traces.analysis.model import (
    OperatorSummary,
    RankSummary,
    RunSummary,
)
from profdeck_traces.analysis.significance import FLOOR
from profdeck_traces.base.errors import TraceError
from profdeck_traces.inputs.host_load import HostLoad


def role_diff(before: RankSummary | RunSummary, after: RankSummary | RunSummary) -> RoleDiff:
    sides = [run(side) if isinstance(side, RankSummary) else side for side in (before, after)]
    (role,) = diff_runs(*sides).roles
    return role


def named(changes: Sequence[Change], name: str) -> Change:
    (matching_change,) = (change for change in changes if change.name == name)
    return matching_change


def every(role: RoleDiff) -> list[Change]:
    of_ranks = [change for rank in role.ranks for change in (*rank.overall, *rank.iterations, *rank.categories)]
    return [
        *role.overall,
        *role.iterations,
        *role.kernels,
        *role.operators,
        *role.annotations,
        *role.categories,
        *of_ranks,
    ]


# Noise.


def error(mad_us: float, count: int) -> float:
    """Return the standard error of a median."""
    return 1.4826 * mad_us * math.sqrt(math.pi / 2) * math.sqrt(count) / (count - 2)


def test_bursts_of_one_short_cause_are_not_chance() -> None:
    before, after = [10.0] * 12, [30.0 if step % 4 == 3 else 10.0 for step in range(12)]
    loading = [20.5 if step % 4 == 3 else 0.5 for step in range(12)]
    everywhere = [time / 2 for time in after]
    chance = bursts_of(before, after)
    assert chance is not None
    assert chance.p_value > 0.2
    of_one_cause = bursts_of(before, after, [loading])
    assert of_one_cause is not None
    assert of_one_cause.p_value < 0.001
    # A cause that takes half of every step also takes half of every delay.
    long_cause = bursts_of(before, after, [everywhere])
    assert long_cause is not None
    assert long_cause.p_value > 0.02


def test_change_within_three_standard_errors_is_the_same() -> None:
    noise = 3 * math.sqrt(2) * error(1, 9)
    times = [98, 98, 99, 99, 100, 101, 101, 102, 102]
    before = trace({"gemm": times})
    assert before.kernels[0].per_step == PerStep(
        kind="global_step", stage=None, steps=9, measured=9, median_us=100, mad_us=1
    )
    for shift, verdict in ((noise * 0.99, "same"), (noise * 1.01, "slower"), (-noise * 1.01, "faster")):
        (change,) = role_diff(before, trace({"gemm": [time + shift for time in times]})).kernels
        assert change.noise_us == pytest.approx(noise)
        assert change.before_us == 100
        assert change.delta_us == pytest.approx(shift)
        assert change.ratio == pytest.approx(shift / 100)
        assert change.verdict == verdict


@pytest.mark.parametrize(("after", "verdict"), [(104.9, "same"), (105.1, "slower"), (95.3, "same"), (95.1, "faster")])
def test_threshold_applies_if_two_steps_have_unknown_noise(after: float, verdict: str) -> None:
    (change,) = role_diff(trace({"gemm": [100, 100]}), trace({"gemm": [after, after]})).kernels
    assert (change.noise_us, change.verdict) == (None, verdict)


def test_changes_below_the_floor_are_the_same() -> None:
    before = trace({"gemm": [10_000] * 5, "gelu": [5] * 5, "copy": [50] * 5})
    role = role_diff(before, trace({"gemm": [10_000] * 5, "gelu": [10] * 5, "copy": [70] * 5}))
    assert named(role.kernels, "gelu").verdict == "same"
    assert named(role.kernels, "copy").verdict == "slower"


def test_traces_of_one_rank_are_repeated_measurements() -> None:
    def captures(*times: float) -> RunSummary:
        return run(*(trace({"gemm": [time]}, steps=[time], capture=f"step{step}") for step, time in enumerate(times)))

    role = role_diff(captures(99, 100, 101, 90, 110), captures(100, 102, 101, 103, 104))
    (change,) = role.kernels
    assert (change.before_us, change.after_us) == (100, 102)
    assert change.noise_us == pytest.approx(3 * math.hypot(error(1, 5), error(1, 5)))
    assert (role.steps_before, role.steps_after) == (5, 5)
    assert role.iterations[0].noise_us == change.noise_us
    assert role.ranks[0].before == ("a.json",) * 5


@pytest.mark.parametrize("steps", range(2, 8))
def test_duplicate_trace_keeps_its_median_and_deviation(steps: int) -> None:
    times = [10.0 * number * number for number in range(1, steps + 1)]
    once, twice = run(trace({"gemm": times})), run(trace({"gemm": times}), trace({"gemm": times}))
    (change,) = role_diff(twice, once).kernels
    mad = deviation(times)
    assert (change.before_us, change.after_us) == (statistics.median(times),) * 2
    if steps == 2:
        assert change.noise_us is None
    else:
        assert change.noise_us == pytest.approx(3 * math.hypot(error(mad, steps), error(mad, 2 * steps)))


def test_differences_between_traces_increase_the_noise() -> None:
    def captures(*times: float) -> RunSummary:
        return run(*(trace({"gemm": [time] * 9}, steps=[time] * 9) for time in times))

    role = role_diff(captures(98, 100, 103), captures(99, 101, 105))
    noise = 3 * math.sqrt(2) * 1.4826 * 2 * math.sqrt(math.pi / 2 / 3)
    assert [change.noise_us for change in (*role.kernels, *role.iterations)] == pytest.approx([noise, noise])


# Bases.


def test_recordings_of_different_lengths_are_compared_per_step() -> None:
    before = trace({"gemm": [100] * 4}, operators={"aten::mm": [10] * 4}, steps=[200] * 4)
    role = role_diff(before, trace({"gemm": [100] * 9}, operators={"aten::mm": [10] * 9}, steps=[200] * 9))
    assert (role.basis, role.steps_before, role.steps_after) == ("global_step", 4, 9)
    assert {change.verdict for change in every(role)} == {"same"}
    assert (named(role.overall, "busy").before_us, named(role.overall, "operators").after_us) == (100, 10)
    assert role.kernels[0].calls_after == 1


def test_totals_are_compared_without_steps() -> None:
    role = role_diff(trace({"gemm": [100] * 3}), trace({"gemm": [300]}, group=None))
    change = role.kernels[0]
    assert (role.basis, role.steps_before, change.per, change.before_us) == ("total", None, "total", 300)
    assert (change.noise_us, change.verdict) == (None, "same")


def test_iterations_are_the_basis_without_common_global_steps() -> None:
    decode = [("decode", 10.0)] * 3
    assert role_diff(trace({"gemm": [100] * 3}, steps=[*decode, 30]), trace(steps=decode)).basis == "iteration"
    assert role_diff(trace(steps=[30]), trace(steps=decode)).basis == "total"


def test_times_are_per_step_of_the_stage_on_both_sides() -> None:
    """4 of 20 iterations are prefill. The median of a kernel that runs only in prefill is over these."""

    def served(gemm: float, attention: float, prefill: int) -> RankSummary:
        steps = [("decode", 10.0)] * 16 + [("prefill", 80.0)] * prefill
        plain = trace({"gemm": [gemm] * 16}, steps=steps, group=DECODE)
        return attrs.evolve(plain, kernels=(*plain.kernels, kernel("attention", [attention] * prefill, 0, PREFILL)))

    role = role_diff(served(1, 100, 4), served(1.5, 110, 4))
    attention, gemm = role.kernels
    assert (attention.name, attention.per, gemm.per) == ("attention", "prefill iteration", "decode iteration")
    assert (attention.before_us, attention.after_us) == (100, 110)
    assert attention.impact_us == pytest.approx(10 * 4 / 20)
    assert (gemm.delta_us, gemm.calls_before) == (0.5, 16 / 20)
    assert gemm.impact_us == pytest.approx(0.5 * 16 / 20)
    assert (role.basis, named(role.overall, "busy").per) == ("iteration", "iteration")
    reverse_diff = role_diff(served(1, 100, 4), served(1.5, 110, 5))
    assert named(reverse_diff.kernels, "attention").per == "prefill iteration"


def test_medians_of_steps_of_different_stages_are_not_compared() -> None:
    steps = [("decode", 10.0)] * 4 + [("prefill", 10.0)] * 4
    before, after = (trace({"gemm": [10] * 4}, steps=steps, group=group) for group in (DECODE, PREFILL))
    (change,) = role_diff(before, after).kernels
    assert (change.per, change.before_us, change.after_us, change.noise_us) == ("iteration", 5, 5, None)


def test_unmeasured_steps_are_not_counted() -> None:
    def served(time: float) -> RankSummary:
        return trace({"gemm": [time - 1, time + 1] * 500})

    assert role_diff(served(10), served(10)).kernels[0].noise_us == pytest.approx(3 * math.sqrt(2) * error(1, 256))


def test_kernels_in_few_steps_are_compared_by_their_mean() -> None:
    often, rare = [10] * 10, [0] * 9 + [100]
    role = role_diff(trace({"gemm": often, "nccl": rare}), trace({"gemm": often, "nccl": [0] * 9 + [200]}))
    change = named(role.kernels, "nccl")
    assert (change.before_us, change.after_us, change.noise_us, change.verdict) == (10, 20, None, "slower")


def test_operators_are_not_compared_if_only_devices_were_read() -> None:
    before = trace({"gemm": [1] * 3}, operators={"aten::mm": [10] * 3})
    role = role_diff(before, trace({"gemm": [1] * 3}, graph_launches=None))
    assert role.operators == ()
    assert "Operators are not compared" in role.notes[0]
    assert [change.name for change in role.overall][:2] == ["kernels", "busy"]


def test_step_annotations_are_not_compared_as_annotations() -> None:
    def annotated(first: int) -> RankSummary:
        before = trace(operators={"step 0": [1], "forward": [5]})
        step_summaries = tuple(
            attrs.evolve(trace(steps=[1]).steps[0], name=f"step {first + number}") for number in range(2)
        )
        annotation = attrs.evolve(before.operators[0], name=f"step {first}")
        return attrs.evolve(before, operators=(), annotations=(annotation, before.operators[1]), steps=step_summaries)

    (change,) = role_diff(annotated(0), annotated(10)).annotations
    assert (change.name, change.verdict) == ("forward", "same")


def test_stages_are_compared_by_total_time() -> None:
    def staged(stage_us: float) -> RankSummary:
        plain = trace(operators={"mm": [5] * 5}, steps=[stage_us] * 5)
        stage = OperatorSummary(
            name="rollout",
            count=5,
            self_us=5.0,  # the remaining time is in child calls
            total_us=5 * stage_us,
            max_us=stage_us,
            per_step=per_step([stage_us] * 5, STEP),
        )
        return attrs.evolve(plain, annotations=(stage,))

    role = role_diff(staged(18_000), staged(220_000))
    assert [(change.name, change.before_us, change.verdict) for change in role.annotations] == [
        ("rollout", 18_000, "slower")
    ]
    assert [change.name for change in role.regressions(0.05, Judge.STAGES)] == ["rollout"]
    assert role.regressions(0.05, Judge.DEVICE) == ()


# Names.


def test_new_and_removed_kernels_are_reported() -> None:
    before = trace({"gemm": [100] * 3, "old": [50] * 3})
    role = role_diff(before, trace({"gemm": [100] * 3, "new": [50] * 3}))
    assert named(role.kernels, "new").verdict == "appeared"
    assert named(role.kernels, "new").ratio is None
    assert named(role.kernels, "old").verdict == "vanished"
    assert named(role.kernels, "old").ratio == -1
    assert named(role.categories, "unclassified").verdict == "same"


def test_changes_are_sorted_by_size() -> None:
    before = trace({"gemm": [10] * 3, "nccl": [10] * 3, "copy": [10] * 3})
    role = role_diff(before, trace({"gemm": [12] * 3, "nccl": [1] * 3, "copy": [10] * 3}))
    assert [change.name for change in role.kernels] == ["nccl", "gemm", "copy"]


def test_device_sums_are_compared() -> None:
    before = trace({"gemm": [100] * 3}, communication_us=60.0, overlap_us=30.0)
    role = role_diff(before, trace({"gemm": [100] * 3}, communication_us=60.0, overlap_us=0.0))
    changes = {change.name: (change.before_us, change.after_us, change.verdict) for change in role.overall}
    assert changes == {
        "kernels": (100, 100, "same"),
        "busy": (100, 100, "same"),
        "idle": (50, 50, "same"),
        "communication": (20, 20, "same"),
        "exposed communication": (10, 20, "slower"),
    }


# Iterations.


def test_iterations_are_compared_by_stage() -> None:
    before = trace(steps=[("decode", 10), ("decode", 10), ("decode", 10), ("prefill", 80), ("idle", 1)])
    role = role_diff(
        before, trace(steps=[("decode", 12), ("decode", 12), ("decode", 12), ("prefill", 80), ("mixed", 9)])
    )
    changes = {change.name: (change.before_us, change.after_us, change.verdict) for change in role.iterations}
    assert changes == {
        "decode iteration": (10, 12, "slower"),
        "idle iteration": (1, 0, "vanished"),
        "mixed iteration": (0, 9, "appeared"),
        "prefill iteration": (80, 80, "inconclusive"),  # a single iteration
    }
    assert [change.name for change in role.decisive] == ["decode iteration", "prefill iteration"]
    assert named(role.iterations, "decode iteration").calls_before == 3


def test_stages_are_compared_on_ranks_that_have_them_on_both_sides() -> None:
    before = run(trace(steps=[("decode", 10)]), trace(steps=[("decode", 90)], rank=1))
    role = role_diff(before, run(trace(steps=[("decode", 10)]), trace(rank=1)))
    (change,) = role.iterations
    assert (change.before_us, change.after_us) == (10, 10)


def test_different_stage_mix_or_load_is_noted() -> None:
    def iterations(decode: int, tokens: int) -> RankSummary:
        plain = trace(steps=[("decode", 10)] * decode + [("prefill", 80)] * 2)
        steps = tuple(attrs.evolve(step, decode_tokens=tokens) for step in plain.steps)
        return attrs.evolve(plain, steps=steps)

    assert role_diff(iterations(8, 32), iterations(8, 32)).notes == ()
    load, decode, prefill = role_diff(iterations(8, 32), iterations(2, 64)).notes[1:]
    assert load == "The load differs: the median prefill iteration has 32 tokens before and 64 after."
    assert "80% of the steps of that kind are decode iterations before and 50% after" in decode
    assert "20% of the steps of that kind are prefill iterations before and 50% after" in prefill


# Regressions.


def test_slowdown_above_the_limit_and_the_noise_is_a_regression() -> None:
    noisy = [80, 100, 120]
    calm = [100, 100, 100]
    assert role_diff(trace(steps=calm), trace(steps=[106] * 3)).regressions(0.05)
    assert not role_diff(trace(steps=calm), trace(steps=[104] * 3)).regressions(0.05)
    assert not role_diff(trace(steps=noisy), trace(steps=[106] * 3)).regressions(0.05)
    assert not role_diff(trace(steps=calm), trace(steps=[50] * 3)).regressions(0.05)


@pytest.mark.parametrize(("before", "after"), [([100], [103]), ([100, 100], [150, 150]), ([100] * 9, [200] * 2)])
def test_fewer_than_three_steps_never_decide(before: list[float], after: list[float]) -> None:
    role = role_diff(trace(steps=before), trace(steps=after))
    assert role.regressions(0.02) == ()
    assert role.undecided(0.02) == role.undecided(0.9)
    assert "fewer than 3 measurements of its global step" in role.undecided(0.02)[0]
    assert "is inconclusive" in verdict_of(role)


def test_samples_without_overlap_are_not_chance() -> None:
    """Consecutive steps are correlated, but that must not hide a difference that all steps show."""
    before = [509, 520, 535, 540, 552, 560, 570, 588, 600, 610, 622, 635, 640, 655, 660]
    after = [771, 780, 800, 820, 850, 870, 900, 930, 960, 1000, 1020, 1050, 1070, 1090, 1109]
    role = role_diff(trace(steps=before), trace(steps=after))
    assert (role.regressions(0.05), role.undecided(0.05)) == (role.iterations, ())
    assert verdict_of(role).startswith("trainer is slower: the median global step")
    assert role_diff(trace(steps=after), trace(steps=before)).regressions(0.05) == ()
    few = role_diff(trace(steps=before[:3]), trace(steps=after[:3]))
    assert few.regressions(0.05) or few.undecided(0.05)


def test_large_change_that_may_be_chance_is_inconclusive() -> None:
    before = [100, 80, 150, 90, 155, 120]
    after = [127, 85, 145, 118, 160, 126]
    role = role_diff(trace(steps=before), trace(steps=after))
    assert role.regressions(0.05) == ()
    assert "may have changed by more than 5%" in role.undecided(0.05)[0]
    assert "may have changed by more than 30%" in role.undecided(0.3)[0]  # the change may be up to 80 ms of 110 ms
    assert role.undecided(0.9) == ()
    assert (role.verdict(0.3), role.verdict(0.9)) == ("inconclusive", "same")
    assert verdict_of(role, 0.9).startswith("trainer changed by less than 90%: ")


def test_one_slow_rank_is_a_regression() -> None:
    """The other ranks vary so much that the mean over all ranks does not change significantly."""
    noisy = [[100 + 60 * ((7 * step + 3 * rank) % 12) for step in range(12)] for rank in range(3)]
    calm = [200 + step for step in range(12)]
    before = run(*(trace(steps=times, rank=rank) for rank, times in enumerate([*noisy, calm])))
    after = run(*(trace(steps=times, rank=rank) for rank, times in enumerate([*noisy, [1.5 * us for us in calm]])))
    role = role_diff(before, after)
    assert [change.verdict for change in role.iterations] == ["inconclusive"]
    (regression,) = role.regressions(0.05)
    assert (regression.name, regression.ratio) == ("global step of rank 3", pytest.approx(0.5))
    assert verdict_of(role).startswith("trainer is slower on 1 of 4 ranks: the median global step of rank 3 takes")
    assert role.regressions(0.6) == ()
    assert verdict_of(role_diff(after, before)).startswith(
        "trainer is faster on 1 of 4 ranks: the median global step of"
    )


def test_ranks_without_a_verdict_are_counted() -> None:
    noisy = [100 + 60 * ((7 * step) % 12) for step in range(12)]
    calm = [200 + step for step in range(12)]
    before = run(*(trace(steps=times, rank=rank) for rank, times in enumerate([noisy, calm, calm])))
    slower = [[1.3 * us for us in noisy], [1.5 * us for us in calm], calm]
    role = role_diff(before, run(*(trace(steps=times, rank=rank) for rank, times in enumerate(slower))))
    assert [rank.iterations[0].verdict for rank in role.ranks] == ["inconclusive", "slower", "same"]
    assert verdict_of(role).startswith("trainer is slower on 1 of 3 ranks (inconclusive on 1): the median global step")


def step_times(generator: random.Random, level: float, *, slope: float = 0.0, spread: float = 0.05) -> list[float]:
    """Return the durations of ten steps with Gaussian noise and a drift of `slope` per step."""
    return [level + slope * step + generator.gauss(0, spread * level) for step in range(10)]


def test_noise_is_rarely_called_a_change_and_a_planted_change_is_found() -> None:
    generator = random.Random(1)  # noqa: S311 - reproducible input
    verdicts = [
        role_diff(trace(steps=step_times(generator, 100)), trace(steps=step_times(generator, 100))).verdict()
        for _ in range(500)
    ]
    assert verdicts.count("slower") + verdicts.count("faster") <= 0.01 * 500
    for spread in (0.02, 0.05, 0.1):
        planted = [
            role_diff(
                trace(steps=step_times(generator, 100, spread=spread)),
                trace(steps=step_times(generator, 130, spread=spread)),
            ).verdict()
            for _ in range(100)
        ]
        assert planted.count("slower") >= 95
        assert set(planted) <= {"slower", "inconclusive"}


@pytest.mark.parametrize("slope", [0.5, 2, 10, -2])
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_drift_that_continues_from_one_run_to_the_next_is_inconclusive(slope: float, noise: float) -> None:
    generator = random.Random(2)  # noqa: S311 - reproducible input
    times = [200 + slope * step + noise * abs(slope) * generator.uniform(-1, 1) for step in range(20)]
    role = role_diff(trace(steps=times[:10]), trace(steps=times[10:]))
    if abs(slope) >= 2:
        assert role.verdict() == "inconclusive"
        assert "may be drift; record later or more steps" in verdict_of(role)
    else:
        assert role.verdict() == "same"  # changes by less than 5 %
    assert role.regressions(0.05) == ()


@example(before=[50.0, 50.0, 50.0], after=[51.0, 52.0, 66.0])
@given(st.lists(st.floats(50, 150), min_size=1, max_size=12), st.lists(st.floats(50, 150), min_size=1, max_size=12))
def test_exchanged_runs_have_the_opposite_verdict(before: list[float], after: list[float]) -> None:
    opposite = {"slower": "faster", "faster": "slower", "same": "same", "inconclusive": "inconclusive"}
    forward, backward = (
        role_diff(trace(steps=one), trace(steps=other)) for one, other in ((before, after), (after, before))
    )
    assert forward.verdict() == opposite[backward.verdict()]
    if forward.iterations[0].gap_us is not None:
        assert "chance" not in verdict_of(forward)


def test_disjoint_samples_of_few_steps_are_described() -> None:
    few = role_diff(trace(steps=[100_000, 101_000]), trace(steps=[130_000, 140_000]))
    text = "although every step after is longer than every step before, by at least 29.00 ms; record more steps"
    assert text in verdict_of(few)
    noisy = role_diff(trace(steps=[100_000, 60_000, 140_000]), trace(steps=[150_000, 190_000, 230_000]))
    assert noisy.verdict() == "inconclusive"
    assert "every step after is longer than every step before, by at least 10.00 ms" in verdict_of(noisy)


def test_corrupt_trace_gives_no_verdict() -> None:
    corrupt = trace(steps=[300] * 9, problem="It ends within an event.", whole=False)
    for sides in ((trace(steps=[100] * 9), corrupt), (corrupt, trace(steps=[100] * 9))):
        role = role_diff(*sides)
        assert role.regressions(0.05) == ()
        assert role.undecided(0.05) == ("a.json is corrupt and was read only in part",)
        assert "is inconclusive" in verdict_of(role)


def test_rank_without_kernels_is_inconclusive() -> None:
    """A rank without kernels is reported even if the other ranks have kernels."""
    full = run(*(trace({"gemm": [100] * 5}, steps=[1000] * 5, rank=rank) for rank in range(4)))
    lost = run(*(trace({"gemm": [100] * 5} if rank else {}, steps=[1000] * 5, rank=rank) for rank in range(4)))
    for sides in ((full, lost), (lost, full)):
        (reason,) = role_diff(*sides).undecided(0.05)
        assert "has no kernels, but the traces of this rank on the other side have kernels" in reason
    assert role_diff(lost, lost).undecided(0.05) == ()


@pytest.mark.parametrize("after", [{}, {"gemm": [100] * 5}, {"copy": [10] * 5}])
def test_vanished_kernels_are_inconclusive(after: dict[str, list[float]]) -> None:
    before = trace({"gemm": [100] * 5, "nccl": [50] * 5}, steps=[1000] * 5)
    role = role_diff(before, trace(after, steps=[1000] * 5))
    assert role.undecided(0.05) != ()
    assert role_diff(before, trace(after, steps=[500] * 5)).undecided(0.05) == () or not after


def test_renamed_kernel_does_not_prevent_a_verdict() -> None:
    before = trace({"gemm": [100] * 5}, steps=[1000] * 5)
    assert role_diff(before, trace({"[gemm]": [100] * 5}, steps=[1000] * 5)).undecided(0.05) == ()


def test_rank_or_stage_of_one_side_is_inconclusive() -> None:
    ranks = [trace(steps=[100] * 5, rank=rank, path=f"rank{rank}") for rank in range(2)]
    assert role_diff(run(*ranks), run(ranks[0])).undecided(0.05) == ("only one side has rank1",)
    decode = [("decode", 10.0)] * 5
    role = role_diff(trace(steps=[*decode, *[("prefill", 50.0)] * 5]), trace(steps=decode))
    assert role.undecided(0.05) == ("only one side has a prefill iteration",)


def test_lost_role_is_reported() -> None:
    before = run(trace(steps=[1] * 5), trace(steps=[1] * 5, role="rollout", path="r"))
    assert diff_runs(before, run(trace(steps=[1] * 5))).lost_roles == ("rollout",)


def test_ranks_share_the_steps_of_a_replica() -> None:
    def ranks(replica: int | None) -> list[RankSummary]:
        return [trace(steps=[100] * 6, rank=rank, replica=replica) for rank in range(4)]

    role = role_diff(run(*ranks(None)), run(*ranks(None)))
    assert (role.steps_before, role.steps_after, role.iterations[0].calls_before) == (6, 6, 6)
    role = role_diff(run(*ranks(0), *ranks(1)), run(*ranks(0), *ranks(1)))
    assert (role.steps_before, role.iterations[0].calls_after) == (12, 12)


@pytest.mark.parametrize(
    ("before", "after", "name"),
    [
        (trace({"gemm": [100]}, group=None), trace({"gemm": [110]}, group=None), "kernels"),
        (trace(operators={"mm": [100]}, steps=()), trace(operators={"mm": [110]}, steps=()), "operators"),
    ],
)
def test_sums_are_decisive_without_steps(before: RankSummary, after: RankSummary, name: str) -> None:
    role = role_diff(before, after)
    assert [change.name for change in role.decisive] == [name]
    assert f"fewer than 3 measurements of its {name}" in role.undecided(0.05)[0]


def test_empty_traces_have_no_decisive_changes() -> None:
    assert role_diff(trace(), trace()).decisive == ()


# Pairs.


def test_ranks_are_paired_by_role_replica_and_number() -> None:
    def ranks(scale: float) -> list[RankSummary]:
        return [
            trace({"gemm": [scale * time] * 3}, role=role, replica=replica, rank=rank, path=f"{role}{replica}{rank}")
            for role, replica, rank, time in (("trainer", None, 0, 1), ("trainer", None, 1, 3), ("rollout", 0, 0, 5))
        ]

    diff = diff_runs(run(*ranks(1)), run(*reversed(ranks(2))))
    assert (diff.only_before, diff.only_after) == ((), ())
    trainer, rollout = diff.roles
    assert (trainer.role, trainer.kernels[0].before_us, trainer.kernels[0].after_us) == ("trainer", 2, 4)
    assert [(rank.rank, rank.categories[0].before_us, rank.categories[0].after_us) for rank in trainer.ranks] == [
        (0, 1, 2),
        (1, 3, 6),
    ]
    assert (rollout.role, rollout.ranks[0].replica, rollout.kernels[0].delta_us) == ("rollout", 0, 5)


def test_traces_without_a_counterpart_are_reported() -> None:
    before = run(trace(path="0"), trace(rank=1, path="1"))
    diff = diff_runs(before, run(trace(rank=1, path="1"), trace(rank=2, path="2"), trace(role="rollout", path="r")))
    assert (diff.only_before, diff.only_after) == (("0",), ("2", "r"))


def test_two_single_traces_are_always_paired() -> None:
    role = role_diff(trace(rank=3), trace(role=None, rank=None, capture=None))
    assert (role.role, role.ranks[0].rank) == ("trainer", 3)


def test_ranks_are_paired_by_number_without_roles() -> None:
    before = run(trace(rank=0, path="0"), trace(rank=1, path="1"))
    after = run(*(trace(rank=rank, role=None, capture=None, path=f"new{rank}") for rank in (1, 0)))
    role = role_diff(before, after)
    assert [(rank.before, rank.after) for rank in role.ranks] == [(("0",), ("new0",)), (("1",), ("new1",))]


def test_number_does_not_identify_one_of_several_roles() -> None:
    before = run(trace(), trace(role="rollout"))
    with pytest.raises(TraceError, match="nothing to compare"):
        diff_runs(before, run(trace(role=None)))


def test_traces_without_names_are_paired_by_position() -> None:
    def nameless(*paths: str) -> RunSummary:
        return run(*(trace(role=None, rank=None, capture=None, path=path) for path in paths))

    diff = diff_runs(nameless("a", "b"), nameless("c", "d", "e"))
    assert [(rank.before, rank.after) for rank in diff.roles[0].ranks] == [(("a",), ("c",)), (("b",), ("d",))]
    assert diff.only_after == ("e",)


@pytest.mark.parametrize(
    ("capture", "stage"),
    [
        ("step10", None),
        ("step10-take2", None),
        ("capture-2", None),
        ("iteration100", None),
        ("nightly-run", None),
        (None, None),
        ("step10-actor_update", "actor_update"),
        ("step10-actor-update-2", "actor-update"),
        ("step7-actor_update-3-take2", "actor_update"),
        ("capture-decode", "decode"),
    ],
)
def test_stages_are_not_mixed(capture: str | None, stage: str | None) -> None:
    staged, other_staged = trace(capture=capture, path="mine"), trace(capture="step3-other", path="other")
    diff = diff_runs(run(staged, other_staged), run(staged, other_staged))
    assert [(role.stage, role.ranks[0].before) for role in diff.roles] == [(stage, ("mine",)), ("other", ("other",))]


def test_empty_side_is_reported() -> None:
    with pytest.raises(TraceError, match=r"no trace of one side \(no trace\).*\(a.json\)"):
        diff_runs(run(), run(trace()))


# Properties.

KERNELS = ["gemm", "nccl", "copy", "gelu"]
TIMES = st.integers(1, 10**6).map(lambda time_ns: time_ns / 1000)


@st.composite
def runs(draw: st.DrawFn) -> RunSummary:
    stepped = draw(st.booleans())
    ranks = []
    for rank in range(draw(st.integers(1, 2))):
        for capture in range(draw(st.integers(1, 2))):
            steps = draw(st.integers(1, 5))
            times = st.lists(TIMES, min_size=steps, max_size=steps)
            kernels = draw(st.dictionaries(st.sampled_from(KERNELS), times, max_size=3))
            operators = draw(st.dictionaries(st.sampled_from(["mm", "add", "all_reduce"]), times, max_size=3))
            ranks.append(
                trace(
                    kernels,
                    operators=operators,
                    steps=draw(times) if stepped else (),
                    group=STEP if stepped else None,
                    rank=rank,
                    capture=f"step{capture}",
                )
            )
    return run(*ranks)


@given(runs())
def test_run_is_the_same_as_itself(summary: RunSummary) -> None:
    for role in diff_runs(summary, summary).roles:
        assert {change.verdict for change in every(role)} <= {"same", "inconclusive"}
        assert {change.delta_us for change in every(role)} <= {0}
        assert role.regressions(0) == ()


@given(runs(), runs())
def test_diff_is_symmetric(before: RunSummary, after: RunSummary) -> None:
    mirrored = {"slower": "faster", "faster": "slower", "appeared": "vanished", "vanished": "appeared"}
    mirrored |= {verdict: verdict for verdict in ("same", "inconclusive", "faster and slower")}
    forward, backward = diff_runs(before, after), diff_runs(after, before)
    assert (forward.only_before, forward.only_after) == (backward.only_after, backward.only_before)
    for forward_role, backward_role in zip(forward.roles, backward.roles, strict=True):
        assert (forward_role.basis, forward_role.steps_before) == (backward_role.basis, backward_role.steps_after)
        forward_changes = [
            (
                change.name,
                change.category or "",
                change.before_us,
                change.after_us,
                change.noise_us or -1,
                change.verdict,
            )
            for change in every(forward_role)
        ]
        reflected = [
            (
                change.name,
                change.category or "",
                change.after_us,
                change.before_us,
                change.noise_us or -1,
                mirrored[change.verdict],
            )
            for change in every(backward_role)
        ]
        assert sorted(forward_changes) == sorted(reflected)
        if not any(role.undecided(0.05) for role in (forward_role, backward_role)):
            assert forward_role.verdict() == mirrored[backward_role.verdict()]


@given(st.dictionaries(st.sampled_from(KERNELS), TIMES, min_size=1), st.integers(3, 6), st.sampled_from([0.9, 1.1]))
def test_scaled_times_change_everywhere_above_the_floor(kernels: dict[str, float], steps: int, scale: float) -> None:
    def scaled(scale: float) -> RankSummary:
        times = {name: [scale * time] * steps for name, time in kernels.items()}
        return trace(times, operators=times, steps=[scale * sum(kernels.values())] * steps)

    role = role_diff(scaled(1), scaled(scale))
    least = FLOOR * sum(kernels.values()) * max(1, scale)
    for change in (*role.iterations, *role.kernels, *role.operators, *role.categories):
        assert change.ratio == pytest.approx(scale - 1)
        assert change.noise_us == 0
        if abs(change.delta_us) > least * 1.001:
            assert change.verdict == ("slower" if scale > 1 else "faster")
        elif abs(change.delta_us) < least * 0.999:
            assert change.verdict == "same"
    assert bool(role.regressions(0.05)) == (scale > 1)


@given(st.lists(TIMES, min_size=1, max_size=12))
def test_single_step_captures_equal_one_capture_of_all_steps(times: list[float]) -> None:
    apart = run(*(trace({"gemm": [time]}, steps=[time]) for time in times))
    role = role_diff(apart, trace({"gemm": times}, steps=times))
    for change in (*role.kernels, *role.iterations):
        assert change.before_us == pytest.approx(change.after_us)
        assert (change.noise_us is None) == (len(times) < 3)


# Documents.


def write(path: Path, document: Any) -> Path:
    path.write_text(json.dumps(document), encoding="utf-8")
    return path


def test_document_round_trips(tmp_path: Path) -> None:
    summary = run(trace({"gemm": [1.5, 2]}, operators={"mm": [1, 2]}, steps=[("decode", 7.25)]))
    path = write(tmp_path / "a.json", summary.to_dict())
    assert is_summary(path)
    assert load_summary(path) == summary


def test_fields_of_later_versions_are_ignored(tmp_path: Path) -> None:
    summary = run(trace({"gemm": [1, 2]}))
    document: dict[str, Any] = {"profdeck": "9.1", "schema": 2, **summary.to_dict(), "more": []}
    document["ranks"][0]["more"] = {}
    path = write(tmp_path / "a.json", document)
    assert is_summary(path)
    assert load_summary(path) == summary


def test_document_without_npu_fields_is_read(tmp_path: Path) -> None:
    summary = run(trace({"gemm": [1, 2]}))
    document = summary.to_dict()
    for rank in document["ranks"]:
        for name in ("cores", "device_steps", "communication"):
            del rank[name]
        for row in rank["kernels"]:
            del row["type"]
    assert load_summary(write(tmp_path / "a.json", document)) == summary


def test_invalid_document_is_reported(tmp_path: Path) -> None:
    document = run(trace({"gemm": [1, 2]})).to_dict()
    document["ranks"][0]["kernels"][0]["count"] = "2"
    with pytest.raises(TraceError, match=r"Expected `int`, got `str` - at `\$\.ranks\[0\]\.kernels\[0\]\.count`"):
        load_summary(write(tmp_path / "a.json", document))
    (tmp_path / "cut.json").write_bytes(b'{"ranks": [')
    with pytest.raises(TraceError, match="no summary by this version of profdeck: Input data was truncated"):
        load_summary(tmp_path / "cut.json")
    with pytest.raises(TraceError, match="Cannot read"):
        load_summary(tmp_path / "absent.json")


@pytest.mark.parametrize(
    "text",
    [
        b'{"traceEvents": [], "ranks": []}',
        b'{"schemaVersion": 1, "deviceProperties": [{"id": 0}]}',
        b"[]",
        b"",
        b"\x1f\x8b",
    ],
)
def test_traces_are_not_summaries(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.json").write_bytes(text)
    assert not is_summary(tmp_path / "a.json")
    assert not is_summary(tmp_path)


# Busy machines.

IDLE = HostLoad(wall_s=10.0, cpu_s=9.0, cpus=8, run_queue_s=0.1)
BUSY = attrs.evolve(IDLE, run_queue_s=4.0)
STEPS = [99.0, 100, 101, 100, 99, 101, 100, 99]


def on_host(load: HostLoad | None, factor: float = 1.0) -> RankSummary:
    times = [time * factor for time in STEPS]
    return trace({"gemm": times}, steps=times, host_load=load)


@pytest.mark.parametrize("factor", [1.3, 0.7, 1.0])
def test_slower_steps_on_a_busy_machine_are_inconclusive(factor: float) -> None:
    role = role_diff(on_host(IDLE), on_host(BUSY, factor))
    text = "the machine was busy after (the main thread waited 40% of the time for a CPU)"
    assert text in verdict_of(role)
    assert role.regressions(0.05) == ()
    assert any(text in reason for reason in role.undecided(0.05)) == (factor > 1)
    assert ("is inconclusive" in verdict_of(role)) == (factor > 1)


@pytest.mark.parametrize(("before", "after"), [(BUSY, IDLE), (IDLE, IDLE), (None, IDLE)])
def test_other_slower_steps_are_regressions(before: HostLoad | None, after: HostLoad) -> None:
    role = role_diff(on_host(before), on_host(after, 1.3))
    assert [change.name for change in role.regressions(0.05)] == ["global step"]
    assert ("the machine was busy before" in verdict_of(role)) == (before is BUSY)


LOADED = attrs.evolve(IDLE, run_queue_s=None, load_at_start=16.0, load_at_end=20.0)
THROTTLED = attrs.evolve(IDLE, throttled_s=4.0)


@pytest.mark.parametrize("after", [BUSY, LOADED, THROTTLED])
@pytest.mark.parametrize(
    ("factor", "verdict"),
    [(1.02, "inconclusive"), (1.3, "inconclusive"), (5.0, "slower"), (0.7, "inconclusive"), (0.2, "faster")],
)
def test_contention_on_both_sides_explains_changes_up_to_the_lost_time(
    factor: float, verdict: str, after: HostLoad
) -> None:
    role = role_diff(on_host(BUSY), on_host(after, factor))
    assert role.verdict() == verdict
    is_explained = verdict == "inconclusive"
    assert ("can explain the change" in verdict_of(role)) == is_explained
    assert any("can explain the change" in reason for reason in role.undecided(0.05)) == is_explained
    assert bool(role.changes_over(0.05)) == (not is_explained)


def test_busiest_rank_decides_whether_contention_explains_a_change() -> None:
    ranks = [(IDLE, 0), (attrs.evolve(BUSY, run_queue_s=1.0), 1), (BUSY, 2)]
    before, after = (
        run(*(attrs.evolve(on_host(load, factor), rank=rank, path=f"{rank}.json") for load, rank in ranks))
        for factor in (1.0, 1.3)
    )
    role = role_diff(before, after)
    assert role.verdict() == "inconclusive"
    assert "waited 40% of the time" in verdict_of(role)


def test_busy_time_of_devices_is_compared_on_a_busy_machine() -> None:
    role = role_diff(on_host(IDLE), on_host(BUSY, 1.3))
    assert role.undecided(0.05, Judge.DEVICE) == role_diff(on_host(IDLE), on_host(IDLE, 1.3)).undecided(
        0.05, Judge.DEVICE
    )


def test_one_rank_that_is_slower_on_a_busy_machine_is_inconclusive() -> None:
    before = run(*(attrs.evolve(on_host(IDLE), rank=rank, path=f"{rank}.json") for rank in range(8)))
    after = run(
        *(attrs.evolve(on_host(BUSY, 1.2 if rank == 3 else 1.0), rank=rank, path=f"{rank}.json") for rank in range(8))
    )
    assert [
        change.name
        for change in role_diff(
            before, attrs.evolve(after, ranks=tuple(attrs.evolve(rank, host_load=IDLE) for rank in after.ranks))
        ).regressions(0.05)
    ] == ["global step of rank 3"]
    assert "is inconclusive" in verdict_of(role_diff(before, after))


# Reasons for a change, and bursts.

PYTHON = "Python and other host code"


def staged(
    steps: Sequence[float],
    stages: dict[str, float],
    states: dict[str, float],
    operators: dict[str, float] | None = None,
) -> RankSummary:
    """Create a summary of steps from the mean times per step of stages and of host states outside stages."""
    count = len(steps)

    def state(name: str, mean_us: float) -> HostState:
        return HostState(state=name, time_us=mean_us * count, share=0)

    in_stages = [
        StageSummary(
            name=name,
            count=count,
            steps=count,
            total_us=mean_us * count,
            share=0,
            median_us=mean_us,
            max_us=mean_us,
            communication_us=0,
            host=(state("operators", mean_us),),
        )
        for name, mean_us in stages.items()
    ]
    outside = states | {"operators": states.get("operators", 0) + sum(stages.values())}
    times = HostTimes(
        basis="global_step",
        steps=count,
        total_us=sum(steps),
        states=tuple(state(name, mean_us) for name, mean_us in outside.items()),
        stages=tuple(in_stages),
    )
    named_operators = {name: [mean_us] * count for name, mean_us in (operators or {}).items()}
    return trace(operators=named_operators, steps=steps, host_times=times)


def test_contributions_add_up_to_the_change_of_the_mean_step() -> None:
    before = staged([100_000] * 8, {"data": 30_000, "forward": 50_000}, {"operators": 20_000})
    after = staged([166_000] * 8, {"data": 90_000, "save": 5_000}, {"operators": 21_000, "nothing recorded": 50_000})
    role = role_diff(before, after)
    assert sum(part.delta_us for part in role.contributions) == pytest.approx(66_000)
    assert [(part.name, part.kind, part.delta_us) for part in role.contributions] == [
        ("data", "stage", 60_000),
        ("forward", "stage", -50_000),
        ("nothing recorded", "outside stages", 50_000),
        ("save", "stage", 5_000),
        ("operators", "outside stages", 1_000),
    ]


@pytest.mark.parametrize(
    ("stages", "states", "abs_us", "reason"),
    [
        # An operator that explains 2.9 ms of 436 ms is not "most of it".
        ({}, {"operators": 103_000, PYTHON: 433_000, NOTHING: 500_000}, 3_000, f"most of it: {PYTHON} +433.000 ms."),
        ({}, {"operators": 536_000, NOTHING: 500_000}, 403_000, "most of it: abs +402.900 ms."),
        ({}, {"operators": 100_000, NOTHING: 936_000}, 3_000, "not explained: +436.000 ms."),
        (
            {"data": 210_000, "save": 150_000},
            {"operators": 176_000, NOTHING: 500_000},
            100,
            "data +210.000 ms, save +150.000 ms, operators +76.000 ms.",
        ),
        (
            {"data": 700_000},
            {"operators": 36_000, NOTHING: 300_000},
            100,
            "data +700.000 ms, operators -64.000 ms; not explained: -200.000 ms.",
        ),
    ],
)
def test_reason_explains_most_of_the_change(
    stages: dict[str, float], states: dict[str, float], abs_us: float, reason: str
) -> None:
    before = staged([600_000] * 8, {}, {"operators": 100_000, NOTHING: 500_000}, {"abs": 100})
    after = staged([1_036_000] * 8, stages, states, {"abs": abs_us})
    assert verdict_of(role_diff(before, after)).endswith(reason)


def test_bursts_make_steps_slower_though_the_median_is_the_same() -> None:
    steady = [40.0, 41, 40, 39] * 10
    bursty = [time + (65 if number % 4 == 3 else 0) for number, time in enumerate(steady)]
    role = role_diff(trace(steps=steady), trace(steps=bursty))
    (change,) = role.iterations
    assert change.verdict == "slower"
    assert change.exceeds(0.05)
    assert change.mean_after_us == pytest.approx(statistics.fmean(bursty))
    text = (
        "the mean 0.056 ms, before 0.040 ms, +0.016 ms, +40.6%: 10 of 40 steps take over 1.25 times the median, before "
        "0 of 40"
    )
    assert text in verdict_of(role)
    assert role_diff(trace(steps=bursty), trace(steps=steady)).iterations[0].verdict == "faster"
    assert role_diff(trace(steps=bursty), trace(steps=bursty[::-1])).iterations[0].verdict == "same"


def test_few_bursts_are_inconclusive() -> None:
    steady = [40.0, 41, 40, 39] * 3
    bursty = [*steady[:9], 105, 105, 105]
    role = role_diff(trace(steps=steady), trace(steps=bursty))
    assert role.regressions(0.05) == ()
    assert "is inconclusive" in verdict_of(role)
    assert "3 of 12 steps take over 1.25 times the median, before 0 of 12, which may be chance" in verdict_of(role)


def test_number_of_bursts_is_tested_exactly() -> None:
    result = bursts_of([1.0] * 15, [1.0] * 10 + [2.0] * 5)
    assert result is not None
    assert result.p_value == pytest.approx(2 * 3003 / 142506)  # 2 C(15, 5) / C(30, 5)
    assert bursts_of([1.0] * 5, [2.0] * 5) is None


# Steps on the device.


def gpu_run(
    directory: Path,
    *,
    launch_us: float,
    kernel_us: Sequence[float],
    syncs: Sequence[int] = (),
    factors: Sequence[float] = (0.4, 0.8, 1.2, 1.6),
) -> RunSummary:
    """Write the trace of a job that launches kernels without waiting for them. Return its summary.

    Args:
        directory: Directory for the trace.
        launch_us: Duration of each step on the host.
        kernel_us: Mean kernel duration in each step.
        syncs: Steps that end with a synchronisation.
        factors: Duration of each kernel, relative to the mean.
    """
    events = []
    begin = done = 0.0
    for step, duration_us in enumerate(kernel_us):
        for number in range(4):
            correlation, launched = {"correlation": 4 * step + number + 1}, begin + number * launch_us / 5
            events.append(("cuda_runtime", "cudaLaunchKernel", 1, launched, 5.0, correlation))
            start = max(done, launched + 10.0)
            # The order of the kernels varies from step to step.
            name, done = f"gemm_{(number + step) % 4}", start + duration_us * factors[(number + step) % 4]
            on_device = correlation | {"device": 0, "stream": 7}
            events.append(("kernel", name, 7, start, done - start, on_device))
        end = begin + launch_us
        if step in syncs:
            events.append(("cuda_runtime", "cudaDeviceSynchronize", 1, end, max(10.0, done - end), {}))
            end = max(end + 10.0, done)
        events.append(("user_annotation", f"ProfilerStep#{step}", 1, begin, end - begin, {}))
        begin = end
    document = [
        {
            "ph": "X",
            "cat": kind,
            "name": name,
            "pid": int(kind != "kernel"),
            "tid": tid,
            "ts": ts,
            "dur": dur,
            "args": args,
        }
        for kind, name, tid, ts, dur, args in events
    ]
    directory.mkdir()
    (directory / "a.trace.json").write_text(json.dumps({"traceEvents": document}))
    return load(directory).summary


def test_a_slower_host_that_runs_ahead_of_its_device_is_no_slowdown(tmp_path: Path) -> None:
    steps = [750.0 + step % 3 for step in range(12)]
    before = gpu_run(tmp_path / "before", launch_us=1000, kernel_us=steps)
    after = gpu_run(tmp_path / "after", launch_us=2000, kernel_us=steps)
    role = role_diff(before, after)
    assert role.verdict(0.05) == "same"
    (step,) = role.iterations
    assert (step.before_us, step.after_us) == (pytest.approx(3000, rel=0.01), pytest.approx(3000, rel=0.01))


def test_the_step_in_which_the_host_waits_makes_no_difference(tmp_path: Path) -> None:
    """Depending on this step, the host runs ahead at the end of the recording, or not."""
    steps = [750.0 + step % 3 for step in range(36)]
    before = gpu_run(tmp_path / "before", launch_us=1000, kernel_us=steps, syncs=(11, 23, 35))
    after = gpu_run(tmp_path / "after", launch_us=1000, kernel_us=steps, syncs=(5, 17, 29))
    assert role_diff(before, after).verdict(0.05) == "same"
    assert role_diff(after, before).verdict(0.05) == "same"


def test_steps_are_incomparable_if_the_host_runs_ahead_in_one_run_and_the_device_is_slower(tmp_path: Path) -> None:
    steps = [750.0 + step % 3 for step in range(12)]
    before = gpu_run(tmp_path / "before", launch_us=1000, kernel_us=steps)
    after = gpu_run(tmp_path / "after", launch_us=1000, kernel_us=[1.3 * step for step in steps], syncs=(11,))
    role = role_diff(before, after)
    assert role.verdict(0.05) == "inconclusive"
    assert "the host runs ahead of the device in only some traces" in verdict_of(role)
    assert "mean until the device is done: 3.906 ms, before 3.005 ms" in verdict_of(role)


def test_kernels_that_did_not_become_slower_are_not_counted(tmp_path: Path) -> None:
    steps = [750.0 + step % 3 for step in range(12)]
    before = gpu_run(tmp_path / "before", launch_us=1000, kernel_us=steps)
    after = gpu_run(tmp_path / "after", launch_us=1000, kernel_us=steps, factors=(0.4, 1.2, 1.8, 2.4))
    assert "most of it: most kernels 1.50 times as long" in verdict_of(role_diff(before, after))


def test_kernels_that_all_became_slower_explain_a_change(tmp_path: Path) -> None:
    """The device is slower in most steps, so each kernel's median duration increases by a different factor."""
    before = gpu_run(tmp_path / "before", launch_us=1000, kernel_us=[750.0 + step % 3 for step in range(16)])
    slower = [(750.0 + step % 3) * (1.0 if step % 4 == 0 else 1.7) for step in range(16)]
    after = gpu_run(tmp_path / "after", launch_us=1000, kernel_us=slower)
    verdict = verdict_of(role_diff(before, after))
    assert "is slower" in verdict
    assert "most of it: all kernels 1.53 times as long, as with lower clocks or larger inputs, +1.577 ms." in verdict


# The speed of the machine.


def cpu_run(
    directory: Path, *, speed: float = 1.0, product: float = 1.0, new_us: float = 0.0, longest_view: float = 1.0
) -> RunSummary:
    """Write the trace of a CPU job and return its summary.

    Args:
        directory: Directory for the trace.
        speed: Factor for the duration of all operators.
        product: Additional factor for the duration of matrix products.
        new_us: Duration of each of four additional operators; 0 for none.
        longest_view: Additional factor for the duration of one view.
    """
    usual = [("aten::mm", 200.0 * product), *((f"aten::op{number}", 150.0) for number in range(4))]
    new = [(f"aten::new{number}", new_us) for number in range(4 if new_us else 0)]
    events, now = [], 0.0
    for step in range(12):
        begin = now
        view_us = 30.0 * (longest_view if step == 7 else 1.0)
        for name, duration_us in [*usual, *new, ("aten::t", 30.0), ("aten::view", view_us)]:
            # No two steps are equal.
            duration = duration_us * speed * (1 + 0.001 * (step % 5))
            events.append({"cat": "cpu_op", "name": name, "ts": now, "dur": duration})
            now += duration
        events.append({"cat": "user_annotation", "name": f"ProfilerStep#{step}", "ts": begin, "dur": now - begin})
    directory.mkdir()
    document = {"traceEvents": [event | {"ph": "X", "pid": 1, "tid": 1} for event in events]}
    (directory / "a.trace.json").write_text(json.dumps(document))
    return load(directory).summary


@pytest.mark.parametrize("speed", [0.8, 1.2])
def test_a_change_of_all_operators_may_be_the_speed_of_the_machine(tmp_path: Path, speed: float) -> None:
    role = role_diff(cpu_run(tmp_path / "before"), cpu_run(tmp_path / "after", speed=speed))
    assert role.verdict(0.05) == "inconclusive"
    reason = f"operators that only create views also take {speed:.2f} times as long"
    assert reason in verdict_of(role)
    assert role.undecided(0.05) == (
        f"{reason}, so the speed of the machine may have changed; record several captures of each run",
    )


@pytest.mark.parametrize(
    "changes",
    [
        {"product": 2.0},
        {"product": 3.0, "speed": 1.1},
        {"speed": 1.7},
        {"new_us": 80.0, "speed": 1.05},
        {"product": 1.4, "longest_view": 12.0},
    ],
    ids=["one operator", "mostly one operator", "large", "new operators", "one slow view"],
)
def test_a_change_with_another_cause_is_not_the_speed_of_the_machine(tmp_path: Path, changes: dict[str, float]) -> None:
    role = role_diff(cpu_run(tmp_path / "before"), cpu_run(tmp_path / "after", **changes))
    assert role.verdict(0.05) == "slower"
