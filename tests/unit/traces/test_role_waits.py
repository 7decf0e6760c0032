"""Tests for waits between trainers and servers, which are assigned to what the other role did meanwhile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
from engine_job import Batch, decode, write_server, write_trainer
from hypothesis import given, settings, strategies as st
from simulated_roles import Label, simulate, waits_of_server, waits_of_trainer, write

from profdeck_traces.account.model import Account
from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.run_summary import summarise_run
from profdeck_traces.inputs.sources import find_sources


def summary_of(run: Path) -> RunSummary:
    summary, errors = summarise_run(find_sources([run]))
    assert not errors
    return summary


def account(run: RunSummary, role: str, replica: int | None = None) -> Account:
    (found,) = (rank.account for rank in run.ranks if (rank.role, rank.replica) == (role, replica))
    assert found is not None
    return found


def waits_us(found: Account) -> Counter[Label]:
    waits: Counter[Label] = Counter()
    for owner in found.owners:
        if owner.kind == "wait for role":
            assert owner.peer is not None
            waits[owner.peer, " ".join(filter(None, [owner.awaited, owner.name]))] += round(owner.time_us)
    return waits


@given(seed=st.integers(0, 10**6), servers=st.integers(1, 3))
@settings(max_examples=25, deadline=None)
def test_waits_are_assigned_like_in_a_brute_force_simulation(
    tmp_path_factory: pytest.TempPathFactory, seed: int, servers: int
) -> None:
    roles = simulate(seed, servers=servers)
    run = summary_of(write(roles, tmp_path_factory.mktemp("job")))

    found = account(run, "trainer")
    duration_ms = roles.trainer[-1].end - roles.trainer[0].begin
    assert sum(round(owner.time_us * 1000) for owner in found.owners) == duration_ms * 10**6
    assert waits_us(found) == Counter({label: 1000 * ms for label, ms in waits_of_trainer(roles).items()})
    for replica, bursts in enumerate(roles.servers):
        if bursts:
            found = account(run, "rollout", replica)
            duration_ms = bursts[-1].end - bursts[0].begin
            assert sum(round(owner.time_us * 1000) for owner in found.owners) == duration_ms * 10**6
            assert waits_us(found) == Counter(
                {label: 1000 * ms for label, ms in waits_of_server(roles, replica).items()}
            )
