"""Tests of target discovery, replica numbers and samples."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from profdeck import Profiler, Status
from profdeck.base.errors import CaptureError, TargetError, target_error
from profdeck.base.outcome import Outcome
from profdeck.config.structuring import structure
from profdeck.config.targets import Policy, SampleBy, TargetsConfig, WorkerType
from profdeck.engine.clusters import Actor
from profdeck.records.manifest import Manifest
from profdeck.records.request import BatchKind
from profdeck.replicas.discovery import ReplicaNumbers, Target, discover, select_sample
from profdeck.replicas.worker_kinds import select_kinds
from profdeck_traces.base.errors import ConfigError
from simulated_servers import Act, SimulatedServer, simulated_servers

A, B, C = (f"http://10.0.0.{number}:8000" for number in (2, 9, 10))
VLLM_WORKER = {"model_id": "m", "load": 0, "connection_mode": "Http", "priority": 50, "cost": 1.0}
"""Additional fields in responses of vllm-router 0.1.17 and sglang-router 0.3.2."""


TOML = f"""
[[targets]]
url = "{A}"
[[targets]]
url = "{B}"
replica = 0
worker_type = "decode"
[[targets]]
url = "{C}"
"""


def worker_entry(url: str, worker_type: str = "regular", *, is_healthy: bool = True) -> dict[str, Any]:
    return VLLM_WORKER | {"url": url, "worker_type": worker_type, "is_healthy": is_healthy}


def router_response(*workers: dict[str, Any]) -> Act:
    return Act(content=json.dumps({"workers": workers, "total": len(workers), "stats": {}}).encode())


async def reject_actor(_: Actor) -> bool:
    raise AssertionError("the config has no actors")


def discover_targets(numbers: ReplicaNumbers | None = None, **config: Any) -> list[Target]:
    targets_config = structure(config, TargetsConfig, where="targets")
    return asyncio.run(discover(targets_config, numbers or ReplicaNumbers(), reject_actor))[0]


def handles_by_replica(targets: list[Target]) -> dict[int, object]:
    return {target.replica: target.handle for target in targets}


def run_with_router(check: Callable[[SimulatedServer], Awaitable[None]], act: Act) -> None:
    async def main() -> None:
        async with SimulatedServer() as router:
            router.acts["workers"] = [act]
            await check(router)

    asyncio.run(main())


def discover_from_router(act: Act, numbers: ReplicaNumbers | None = None, **config: Any) -> list[Target]:
    targets = []

    async def check(router: SimulatedServer) -> None:
        targets_config = structure({"router": router.url, **config}, TargetsConfig, where="targets")
        targets.extend((await discover(targets_config, numbers or ReplicaNumbers(), reject_actor))[0])

    run_with_router(check, act)
    return targets


# URLs and files.


def test_servers_are_numbered_in_natural_sort_order() -> None:
    assert handles_by_replica(discover_targets(urls=[C, A, f"{B}/"])) == {0: A, 1: B, 2: C}
    assert handles_by_replica(discover_targets(urls=[A, f"{A}/", A])) == {0: A}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("targets.yaml", f"- {A}\n- {{url: {B}/, replica: 0, worker_type: decode}}\n- {{url: {C}}}\n"),
        ("targets.yml", f"targets:\n- {A}\n- {{url: {B}, replica: 0, worker_type: decode}}\n- {C}\n"),
        ("targets.toml", TOML),
    ],
)
def test_targets_file(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    targets = discover_targets(file=str(tmp_path / name))
    assert handles_by_replica(targets) == {0: B, 1: A, 2: C}
    assert [target.worker_type for target in targets] == ["decode", None, None]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1", "expected a list of URLs, or of mappings with url, replica and worker_type"),
        ("", "expected a list of URLs"),
        ("[3]", r"targets\[0\]: expected a mapping of keys to values, got 3"),
        ("[{replica: 1}]", r"targets\[0\].url: this key is required"),
        ("[{url: 'http://a', replicas: 1}]", "unknown key 'replicas'. Did you mean 'replica'?"),
        ("[{url: 'http://a', replica: -1}]", "replica: expected 0 or greater, got -1"),
        ("[{url: 'http://a', worker_type: x}]", "expected one of regular, prefill, decode"),
        (
            "[{url: 'http://a', replica: 1}, {url: 'http://a', replica: 2}]",
            "http://a is listed with two replica numbers, 1 and 2",
        ),
        (
            "[{url: 'http://a', replica: 1}, {url: 'http://b', replica: 1}]",
            "http://a and http://b both have the replica number 1",
        ),
        ("[", "not valid YAML"),
    ],
)
def test_invalid_targets_file(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "targets.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message.replace("?", r"\?")):
        discover_targets(file=str(tmp_path / "targets.yaml"))


def test_selection_by_type_and_replica() -> None:
    assert handles_by_replica(discover_targets(urls=[A, B, C], replicas=[2, 0, 7])) == {0: A, 2: C}
    with pytest.raises(CaptureError, match=r"no target \(1 found, but not selected by .*\)\. Searched: http"):
        discover_targets(urls=[A], replicas=[1])
    with pytest.raises(CaptureError, match="but not selected"):
        discover_targets(urls=[A], worker_types=["decode"])
    assert handles_by_replica(discover_targets(urls=[A], worker_types=["regular"])) == {0: A}


def test_numbers_are_stable() -> None:
    numbers = ReplicaNumbers()
    assert handles_by_replica(discover_targets(numbers, urls=[B, C])) == {0: B, 1: C}
    assert handles_by_replica(discover_targets(numbers, urls=[A, C])) == {1: C, 2: A}
    assert handles_by_replica(discover_targets(numbers, urls=[A, B, C])) == {0: B, 1: C, 2: A}


def test_number_in_the_file_is_reserved(tmp_path: Path) -> None:
    numbers, file = ReplicaNumbers(), tmp_path / "targets.yaml"
    file.write_text(f"[{{url: '{C}', replica: 0}}, '{A}']")
    assert handles_by_replica(discover_targets(numbers, file=str(file))) == {0: C, 1: A}
    file.write_text(f"['{C}', '{A}', '{B}']")
    assert handles_by_replica(discover_targets(numbers, file=str(file))) == {0: C, 1: A, 2: B}
    file.write_text(f"[{{url: '{A}', replica: 2}}, '{B}']")
    with pytest.raises(ConfigError, match="both have the replica number 2. Replica numbers must be unique"):
        discover_targets(numbers, file=str(file))


# Routers.


def test_workers_of_a_router() -> None:
    act = router_response(
        worker_entry(C, "prefill"), worker_entry(f"{A}/", "decode", is_healthy=False), worker_entry(B, "encode")
    )
    targets = discover_from_router(act)
    assert handles_by_replica(targets) == {0: A, 1: B, 2: C}
    assert [target.worker_type for target in targets] == ["decode", None, "prefill"]
    assert [target.healthy for target in targets] == [False, True, True]
    assert handles_by_replica(discover_from_router(act, worker_types=["decode", "prefill"])) == {0: A, 2: C}
    assert handles_by_replica(discover_from_router(act, worker_types=["regular"])) == {1: B}  # the kind of B is unknown


def test_sample_contains_each_model() -> None:
    models = {A: "small", B: "large", C: "large"}
    act = router_response(*(worker_entry(url) | {"model_id": model} for url, model in models.items()))
    selected, notes = select_sample(discover_from_router(act), 1)
    assert [(target.handle, target.model) for target in selected] == [(A, "small"), (B, "large")]
    assert notes == ["Selected 2 of 3 targets, because sample is 1."]


def test_sample_by_load() -> None:
    loads = {f"{A}@0": 3, f"{A}@1": 4, B: 5, C: -1}
    targets = discover_from_router(
        router_response(*(worker_entry(url) | {"load": load} for url, load in loads.items()))
    )
    assert [target.load for target in targets] == [7, 5, None]
    for count, expected in ((1, [A]), (2, [A, B])):
        sample, notes = select_sample(targets, count, SampleBy.LOAD)
        assert [target.handle for target in sample] == expected
        assert notes == [f"Selected {count} of 3 targets, because sample is {count}."]


@pytest.mark.parametrize("load", [{}, {"load": None}, {"load": -1}, {"load": 0}])
def test_sample_by_load_without_loads_is_evenly_spaced(load: dict[str, Any]) -> None:
    fields = {key: value for key, value in VLLM_WORKER.items() if key != "load"}
    act = router_response(
        *(fields | {"url": f"http://10.0.0.1:{port}", "is_healthy": True} | load for port in range(8000, 8004))
    )
    selected, notes = select_sample(discover_from_router(act), 2, SampleBy.LOAD)
    assert [target.replica for target in selected] == [0, 2]
    (note,) = notes[1:]
    assert note.startswith("The targets were selected by replica number, because the router reports no requests")


# Prefill and decode workers.

PREFILL, DECODE, MIXED = BatchKind.PREFILL, BatchKind.DECODE, BatchKind.MIXED


@pytest.mark.parametrize(
    ("kinds", "expected"),
    [
        ((), {A: None, B: None, C: None}),
        ((PREFILL,), {A: (PREFILL,), C: None}),
        ((DECODE, PREFILL), {A: (PREFILL,), B: (DECODE,), C: None}),
        ((MIXED, DECODE), {B: (DECODE,), C: None}),
    ],
)
def test_batch_kinds_are_selected_by_worker_type(
    kinds: tuple[BatchKind, ...], expected: dict[str, tuple[BatchKind, ...] | None]
) -> None:
    targets = discover_from_router(
        router_response(worker_entry(A, "prefill"), worker_entry(B, "decode"), worker_entry(C))
    )
    selected, notes = select_kinds(targets, kinds)
    assert {target.handle: target.batch_kinds for target in selected} == expected  # None: use the role's batch kinds
    assert len(notes) == len(targets) - len(selected)


def test_excluded_workers_are_reported() -> None:
    targets = discover_from_router(
        router_response(worker_entry(A, "prefill"), worker_entry(B, "decode"), worker_entry(C, "prefill"))
    )
    (note,) = select_kinds(targets, [DECODE])[1]
    assert note == "Excluded 2 of 3 targets: prefill workers have no decode batches."
    with pytest.raises(CaptureError, match="No target has batches of these kinds. Excluded "):
        select_kinds(targets[::2], [DECODE, MIXED])


def test_data_parallel_ranks_are_one_target() -> None:
    act = router_response(
        *(worker_entry(f"{A}@{rank}", is_healthy=rank == 1) for rank in range(4)),
        worker_entry(f"{B}@0", is_healthy=False),
    )
    targets = discover_from_router(act)
    assert handles_by_replica(targets) == {0: A, 1: B}
    assert [target.healthy for target in targets] == [True, False]


def test_config_and_router_are_merged(tmp_path: Path) -> None:
    (tmp_path / "targets.yaml").write_text(f"[{{url: '{A}', replica: 7}}, {{url: '{B}', worker_type: decode}}]")
    act = router_response(worker_entry(A, "prefill", is_healthy=False), worker_entry(B, "prefill"))
    targets = discover_from_router(act, file=str(tmp_path / "targets.yaml"), urls=[C])
    assert [(target.replica, target.handle, target.worker_type, target.healthy) for target in targets] == [
        (0, B, "decode", True),
        (1, C, None, True),
        (7, A, "prefill", False),
    ]


def test_token_is_sent_only_to_trusted_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    loopback, by_name = "http://localhost:8000", "http://Trainer-3.Cluster.local:8000"
    act = router_response(*map(worker_entry, (A, B, loopback, by_name, "http://[fd00::7]:8000", "no URL")))

    def list_refused(**config: Any) -> list[object]:
        return [target.handle for target in discover_from_router(act, **config) if target.problem is not None]

    assert list_refused() == []  # no token is set
    monkeypatch.setenv("PROFDECK_TOKEN", "secret")
    assert set(list_refused()) == {A, B, by_name, "http://[fd00::7]:8000", "no URL"}
    assert set(list_refused(urls=["http://10.0.0.2:9999"])) == {B, by_name, "http://[fd00::7]:8000", "no URL"}
    assert set(list_refused(worker_hosts=["10.0.0.9", "*.cluster.LOCAL", "fd00::/16"])) == {A, "no URL"}
    assert set(list_refused(worker_hosts=["10.0.0.0/28", "*:*"])) == {by_name, "no URL"}
    socket_response = router_response(worker_entry("unix:/run/docker.sock"))
    (target,) = discover_from_router(socket_response, worker_hosts=["*"])
    assert "only the router lists this socket, so profdeck does not connect to it. If you trust this socket" in str(
        target.problem
    )
    (target,) = discover_from_router(socket_response, urls=["unix:/run/docker.sock"])
    assert target.problem is None
    (target,) = discover_from_router(router_response(worker_entry(A)))
    assert isinstance(target.problem, TargetError)
    assert "only the router lists this" in str(target.problem)
    assert "worker_hosts: [10.0.0.2]" in str(target.problem)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"worker_hosts": ["http://gpu7"], "router": A}, "'http://gpu7' is not a host or network, such as gpu7"),
        ({"worker_hosts": ["10.0.0.0/99"], "router": A}, "'10.0.0.0/99' is not a host or network"),
        ({"worker_hosts": ["gpu7"], "urls": [A]}, "set router as well"),
    ],
)
def test_invalid_worker_hosts(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        structure(config, TargetsConfig, where="targets")


def test_router_receives_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFDECK_TOKEN", "server-token")

    async def check(router: SimulatedServer) -> None:
        for variable in ("PROFDECK_ROUTER_KEY", "KEY_OF_ANOTHER_ROUTER"):
            config = TargetsConfig(router=router.url, router_key_variable=variable)
            await discover(config, ReplicaNumbers(), reject_actor)
            monkeypatch.setenv(variable, f"key in {variable}")
            await discover(config, ReplicaNumbers(), reject_actor)
        assert [arrival.headers.get("authorization") for arrival in router.arrivals] == [
            None,
            "Bearer key in PROFDECK_ROUTER_KEY",
            None,
            "Bearer key in KEY_OF_ANOTHER_ROUTER",
        ]
        await router.disconnected.wait()

    run_with_router(check, router_response(worker_entry(A)))


@pytest.mark.parametrize(
    ("act", "message", "outcome"),
    [
        (Act(status=503), "replied to /workers with 503. Check its log.", Outcome.REFUSED),
        (
            Act(status=401),
            "replied to /workers with 401. Set the environment variable in router_key_variable",
            Outcome.REFUSED,
        ),
        (Act(content=b"<html>"), "replied to /workers with an unknown format", Outcome.NOT_ENABLED),
        (Act(content=b'{"workers": [{}]}'), "replied to /workers with an unknown format: .*`url`", Outcome.NOT_ENABLED),
        (Act(content=b"[]"), "replied to /workers with an unknown format", Outcome.NOT_ENABLED),
        (Act(raw=b"", close=True), "cannot be reached", Outcome.UNREACHABLE),
    ],
)
def test_invalid_router_responses(act: Act, message: str, outcome: Outcome) -> None:
    with pytest.raises(CaptureError, match=message) as caught:
        discover_from_router(act)
    assert target_error(caught.value).outcome is outcome


def test_router_without_workers() -> None:
    with pytest.raises(CaptureError, match=r"no target \(none found\)\. Searched: http://127"):
        discover_from_router(router_response())


# Captures.


def test_workers_that_leave_and_return_keep_their_numbers(
    build_profiler: Callable[..., Profiler], load_manifest: Callable[..., Manifest], settings: dict[str, Any]
) -> None:
    async def main() -> None:
        async with simulated_servers(4) as (router, *servers):
            first, second, third = servers
            router.acts["workers"] = [
                router_response(
                    worker_entry(first.url), worker_entry(second.url), worker_entry("grpc://10.0.0.1:30000")
                ),
                router_response(
                    worker_entry(third.url), worker_entry(second.url), worker_entry(first.url, is_healthy=False)
                ),
            ]
            profiler = build_profiler(None, {"on_error": "warn"}, router=router.url)
            for step in range(5):
                async with profiler.capture(step):
                    pass
            assert router.commands() == ["workers"] * 2
            assert [server.commands() for server in servers] == [
                ["status", "start", "stop"],
                ["status", "start", "stop"] * 2,
                ["status", "start", "stop"],
            ]
            urls = [server.url for server in servers]
        by_name = [{record.name: record for record in load_manifest(step).targets} for step in (1, 3)]
        assert by_name[0][urls[1]].replica == by_name[1][urls[1]].replica
        assert by_name[0][urls[0]].replica == by_name[1][urls[0]].replica
        invalid = by_name[0]["grpc://10.0.0.1:30000"]
        assert (invalid.outcome, invalid.capture) == (Outcome.REFUSED, None)
        assert "'grpc://10.0.0.1:30000' is not a valid server URL" in str(invalid.reason)
        unhealthy = by_name[1][urls[0]]
        assert (unhealthy.outcome, unhealthy.capture, unhealthy.reason) == (
            Outcome.UNREACHABLE,
            None,
            "The router reports that this worker is unhealthy, so it was not contacted.",
        )
        assert by_name[1][urls[2]].outcome is Outcome.FLUSHED

    asyncio.run(main())


@pytest.mark.parametrize("policy", [Policy.ANY, Policy.ALL])
def test_no_target_starts_if_the_router_is_down(
    build_profiler: Callable[..., Profiler], load_manifest: Callable[..., Manifest], policy: Policy
) -> None:
    async def check(router: SimulatedServer) -> None:
        profiler = build_profiler(None, {"on_error": "warn"}, router=router.url, policy=policy.value)
        async with profiler.capture(1) as capture:
            assert capture is None  # the job continues
        router.acts["workers"] = [router_response(worker_entry(router.url))]
        async with profiler.capture(3) as capture:
            assert capture is not None

    run_with_router(check, Act(status=503))
    assert load_manifest().status is Status.FAILED
    assert "replied to /workers with 503" in load_manifest().problems[0]
    assert (load_manifest().policy, load_manifest().targets) == (policy, ())
    assert load_manifest(3).status is Status.COMPLETE


target_lists = st.lists(st.tuples(st.none() | st.sampled_from(WorkerType), st.booleans()), max_size=40).map(
    lambda kinds: [
        Target(handle=f"http://{number}", replica=number, worker_type=kind, healthy=healthy)
        for number, (kind, healthy) in enumerate(kinds)
    ]
)


@given(targets=target_lists, count=st.integers(1, 50))
def test_sample_contains_each_worker_type(targets: list[Target], count: int) -> None:
    sample, notes = select_sample(targets, count)
    assert bool(notes) == (len(sample) < len(targets))
    assert [target.replica for target in sample] == sorted({target.replica for target in sample})
    for worker_type in WorkerType:
        candidates = [target for target in targets if (target.worker_type or WorkerType.REGULAR) is worker_type]
        selected = [target for target in sample if target in candidates]
        healthy = sum(target.healthy for target in candidates)
        assert len(selected) == min(count, len(candidates))
        assert sum(target.healthy for target in selected) == min(len(selected), healthy)


def test_sample_is_evenly_spaced_and_stable() -> None:
    targets = [Target(handle=f"http://{number}", replica=number) for number in range(64)]
    sample, notes = select_sample(targets, 4)
    assert [target.replica for target in sample] == [0, 16, 32, 48]
    assert notes == ["Selected 4 of 64 targets, because sample is 4."]
    assert select_sample(targets, 4) == (sample, notes)
    assert select_sample(targets, None) == (targets, [])
