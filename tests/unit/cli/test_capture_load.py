"""The requests that `profdeck capture` sends while servers record: where they come from, where they go."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from profdeck.base.errors import ConfigError
from profdeck.cli import _warm_up
from profdeck.cli._checked_servers import CheckedServer, Router
from profdeck.cli._warm_up import Replay, Request, Sent, WarmUp
from profdeck.config.targets import WorkerType
from simulated_servers import Act, SimulatedServer, simulated_servers

CHAT = {"messages": [{"role": "user", "content": "Hello."}], "max_tokens": 3}


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


# Files.


def test_lines_of_a_file(tmp_path: Path) -> None:
    lines = [
        {"prompt": "Once", "max_tokens": 5},
        CHAT,
        {"url": "/generate", "body": {"text": "Once"}},
        {"custom_id": "1", "method": "POST", "url": "/v1/chat/completions", "body": CHAT | {"model": "m"}},
    ]
    file = tmp_path / "load.jsonl"
    file.write_text("\ufeff" + "\r\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n\n")
    found = _warm_up.read(file)
    assert found.lines == [
        Request("/v1/completions", {"prompt": "Once", "max_tokens": 5}),
        Request("/v1/chat/completions", CHAT),
        Request("/generate", {"text": "Once"}),
        Request("/v1/chat/completions", CHAT | {"model": "m"}),
    ]
    assert [line.lacks_model for line in found.lines] == [True, True, False, False]


def test_separators_of_unicode_end_no_line(tmp_path: Path) -> None:
    (tmp_path / "load.jsonl").write_text('{"prompt": "one\u2028two\x85three"}', encoding="utf-8")
    (line,) = _warm_up.read(tmp_path / "load.jsonl").lines
    assert line.body == {"prompt": "one\u2028two\x85three"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "there is no request in it; expected one JSON object per line"),
        ("\n \n", "there is no request in it"),
        ('{"prompt": "a"}\n\n{"prompt": "b"', "line 3: not JSON: "),
        ("[" * 100_000, "line 1: not JSON: RecursionError"),
        ('{"prompt": "a", "temperature": NaN}', "line 1: not JSON: "),
        ('{"prompt": "a", "temperature": 1e999}', "line 1: not JSON: "),
        ('{"text": "a"}', "line 1: expected an object with prompt or messages, or one with url and body; got"),
        ('"prompt"', "line 1: expected an object with prompt or messages"),
        ("[1]", "line 1: expected an object with prompt or messages"),
        ('{"url": "/v1/completions", "body": "text"}', "line 1: expected an object with prompt or messages"),
        ('{"body": {}}', "line 1: url: expected a path such as /v1/completions, got nothing"),
        ('{"url": "https://host/v1", "body": {}}', "line 1: url: expected a path such as /v1/completions, got 'https"),
        ('{"url": "/v1\\r\\nHost: a", "body": {}}', "line 1: url: expected a path"),
        ('{"url": "/v1", "method": "GET", "body": {}}', "line 1: method: expected 'POST', got 'GET'"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, content: str, message: str) -> None:
    file = tmp_path / "load.jsonl"
    file.write_text(content)
    with pytest.raises(ConfigError) as error:
        _warm_up.read(file)
    assert str(error.value).startswith(f"--load {file}")
    assert message in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    for path, message in ((tmp_path / "absent", "No such file"), (tmp_path, "Is a directory")):
        with pytest.raises(ConfigError, match=f"--load {path}: cannot be read: {message}"):
            _warm_up.read(path)
    (tmp_path / "latin").write_bytes(b'{"prompt": "\xe9"}')
    with pytest.raises(ConfigError, match="latin: not UTF-8: "):
        _warm_up.read(tmp_path / "latin")


# Requests.


def test_a_warm_up_is_so_many_for_each_server() -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        async with _warm_up.sending(WarmUp(3), list(map(to, servers)), 10) as sent:
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


def test_a_file_goes_round_until_the_end() -> None:
    lines = [Request("/v1/completions", {"prompt": str(number), "model": "tiny"}) for number in range(3)]

    async def check(servers: list[SimulatedServer]) -> None:
        servers[0].acts["completions"] = [*[Act()] * 7, Act(hang=True, raw=b"")]
        async with _warm_up.sending(Replay(lines), [to(servers[0])], 10) as sent:
            await servers[0].heard("completions", 10)  # the last ones hang
            await answered(sent, 7)
        assert (sent.sent, sent.answered, sent.failed) == (10, 7, 0)
        assert str(sent).endswith("7 answered, 0 failed, 3 given up when the capture was over.")
        await asyncio.gather(*servers[0].tasks)
        while servers[0].connections:  # nothing outlives the block
            servers[0].gone.clear()
            await servers[0].gone.wait()
        assert [str(body["prompt"]) for body in bodies(servers[0])][:3] == ["0", "1", "2"]
        assert "models" not in servers[0].commands()
        assert servers[0].opened == 3  # as many at once as there are lines

    with_servers(1, check)


@pytest.mark.parametrize(("lines", "servers", "clients"), [(2, 1, 2), (99, 1, 16), (99, 64, 8), (99, 1000, 1)])
def test_how_many_are_sent_at_once(lines: int, servers: int, clients: int) -> None:
    async def check(some: list[SimulatedServer]) -> None:
        some[0].acts["completions"] = [Act(hang=True, raw=b"")]
        gone = [CheckedServer(role="server", url="http://127.0.0.1:1", replica=None)] * (servers - 1)
        load = Replay([Request("/v1/completions", {"model": "tiny"})] * lines)
        async with _warm_up.sending(load, [to(some[0]), *gone], 10):
            await some[0].heard("completions", clients)
            for _ in range(10):
                await asyncio.sleep(0)
            assert len(some[0].arrivals) == clients

    with_servers(1, check)


def test_what_fails_is_counted_and_ends_nothing() -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        good, refusing, without_model, gone = servers
        refusing.acts["completions"] = [Act(status=429, content=b'{"error":\n "too many"}')]
        without_model.acts["models"] = [Act(content=b'{"data": []}')]
        await gone.stop()
        async with _warm_up.sending(WarmUp(1), list(map(to, servers)), 10) as sent:
            await answered(sent, 4)
        assert (sent.sent, sent.answered, sent.failed) == (4, 1, 3)
        assert sent.first_error is not None
        assert str(sent).endswith(f"1 answered, 3 failed. The first failure: {sent.first_error}")
        await gone.start()
        for server, message in (
            (refusing, f'{refusing.url}: /v1/completions answered 429: {{"error": "too many"}}'),
            (without_model, f"{without_model.url}: /v1/models names no model."),
        ):
            async with _warm_up.sending(WarmUp(1), [to(server)], 10) as sent:
                await answered(sent, 1)
            assert sent.first_error == message
        assert good.commands() == ["models", "completions"]

    with_servers(4, check)


def test_an_answer_that_takes_too_long() -> None:
    async def check(servers: list[SimulatedServer]) -> None:
        servers[0].acts["completions"] = [Act(hang=True, raw=b"")]
        async with _warm_up.sending(WarmUp(1), [to(servers[0])], 0.05) as sent:
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
        _warm_up.check(WarmUp(2), chosen)
        async with _warm_up.sending(WarmUp(2), chosen, 10) as sent:
            await answered(sent, 6)
        assert [len(bodies(server)) for server in servers] == [4, 0, 0, 2]
        keys = [{arrival.headers["authorization"] for arrival in server.arrivals} for server in (router, whole)]
        assert keys == [{"Bearer a key"}, {"Bearer a token"}]
        async with _warm_up.sending(Replay([Request("/v1/completions", {"model": "tiny"})]), chosen[:2], 10):
            await router.heard("completions", 9)
        assert (prefill.arrivals, decode.arrivals) == ([], [])

    with_servers(4, check)


def test_half_workers_without_a_router_are_refused() -> None:
    half = CheckedServer(role="server", url="http://10.0.0.1:8000", replica=0, worker_type=WorkerType.PREFILL)
    for load, option in ((WarmUp(1), "--warmup-requests"), (Replay([]), "--load")):
        with pytest.raises(ConfigError, match=f"{option}: http://10.0.0.1:8000 does only prefill, so it cannot"):
            _warm_up.check(load, [half])
