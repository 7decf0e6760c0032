from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
from hypothesis import given, strategies as st
from invented_summaries import STEP, run, trace
from real_traces import named

from gpu_job import GpuJob
from profdeck_traces.account.model import Account, OwnerTime
from profdeck_traces.account.table import MAX_OWNERS
from profdeck_traces.analysis.diff import diff_runs
from profdeck_traces.analysis.diff_model import AccountDiff, OwnerChange
from profdeck_traces.analysis.diff_text import verdict_of
from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.summary import summarise_trace


def account_of(
    times_ns: dict[str, int], *, steps: int = 1, basis: str = "global_step", border: str = "host"
) -> Account:
    total_ns = sum(times_ns.values())
    owners = tuple(
        OwnerTime(
            kind="operator",
            name=name,
            operator=name,
            module=None,
            annotation=None,
            line=None,
            count=1,
            time_us=time_ns / 1000,
            share=time_ns / total_ns,
        )
        for name, time_ns in times_ns.items()
    )
    return Account(basis=basis, border=border, steps=steps, time_us=total_ns / 1000, owners=owners, notes=())


def rank(number: int, account: Account | None) -> RankSummary:
    return trace({"k": [10.0] * 5}, group=STEP, path=f"rank{number}.json", rank=number, account=account)


def compared(before: Sequence[RankSummary], after: Sequence[RankSummary]) -> AccountDiff | None:
    (role,) = diff_runs(run(*before), run(*after)).roles
    return role.account


def owner(diff: AccountDiff, name: str) -> OwnerChange:
    (change,) = (change for change in diff.owners if change.name == name)
    return change


_ACCOUNTS = st.builds(
    lambda times, steps: account_of(times, steps=steps),
    st.dictionaries(st.sampled_from("abcdefgh"), st.integers(1, 10**13), min_size=1),
    st.integers(1, 1000),
)


@given(st.lists(st.tuples(_ACCOUNTS, _ACCOUNTS), min_size=1, max_size=4))
def test_differences_of_owners_add_up_to_the_change_of_the_step(ranks: list[tuple[Account, Account]]) -> None:
    diff = compared(
        [rank(number, before) for number, (before, _) in enumerate(ranks)],
        [rank(number, after) for number, (_, after) in enumerate(ranks)],
    )
    assert diff is not None
    assert sum(change.before_ns for change in diff.owners) == diff.step_before_ns
    assert sum(change.after_ns for change in diff.owners) == diff.step_after_ns
    assert sum(change.delta_ns for change in diff.owners) == diff.step_delta_ns
    assert diff.step_delta_ns == diff.step_after_ns - diff.step_before_ns
    mean_us = sum(before.time_us / before.steps for before, _ in ranks) / len(ranks)
    assert abs(diff.step_before_ns - 1000 * mean_us) < 1 + 1e-6 * diff.step_before_ns


def test_times_are_per_step_and_means_of_ranks() -> None:
    before = [rank(0, account_of({"a": 4000, "b": 2000}, steps=2)), rank(1, account_of({"a": 6000}, steps=1))]
    after = [rank(0, account_of({"a": 4000}, steps=1)), rank(1, account_of({"a": 6000, "c": 10}, steps=1))]
    diff = compared(before, after)
    assert diff is not None
    assert (owner(diff, "a").before_ns, owner(diff, "a").after_ns) == (4000, 5000)
    assert (owner(diff, "b").delta_ns, owner(diff, "c").delta_ns) == (-500, 5)
    assert (diff.step_before_ns, diff.step_after_ns, diff.step_delta_ns) == (4500, 5005, 505)


def test_runs_with_and_without_stacks_have_no_verdict() -> None:
    before, after = account_of({"a": 1000}), attrs.evolve(account_of({"b": 9000}), has_stacks=True)
    (role,) = diff_runs(run(rank(0, before)), run(rank(0, after))).roles
    assert (role.verdict(), role.account) == ("inconclusive", None)
    assert " is inconclusive, because only the run after has Python stacks" in verdict_of(role)


def test_accounts_of_different_kinds_of_steps_are_not_subtracted() -> None:
    assert compared([rank(0, account_of({"a": 1}))], [rank(0, account_of({"a": 1}, basis="recording"))]) is None
    assert compared([rank(0, account_of({"a": 1}))], [rank(0, None)]) is None


def test_owners_beyond_the_limit_of_an_account_do_not_appear_or_vanish() -> None:
    names = {f"operator{number}": 1_000 + number for number in range(MAX_OWNERS)}
    diff = compared([rank(0, account_of(names | {"large": 10**6}))], [rank(0, account_of(names | {"small": 900}))])
    assert diff is not None
    assert [change.name for change in diff.owners if change.delta_ns] == ["large", None]
    assert (diff.owners[0].delta_ns, diff.owners[1].delta_ns, diff.step_delta_ns) == (-(10**6), 900, 900 - 10**6)


@pytest.mark.shared_data
def test_differences_of_real_traces_add_up() -> None:
    names = (f"public/tl__traces__{device}__Qwen_Qwen1.5-0.5B-Chat__1016005.json.gz" for device in ("h100", "mi300"))
    before, after = (attrs.evolve(summarise_trace(named(name)), role="trainer", rank=0) for name in names)
    diff = compared([before], [after])
    assert diff is not None
    assert before.account is not None
    assert before.account.steps == 1
    assert diff.step_before_ns == round(before.account.time_us * 1000)
    assert sum(change.delta_ns for change in diff.owners) == diff.step_delta_ns != 0


def test_reason_names_the_owner_and_its_line() -> None:
    def job(number: int, factor: float, steps: int) -> RankSummary:
        account = account_of({"aten::mm": 30_000_000 * steps, "aten::copy_": int(5e6 * factor) * steps}, steps=steps)
        owners = tuple(attrs.evolve(owner, line=f"train.py(3): {owner.name[6:]}") for owner in account.owners)
        step_us = 30_000 + 5_000 * factor
        times = [step_us + place for place in range(steps)]
        return trace(
            steps=times,
            path=f"rank{number}.json",
            rank=number,
            account=attrs.evolve(account, owners=owners),
        )

    def sentence(factors: Sequence[float], steps: int = 8) -> str:
        (role,) = diff_runs(
            run(*(job(number, 1, 6) for number in range(len(factors)))),
            run(*(job(number, factor, steps) for number, factor in enumerate(factors))),
        ).roles
        return verdict_of(role)

    for ranks in (1, 3):
        assert "; most of it: aten::copy_ in copy_ (train.py:3) +35.000 ms." in sentence([8] * ranks, steps=13)
    # The mean over 40 ranks changes by 2 %. The reason comes from the slow rank's account.
    text = sentence([1] * 39 + [8], steps=13)
    assert text.startswith("trainer is slower on 1 of 40 ranks: the median global step of rank 39 takes 70.01 ms")
    assert text.endswith("; most of it: aten::copy_ in copy_ (train.py:3) +35.000 ms.")


def changed_steps(changes: Sequence[OwnerTime], ranks: int = 1) -> str:
    """Return the verdict on steps that take longer by the sum of some owners' times, in microseconds per step."""

    def job(owners: Sequence[OwnerTime], number: int) -> RankSummary:
        base = account_of({"aten::mm": 30_000_000}, steps=1)
        account = attrs.evolve(base, owners=(*base.owners, *owners))
        step_us = 30_000 + sum(owner.time_us for owner in owners)
        times = [step_us + place for place in range(8)]
        return trace(steps=times, path=f"rank{number}.json", rank=number, account=account)

    (role,) = diff_runs(
        run(*(job((), number) for number in range(ranks))), run(*(job(changes, number) for number in range(ranks)))
    ).roles
    return verdict_of(role)


@pytest.mark.parametrize("ranks", [1, 2])
def test_reason_sums_the_events_of_a_line(ranks: int) -> None:
    template = account_of({"aten::copy_": 1_000_000}, steps=1).owners[0]
    copies = [
        attrs.evolve(template, name=f"aten::op{number}", line="train.py(9): update", time_us=1_000.0)
        for number in range(10)
    ]
    assert changed_steps(copies, ranks).endswith("; most of it: update (train.py:9) +10.000 ms.")


def test_reason_names_a_function_rather_than_the_largest_of_its_events() -> None:
    template = account_of({"aten::copy_": 1_000_000}, steps=1).owners[0]
    line = "train.py(9): update"
    owners = [
        attrs.evolve(template, kind="python", name="<built-in method findall>", line=line, time_us=6_000.0),
        attrs.evolve(template, kind="python", name=line, line=line, time_us=3_500.0),
        attrs.evolve(template, name="aten::mm", line="train.py(20): main", time_us=500.0),
    ]
    assert changed_steps(owners, 1).endswith("; most of it: update (train.py:9) +9.500 ms.")
    owners[1] = attrs.evolve(owners[1], line="train.py(20): main")
    expected = "; most of it: <built-in method findall> in update (train.py:9) +6.000 ms; other owners: +4.000 ms."
    assert changed_steps(owners, 1).endswith(expected)


def test_reason_does_not_hide_larger_changes_that_cancel() -> None:
    template = account_of({"aten::copy_": 1_000_000}, steps=1).owners[0]
    owners = [
        attrs.evolve(template, name=f"aten::{name}", line=f"train.py({line}): {name}", time_us=time_us)
        for line, (name, time_us) in enumerate([("a", 5_000.0), ("b", -4_900.0), ("c", 400.0)], 1)
    ]
    text = changed_steps(owners, 1)
    assert "operator in a (train.py:1) +5.000 ms" in text
    assert "most of it" not in text


@pytest.mark.parametrize("ranks", [1, 2])
def test_reason_sums_the_waits_for_a_rank(ranks: int) -> None:
    template = account_of({"aten::copy_": 1_000_000}, steps=1).owners[0]
    waits = [
        attrs.evolve(
            template,
            kind="wait for rank",
            rank=1,
            awaited="operator",
            name=name,
            line=f"a.py({name}): f",
            time_us=2_000.0,
        )
        for name in "abcdef"
    ]
    small = attrs.evolve(template, name="aten::item", line="a.py(5): g", time_us=3_000.0)
    text = changed_steps([*waits, small], ranks)
    assert text.endswith("; most of it: all waits for rank 1 +12.000 ms, operator in g (a.py:5) +3.000 ms.")


def test_reason_names_the_cause_rather_than_one_of_its_functions() -> None:
    """The table has one row for the events of a checkpoint, so the reason has their sum."""
    template = account_of({"aten::copy_": 1_000_000}, steps=1).owners[0]
    line = "sync.py(8): publish"
    checkpoint = [
        attrs.evolve(template, kind="checkpoint", name=name, line=line, time_us=time_us)
        for name, time_us in (("load", 5_100.0), ("save", 4_000.0))
    ]
    other = attrs.evolve(template, name="aten::mm", line="train.py(20): main", time_us=900.0)
    assert changed_steps([*checkpoint, other]).endswith("; most of it: checkpoint in publish (sync.py:8) +9.100 ms.")


def test_reason_is_only_called_most_of_a_change_if_it_is_half_of_the_stated_one() -> None:
    """The account divides the change of the mean, 10 ms. The sentence starts with the change of the median, 12 ms."""

    def job(copy_us: float, mm_us: float, times: list[float]) -> RankSummary:
        account = account_of({"aten::copy_": int(copy_us * 1000) + 1, "aten::mm": int(mm_us * 1000)}, steps=1)
        owners = tuple(attrs.evolve(owner, line=f"train.py(3): {owner.name[6:]}") for owner in account.owners)
        return trace(steps=times, path="rank0.json", rank=0, account=attrs.evolve(account, owners=owners))

    after = [42_000.0 + place for place in range(6)] + [34_000.0, 34_001.0]
    (role,) = diff_runs(
        run(job(0, 30_000, [30_000.0 + place for place in range(8)])), run(job(5_500, 34_500, after))
    ).roles
    text = verdict_of(role)
    assert "aten::copy_" not in text
    assert "operator in copy_ (train.py:3) +5.500 ms" in text
    assert "most of it" not in text


def test_account_of_a_rank_lists_few_owners_that_add_up() -> None:
    times = {f"operator{number}": 1000 + number for number in range(60)}
    ranks = [rank(number, account_of(times)) for number in range(2)]
    slower = [rank(number, account_of({name: 2 * time for name, time in times.items()})) for number in range(2)]
    (role,) = diff_runs(run(*ranks), run(*slower)).roles
    account = role.ranks[1].account
    assert account is not None
    assert len(account.owners) == 21
    assert sum(change.delta_ns for change in account.owners) == account.step_delta_ns == sum(times.values())


def test_border_rules_of_both_sides_are_kept() -> None:
    diff = compared([rank(0, account_of({"a": 1}))], [rank(0, account_of({"a": 1}, border="device"))])
    assert diff is not None
    assert (diff.borders_before, diff.borders_after) == (("host",), ("device",))


def test_a_slower_loader_owns_the_change_of_the_step(tmp_path: Path) -> None:
    jobs = {name: GpuJob(load_us=load_us).write(tmp_path / name) for name, load_us in (("a", 30), ("b", 1030))}
    before, after = ([summarise_trace(job / "rank0.trace.json.gz")] for job in jobs.values())
    diff = compared(before, after)
    assert diff is not None
    assert diff.step_delta_ns == 1_000_000
    assert (diff.owners[0].kind, diff.owners[0].delta_ns) == ("data loading", 1_000_000)
