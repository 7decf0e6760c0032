"""The requests that `profdeck capture` sends while servers record: where they come from, where they go."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from profdeck.base.errors import ConfigError
from profdeck.cli import _warm_up
from profdeck.cli._checked_servers import CheckedServer, Router
from profdeck.cli._warm_up import Sent
from profdeck.config.targets import WorkerType
from simulated_servers import Act, SimulatedServer, simulated_servers


def with_servers(count: int, check: Callable[[list[SimulatedServer]], Awaitable[None]]) -> None:
    async def main() -> None:
        async with simulated_servers(count) as servers:
            for server in servers:
                server.model = "tiny"
            await check(servers)

    asyncio.run(asyncio.wait_for(main(), 60))


async def answered(sent: Sent, count: int) -> None:
    """Wait until the answers of as many requests have been read."""
    while sent.answered + sent.failed < count:  # noqa: ASYNC110  # it has no event
        await asyncio.sleep(0.001)


def to(
    server: SimulatedServer, worker_type: WorkerType | None = None, router: SimulatedServer | None = None
) -> CheckedServer:
    through = Router(router.url, "a key") if router else None
    return CheckedServer(role="server", url=server.url, replica=None, worker_type=worker_type, router=through)


def bodies(server: SimulatedServer, path: str = "/v1/completions") -> list[dict[str, object]]:
    return [dict(arrival.body) for arrival in server.arrivals if arrival.path == path]


def test_a_warm_up_is_so_many_for_each_server() -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        async with _warm_up.sending(3, list(map(to, servers)), 10) as sent:
            for server in servers:
                await server.heard("completions", 3)
            await answered(sent, 6)
        assert (sent.sent, sent.answered, sent.failed, sent.first_error) == (6, 6, 0, None)
        assert str(sent) == "6 requests were sent: 6 answered, 0 failed."
        assert [server.commands() for server in servers] == [["models", *["completions"] * 3]] * 2
        every = [body for server in servers for body in bodies(server)]
        assert {(body["model"], body["max_tokens"], body["ignore_eos"]) for body in every} == {("tiny", 32, True)}
        assert len({str(body["prompt"])[:8] for body in every}) == 6
        # One after the other.
        for server in servers:
            ends = [arrival.answered_ns or 0 for arrival in server.arrivals]
            assert all(end < arrival.at_ns for end, arrival in zip(ends, server.arrivals[1:], strict=False))

    with_servers(2, check)


def test_what_fails_is_counted_and_ends_nothing() -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        good, refusing, without_model, gone = servers
        refusing.acts["completions"] = [Act(status=429, content=b'{"error":\n "too many"}')]
        without_model.acts["models"] = [Act(content=b'{"data": []}')]
        await gone.stop()
        async with _warm_up.sending(1, list(map(to, servers)), 10) as sent:
            await answered(sent, 4)
        assert (sent.sent, sent.answered, sent.failed) == (4, 1, 3)
        assert sent.first_error is not None
        assert str(sent).endswith(f"1 answered, 3 failed. The first failure: {sent.first_error}")
        await gone.start()
        for server, message in (
            (refusing, f'{refusing.url}: /v1/completions answered 429: {{"error": "too many"}}'),
            (without_model, f"{without_model.url}: /v1/models names no model."),
        ):
            async with _warm_up.sending(1, [to(server)], 10) as sent:
                await answered(sent, 1)
            assert sent.first_error == message
        assert good.commands() == ["models", "completions"]

    with_servers(4, check)


def test_an_answer_that_takes_too_long() -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[0].acts["completions"] = [Act(hang=True, raw=b"")]
        async with _warm_up.sending(1, [to(servers[0])], 0.05) as sent:
            await servers[0].heard("completions", 1)
            await answered(sent, 1)
        assert "/v1/completions gave no answer within 0.05 seconds" in str(sent.first_error)

    with_servers(1, check)


def test_nothing_is_sent() -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        async with _warm_up.sending(None, [to(servers[0])], 10):
            await asyncio.sleep(0)
        assert servers[0].arrivals == []

    with_servers(1, check)


def test_half_workers_are_asked_through_their_router(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROFDECK_TOKEN", "a token")

    async def check(servers: list[SimulatedServer]) -> None:
        router, prefill, decode, whole = servers
        chosen = [
            to(prefill, WorkerType.PREFILL, router),
            to(decode, WorkerType.DECODE, router),
            to(whole, WorkerType.REGULAR, router),
        ]
        _warm_up.check(chosen)
        async with _warm_up.sending(2, chosen, 10) as sent:
            await answered(sent, 6)
        assert [len(bodies(server)) for server in servers] == [4, 0, 0, 2]
        keys = [{arrival.headers["authorization"] for arrival in server.arrivals} for server in (router, whole)]
        assert keys == [{"Bearer a key"}, {"Bearer a token"}]
        assert (prefill.arrivals, decode.arrivals) == ([], [])

    with_servers(4, check)


def test_half_workers_without_a_router_are_refused() -> None:
    half = CheckedServer(role="server", url="http://10.0.0.1:8000", replica=0, worker_type=WorkerType.PREFILL)
    with pytest.raises(ConfigError, match="--warmup-requests: http://10.0.0.1:8000 does only prefill, so it cannot"):
        _warm_up.check([half])
