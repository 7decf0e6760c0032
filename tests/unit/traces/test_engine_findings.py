"""Tests for engine and fleet findings, with generated server traces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import attrs
import pytest
from engine_job import WAIT, Batch, decode, write_fleet, write_server, write_trainer

from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.run_model import Finding
from profdeck_traces.findings.finding import with_findings
from profdeck_traces.inputs.host_load import HostLoad
from profdeck_traces.loading import summarise


def summary_of(run: Path) -> RunSummary:
    summary, errors = summarise([run])
    assert not errors
    return summary


def one_server(run: Path, batches: Sequence[Batch]) -> RunSummary:
    write_server(run, batches)
    return summary_of(run)


def finding_of(summary: RunSummary, rule: str) -> Finding:
    found = [finding for finding in summary.findings if finding.rule == rule]
    assert len(found) == 1, [finding.text for finding in summary.findings]
    return found[0]


def state_of(summary: RunSummary, cause: str) -> tuple[str, str | None]:
    state = next(state for state in summary.causes if state.cause == cause)
    return state.state, state.reason


LONG_PREFILL = [*decode(30, 50, 3), Batch(ms=1600, decodes=3, prefills=1, tokens=1800), *decode(10, 50, 4)]
DRAFTS = {"details": "_draft_12_rejected_9"}
QUEUED = "c=0 g=8 g_toks=8 waiting=20 kv={}"
RESUMED = Batch(ms=400, decodes=3, prefills=1, tokens=600, details="_resumed_1(500)")
TAIL = [*decode(40, 10, 32), *decode(40, 9, 3)]
TURNS = [*decode(10, 5, 1), Batch(ms=5, decodes=1, pause_ms=200), Batch(ms=8, prefills=1, tokens=30)] * 5

WAVE = [Batch(ms=20, prefills=8, tokens=64), *decode(15, 10, 8), *decode(20, 9, 1)]
SHARED_PREFIX = [Batch(ms=90, decodes=3, prefills=1, tokens=1200), *decode(1, 10, 4)] * 20

CASES = {
    "prefill-bound": (SHARED_PREFIX, LONG_PREFILL),
    "prefill-next-to-decode": (
        LONG_PREFILL,
        [*decode(30, 50, 3), Batch(ms=90, decodes=3, prefills=1, tokens=200), *decode(10, 50, 4)],
    ),
    "long-tail": (TAIL, [*decode(40, 10, 32), *decode(40, 9, 24)]),
    "preemption": ([*decode(20, 10, 4), RESUMED, *decode(20, 10, 4)], decode(40, 10, 4)),
    "host-between-iterations": (decode(30, 10, 4, pause_ms=3), decode(30, 10, 4, pause_ms=0.5)),
    "sampler": (decode(30, 10, operator="aten::sort"), decode(30, 10)),
    "rejected-speculation": (decode(30, 10, **DRAFTS), decode(30, 10, details="_draft_12_rejected_2")),
    "no-requests": (TURNS, decode(60, 5, 1)),
    "kv-pressure": (
        # The cache doesn't fill up until halfway through the recording.
        [
            *[Batch(ms=10, sglang="c=0 g=8 g_toks=8 waiting=0 kv=70") for _ in range(25)],
            *[Batch(ms=10, sglang=QUEUED.format(97)) for _ in range(20)],
        ],
        [Batch(ms=10, sglang="c=0 g=8 g_toks=8 waiting=0 kv=97") for _ in range(20)],
    ),
    "request-queue": (
        [Batch(ms=10, sglang=QUEUED.format(40)) for _ in range(20)],
        [Batch(ms=10, sglang="c=0 g=8 g_toks=8 waiting=0 kv=40") for _ in range(20)],
    ),
}


@pytest.mark.parametrize("cause", CASES)
def test_cause_is_found_only_where_it_is(tmp_path: Path, cause: str) -> None:
    planted, healthy = CASES[cause]
    found, clear = one_server(tmp_path / "planted", planted), one_server(tmp_path / "healthy", healthy)

    finding = finding_of(found, cause)
    assert finding.where.role == "rollout"
    assert finding.check is not None
    assert finding.gain_us is None or 0 < finding.gain_us <= (finding.step_us or 0)
    assert state_of(found, cause) == ("found", None)
    assert cause not in {finding.rule for finding in clear.findings}, [finding.text for finding in clear.findings]
    assert state_of(clear, cause)[0] in {"clear", "not_judged"}


def test_a_healthy_server_has_no_finding_about_its_engine(tmp_path: Path) -> None:
    prefill = Batch(ms=20, prefills=4, tokens=400)
    summary = one_server(tmp_path, [prefill, *decode(60, 10, 4)])
    assert [finding.text for finding in summary.findings if finding.gain_us] == []


def test_python_between_the_operators_of_an_engine_is_no_finding(tmp_path: Path) -> None:
    summary = one_server(tmp_path, decode(40, 10, 4, operator_share=0.4))
    assert summary.findings == ()
    reason = "host-between-iterations compares the iterations of engines"
    assert state_of(summary, "outside-operators") == ("not_judged", reason)


def test_an_engine_that_waits_for_requests_has_no_wait(tmp_path: Path) -> None:
    batches = [Batch(ms=10, prefills=1, tokens=9, pause_ms=8, awaits=True) for _ in range(20)]
    summary = one_server(tmp_path, batches)
    assert "waiting" not in {finding.rule for finding in summary.findings}
    assert state_of(summary, "waiting") == ("not_judged", "an engine waits for requests and clients")


def test_prefill_that_holds_decodes_is_described_with_its_cost(tmp_path: Path) -> None:
    finding = finding_of(one_server(tmp_path, LONG_PREFILL), "prefill-next-to-decode")

    assert finding.text == (
        "A prefill of 1,800 tokens next to 3 decodes held them for 1,600 ms instead of 50.2 ms, 43% of the time."
    )
    assert finding.do.startswith("lower --max-num-batched-tokens")
    assert finding.where.stage == "mixed"
    assert finding.check is not None
    assert finding.check.endswith("--iterations 30")


def test_prefill_batch_of_its_own_holds_the_running_requests(tmp_path: Path) -> None:
    decodes = [Batch(ms=50, sglang="c=0 g=3 g_toks=3 waiting=0 kv=10") for _ in range(30)]
    prefill = Batch(ms=1600, sglang="c=1 g=0 c_toks=1800 g_toks=0 resumed=0 resumed_toks=0 running=3 waiting=0 kv=20")
    finding = finding_of(one_server(tmp_path, [*decodes, prefill, *decodes]), "prefill-next-to-decode")

    assert finding.text.startswith("A prefill of 1,800 tokens next to 3 decodes held them for 1,600 ms instead of 50.")
    assert finding.do.startswith("lower --chunked-prefill-size")


@pytest.mark.parametrize(("limit", "rule"), [(8, "request-queue"), (32, "kv-pressure")])
def test_queue_below_the_limit_waits_for_the_kv_cache(tmp_path: Path, limit: int, rule: str) -> None:
    name = f"c=0 g=8 g_toks=8 waiting=20 kv=45 limit={limit}"
    summary = one_server(tmp_path, [Batch(ms=10, sglang=name) for _ in range(20)])
    assert {finding.rule for finding in summary.findings} & {"request-queue", "kv-pressure"} == {rule}


@pytest.mark.parametrize(("queued_ms", "other_ms", "is_found"), [(1, 200, False), (300, 1, True)])
def test_iterations_with_a_queue_count_by_their_duration(
    tmp_path: Path, queued_ms: float, other_ms: float, is_found: bool
) -> None:
    queued = Batch(ms=queued_ms, sglang="c=0 g=8 g_toks=8 waiting=8 kv=97")
    other = Batch(ms=other_ms, sglang="c=0 g=8 g_toks=8 waiting=0 kv=40")
    numbers = (10, 190) if is_found else (90, 30)
    summary = one_server(tmp_path, [*[queued] * numbers[0], *[other] * numbers[1]])
    assert ("kv-pressure" in {finding.rule for finding in summary.findings}) is is_found


def test_delay_that_also_happens_without_a_prefill_is_no_prefill(tmp_path: Path) -> None:
    late = [Batch(ms=900, decodes=5) for _ in range(6)]
    prefill = Batch(ms=800, decodes=5, prefills=1, tokens=24)
    summary = one_server(tmp_path, [*decode(20, 10, 5), *late, prefill, *decode(20, 10, 5)])
    assert "prefill-next-to-decode" not in {finding.rule for finding in summary.findings}


def test_tails_of_several_waves_are_counted(tmp_path: Path) -> None:
    finding = finding_of(one_server(tmp_path, WAVE * 3), "long-tail")
    assert finding.text.startswith("For 51% of the time (3 periods, 544 ms in all), only 1.0 of up to ")


def test_server_whose_load_rises_again_has_no_tail(tmp_path: Path) -> None:
    summary = one_server(tmp_path, [*decode(20, 10, 8), *decode(20, 9, 1), *decode(20, 10, 8)])
    assert "long-tail" not in {finding.rule for finding in summary.findings}


def test_pauses_on_a_busy_machine_are_not_judged(tmp_path: Path) -> None:
    summary = one_server(tmp_path, decode(30, 10, 4, pause_ms=3))
    load = HostLoad(wall_s=10, cpu_s=3, cpus=2, run_queue_s=5)
    (rank,) = summary.ranks
    busy = with_findings(attrs.evolve(summary, ranks=(attrs.evolve(rank, host_load=load),)))
    assert "host-between-iterations" not in {finding.rule for finding in busy.findings}
    assert state_of(busy, "host-between-iterations") == ("not_judged", "the machine was busy")


def test_numbers_that_names_do_not_state_are_not_judged(tmp_path: Path) -> None:
    summary = one_server(tmp_path, decode(30, 10))

    assert state_of(summary, "request-queue") == (
        "not_judged",
        "the iteration names do not contain the length of the queue",
    )
    assert state_of(summary, "kv-pressure") == (
        "not_judged",
        "the iteration names do not contain the usage of the KV cache",
    )
    assert state_of(summary, "preemption") == ("not_judged", "the iteration names contain no preempted requests")
    assert state_of(summary, "slow-server") == ("not_judged", "only one server was recorded")


# Fleets.


def test_each_server_has_a_row(tmp_path: Path) -> None:
    prefill = Batch(ms=20, prefills=4, tokens=400)
    run = write_fleet(tmp_path, [prefill, *decode(50, 10, 4)], [prefill, prefill, *decode(100, 10, 8)])

    first, second = summary_of(run).servers

    assert (first.label, first.replica, first.iterations, first.prefill_tokens) == ("rollout/0", 0, 51, 400)
    assert (second.label, second.replica, second.iterations, second.prefill_tokens) == ("rollout/1", 1, 102, 800)
    assert (first.batch_size, second.batch_size) == (4, 8)
    assert first.decode_p50_us == pytest.approx(10_080, rel=0.01)
    assert first.decode_p99_us == pytest.approx(10_110, rel=0.01)
    assert second.tokens_per_s == pytest.approx(8 * 100 / (100 * 0.01008 + 2 * 0.02005), rel=0.01)


def test_server_without_tokens_has_no_rate(tmp_path: Path) -> None:
    write_server(tmp_path, [Batch(ms=10, sglang="c=0 g=2 waiting=0") for _ in range(9)])
    (server,) = summary_of(tmp_path).servers
    assert (server.tokens_per_s, server.batch_size) == (None, 2)


@pytest.mark.parametrize(
    ("slow", "text"),
    [
        (
            decode(40, 14, 4),
            "Decode iterations on rollout/2 rank 0 take 14.1 ms, on the other servers 10.1 ms, with 4.0 requests",
        ),
        (decode(40, 14, 9), "with 9.0 requests per batch instead of 4.0"),
        (decode(40, 14, 4, operator="aten::slow_op"), "most of the difference is in operator aten::slow_op"),
    ],
    ids=["alone", "larger batches", "operator"],
)
def test_slow_server_is_named_with_the_difference(tmp_path: Path, slow: list[Batch], text: str) -> None:
    usual = decode(40, 10, 4)
    finding = finding_of(summary_of(write_fleet(tmp_path, usual, usual, slow, usual)), "slow-server")

    assert text in finding.text
    assert (finding.where.role, finding.where.replica) == ("rollout", 2)
    assert finding.gain_us == pytest.approx(4_000, rel=0.01)
    assert finding.check is not None
    assert finding.check.startswith("profdeck diff ")


def test_equal_servers_are_not_slow(tmp_path: Path) -> None:
    usual = decode(40, 10, 4)
    noisy = [attrs.evolve(batch, ms=batch.ms * (1.3 if number % 5 == 0 else 1)) for number, batch in enumerate(usual)]
    summary = summary_of(write_fleet(tmp_path, usual, noisy, usual))
    assert state_of(summary, "slow-server") == ("clear", None)
    assert state_of(summary, "uneven-servers") == ("clear", None)


def test_server_that_finishes_last_is_named(tmp_path: Path) -> None:
    usual = decode(40, 10, 4)
    finding = finding_of(summary_of(write_fleet(tmp_path, usual, decode(100, 10, 4), usual[:-1])), "uneven-servers")

    assert finding.text.startswith("rollout/1 rank 0 generates for 610 ms (61% of the time)")
    assert finding.where.replica == 1
    assert finding.time_us == pytest.approx(610_000, rel=0.01)


def test_servers_with_equal_windows_may_have_more_work(tmp_path: Path) -> None:
    summary = summary_of(write_fleet(tmp_path, decode(40, 10, 4), decode(40, 10.5, 4), decode(40, 16, 4)))
    assert "uneven-servers" not in {finding.rule for finding in summary.findings}


# Servers and other roles.


def rollouts_and_trainer(run: Path, batches: Sequence[Batch], *stages: tuple[str, float, bool]) -> RunSummary:
    write_server(run, batches, 0)
    write_trainer(run, stages)
    return summary_of(run)


def test_trainer_that_waits_for_rollouts_is_idle(tmp_path: Path) -> None:
    stages = ("generate_sequences", 600.0, False), ("actor_update", 400.0, True)
    summary = rollouts_and_trainer(tmp_path, decode(58, 10, 4), *stages)

    finding = finding_of(summary, "idle-trainer")
    assert finding.text == (
        "trainer rank 0 waits 585 ms of each step (58%) for rollout/0, mostly decode batch of 4 to 7, in "
        "generate_sequences."
    )
    assert finding.gain_us == pytest.approx(584_600, rel=0.01)
    assert state_of(summary, "idle-rollout") == ("clear", None)


def test_wait_of_an_idle_trainer_is_not_reported_a_second_time(tmp_path: Path) -> None:
    write_server(tmp_path, decode(58, 10, 4), 0)
    write_trainer(tmp_path, [("generate_sequences", 600.0, False), ("actor_update", 400.0, True)], stacks=WAIT)
    rules = {finding.rule for finding in summary_of(tmp_path).findings}
    assert "idle-trainer" in rules
    assert "waiting" not in rules


def test_rollout_that_waits_for_the_trainer_is_idle(tmp_path: Path) -> None:
    batches = [*decode(20, 10, 4), Batch(ms=10, decodes=4, pause_ms=700), Batch(ms=10, prefills=4, tokens=9)]
    stages = ("generate_sequences", 215.0, False), ("actor_update", 690.0, True)
    finding = finding_of(rollouts_and_trainer(tmp_path, batches, *stages), "idle-rollout")

    assert finding.text == (
        "rollout/0 runs no batch for 690 ms (75% of the time) while trainer works, mostly actor_update."
    )
    assert finding.where.stage == "actor_update"


def test_trainer_and_rollouts_that_overlap_are_not_idle(tmp_path: Path) -> None:
    summary = rollouts_and_trainer(tmp_path, decode(100, 10, 4), ("actor_update", 1000.0, True))
    states = [state_of(summary, cause) for cause in ("idle-trainer", "idle-rollout", "weight-sync")]
    assert states == [("clear", None)] * 3


def test_server_that_was_not_recorded_all_the_time_is_not_idle(tmp_path: Path) -> None:
    summary = rollouts_and_trainer(tmp_path, decode(10, 10, 4), ("actor_update", 1000.0, True))
    assert state_of(summary, "idle-rollout") == ("clear", None)


@pytest.mark.parametrize(
    ("name", "is_sync"),
    [("update_weights", True), ("sync_policy_to_rollout", True), ("weight-sync", True), ("update_policy", False)],
)
def test_weight_update_is_recognised_by_its_name(tmp_path: Path, name: str, is_sync: bool) -> None:
    batches = [*decode(20, 10, 4), Batch(ms=10, decodes=4, pause_ms=300), Batch(ms=10, prefills=4, tokens=9)]
    summary = rollouts_and_trainer(tmp_path, batches, ("generate", 212.0, False), (name, 297.0, True))
    texts = [finding.text for finding in summary.findings if finding.rule == "weight-sync"]
    assert texts == (
        [f"{name} takes 58% of each step (297 ms); rollout/0 waits 297 ms for it in the recording."] if is_sync else []
    )


def test_pauses_during_a_tool_call_are_named(tmp_path: Path) -> None:
    turn = *decode(10, 5, 1), Batch(ms=5, decodes=1, pause_ms=200), Batch(ms=8, prefills=1, tokens=30)
    stages = [("generate", 51.7, False), ("tool_call", 212.0, False)] * 5
    summary = rollouts_and_trainer(tmp_path, turn * 5, *stages)

    finding = finding_of(summary, "tool-call")
    assert finding.text.startswith(
        "The server has no requests for 76% of the time: 5 pauses of 200 ms on average, while"
    )
    assert "while trainer rank 0 is in tool_call" in finding.text
    assert "no-requests" not in {finding.rule for finding in summary.findings}


def test_unrelated_traces_are_separate_servers(tmp_path: Path) -> None:
    for name in ("one", "two"):
        run = write_fleet(tmp_path / name, decode(20, 10, 4))
        (trace,) = run.rglob("*.trace.json.gz")
        trace.rename(tmp_path / f"{name}.json.gz")
    summary, errors = summarise([tmp_path / "one.json.gz", tmp_path / "two.json.gz"])
    assert not errors
    assert [(server.label, server.iterations) for server in summary.servers] == [
        ("one.json.gz", 20),
        ("two.json.gz", 20),
    ]
    assert state_of(summary, "slow-server") == ("not_judged", "only one server was recorded")


def test_servers_that_end_together_are_even(tmp_path: Path) -> None:
    summary = summary_of(write_fleet(tmp_path, [Batch(ms=10, decodes=4)] * 40, [Batch(ms=20.05, decodes=4)] * 20))
    assert state_of(summary, "uneven-servers") == ("clear", None)


def test_iterations_without_duration_have_no_finding(tmp_path: Path) -> None:
    empty = [Batch(ms=0, decodes=4, pause_ms=0)] * 30
    summary = summary_of(write_fleet(tmp_path, empty, empty))
    assert [finding.text for finding in summary.findings if finding.gain_us] == []
