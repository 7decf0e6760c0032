"""Tests for `profdeck capture servers`: several servers, checks before a capture, and output."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from typer.testing import Result

from profdeck import ServerObserver, ServerRequest, acapture_servers, capture_servers
from profdeck.backends.api import TargetState
from profdeck.cli import capture_progress
from profdeck.records.manifest import Manifest, read_manifest
from profdeck_traces.base.errors import ConfigError
from simulated_servers import (
    Act,
    RecordingEngine,
    ServersInThread,
    SimulatedBackend,
    SimulatedEngine,
    SimulatedServer,
    install_backends,
)

Cli = Callable[..., Result]
Program = Callable[..., "subprocess.CompletedProcess[str]"]
Fleet = Callable[..., AbstractContextManager[list[SimulatedServer]]]
FIVE_ITERATIONS = ("--iterations", 5, "--set", "run=run")
WITHOUT_SUMMARY = (*FIVE_ITERATIONS, "--json")
"""Options for captures without a summary, because a summary of several traces starts processes."""


@pytest.fixture(scope="module")
def simulated_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return a PYTHONPATH with the backends of simulated servers."""
    return install_backends(tmp_path_factory.mktemp("site"))


@pytest.fixture
def fleet(tally: ModuleType, simulated_path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Fleet:
    """Return a context manager that starts servers whose engines iterate and record to tmp_path/profiles."""
    for path in simulated_path.split(os.pathsep):
        monkeypatch.syspath_prepend(path)

    @contextlib.contextmanager
    def run(count: int) -> Iterator[list[SimulatedServer]]:
        with ServersInThread(count) as servers:
            for server in servers:
                server.output, server.iterations_after_start = str(tmp_path / "profiles"), 5
                server.engine = RecordingEngine("tally-device")
            yield servers

    return run


@pytest.fixture
def manifest(tmp_path: Path) -> Callable[..., Manifest]:
    """Return a function that reads the manifest of a role's capture, or of one of its replicas."""

    def read(replica: int | None = None, role: str = "server") -> Manifest:
        directory = tmp_path / "profiles" / "run" / "step_000000" / role
        directory = directory if replica is None else directory / f"replica_{replica:03d}"
        return read_manifest(directory / "target.step0.json")

    return read


def url_options(servers: list[SimulatedServer]) -> list[str]:
    return [argument for server in servers for argument in ("--url", server.url)]


def join_lines(text: str) -> str:
    return " ".join(text.split())


@contextlib.contextmanager
def unreachable_urls(count: int = 1) -> Iterator[list[str]]:
    """Yield URLs without a server, at ports that are reserved during the block."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for unconnected in sockets:
            unconnected.bind(("127.0.0.1", 0))
        yield [f"http://127.0.0.1:{unconnected.getsockname()[1]}" for unconnected in sockets]


def worker_list(*servers: SimulatedServer, **types: str) -> list[Act]:
    """Return a router's reply with its workers. Keywords set worker types by index, such as ``_1="decode"``."""
    content = [
        {"url": server.url, "worker_type": types.get(f"_{index}", "regular"), "is_healthy": True}
        for index, server in enumerate(servers)
    ]
    return [Act(content=json.dumps({"workers": content}).encode())]


# Successful captures.


def test_capture_without_the_extra_traces(fleet: Fleet, python_without: Program) -> None:
    libraries = ("jinja2", "markupsafe")
    with fleet(1) as servers:
        completed = python_without(
            libraries, "-m", "profdeck", "capture", "servers", *url_options(servers), *FIVE_ITERATIONS
        )
    assert completed.returncode == 0, completed.stderr
    assert "0 server 0 complete" in join_lines(completed.stdout)


def test_several_servers_are_captured_together(cli: Cli, fleet: Fleet, manifest: Callable[..., Manifest]) -> None:
    with fleet(3) as servers:
        result = cli("capture", "servers", *url_options(servers), *FIVE_ITERATIONS)
        assert result.exit_code == 0, result.output
        starts = [next(arrival for arrival in server.arrivals if arrival.command == "start") for server in servers]
    lines = list(map(join_lines, result.stdout.splitlines()))
    assert [line for line in lines if re.match(r"0 server/\d 0 complete", line)] == [
        f"0 server/{replica} 0 complete 1.1 kB 10" for replica in range(3)
    ]
    assert any(line.startswith("profiles/run: 3 captures; ranks: 3 complete;") for line in lines)
    assert "1 capture, 3 ranks of server, 30 events, all whole" in join_lines(result.stdout)  # the summary
    for server in servers:
        assert f"{server.url} server/" in join_lines(result.stderr)
    assert join_lines(result.stderr).count("simulated 0.1.0 ready") == 3
    assert {(start.body["id"], start.body["iterations"]["count"]) for start in starts} == {("step0", 5)}
    assert sorted(start.body["replica"] for start in starts) == [0, 1, 2]
    assert (manifest().target, manifest().policy, len(manifest().targets)) == ("fleet of 3", "any", 3)
    assert manifest(2).status == "complete"


def test_single_server_is_not_a_fleet(
    cli: Cli, fleet: Fleet, manifest: Callable[..., Manifest], tmp_path: Path
) -> None:
    with fleet(1) as servers:
        result = cli("capture", "servers", *url_options(servers), *FIVE_ITERATIONS)
        assert result.exit_code == 0, result.output
        assert (manifest().target, manifest().targets) == (servers[0].url, ())
        assert result.stderr == ""
        result = cli("capture", "servers", *url_options(servers), *FIVE_ITERATIONS, "--role", "rollout")
    assert result.exit_code == 0, result.output
    assert manifest(role="rollout").target == servers[0].url


def test_output_option_sets_the_run_directory(cli: Cli, fleet: Fleet, tmp_path: Path) -> None:
    with fleet(1) as servers:
        result = cli("capture", "servers", *url_options(servers), *WITHOUT_SUMMARY, "--output", tmp_path / "elsewhere")
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["run"] == str(tmp_path / "elsewhere" / "run")


def test_run_setting_overrides_the_environment(
    cli: Cli, fleet: Fleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROFDECK_RUN", "other")
    with fleet(1) as servers:
        result = cli("capture", "servers", *url_options(servers), *WITHOUT_SUMMARY)
    assert json.loads(result.stdout)["run"] == str(tmp_path / "profiles" / "run")


def test_policy_makes_a_single_server_a_fleet(cli: Cli, fleet: Fleet, manifest: Callable[..., Manifest]) -> None:
    with fleet(1) as servers:
        result = cli(
            "capture", "servers", *url_options(servers), *WITHOUT_SUMMARY, "--set", "server.targets.policy=all"
        )
    assert result.exit_code == 0, result.output
    assert (manifest().target, manifest().policy) == ("fleet of 1", "all")


def test_json_document_has_run_servers_and_outcomes(cli: Cli, fleet: Fleet, tmp_path: Path) -> None:
    with fleet(2) as servers:
        result = cli("capture", "servers", *url_options(servers), *FIVE_ITERATIONS, "--json")
    assert result.exit_code == 0, result.output
    document = json.loads(result.stdout)
    assert (document["run"], document["complete"]) == (str(tmp_path / "profiles" / "run"), True)
    assert (document["problem"], document["ls"]["status"]) == (None, "complete")
    expected = {"role": "server", "worker_type": None, "backend": "simulated", "profdeck": "0.1.0"}
    assert [server["url"] for server in document["servers"]] == sorted(server.url for server in servers)
    for replica, server in enumerate(document["servers"]):
        assert server == expected | {"url": server["url"], "replica": replica, "state": "ready", "reason": None}
    (fleet_target,) = (target for target in document["ls"]["targets"] if target["targets"])
    assert [member["outcome"] for member in fleet_target["targets"]] == ["ended_by_itself"] * 2


def test_only_workers_of_selected_types_are_captured(cli: Cli, fleet: Fleet, manifest: Callable[..., Manifest]) -> None:
    with fleet(5) as (router, *servers):
        router.acts["workers"] = worker_list(*servers[:3], _1="decode", _2="prefill")
        options = ["--router", router.url, "--url", servers[3].url]
        result = cli(
            "capture", "servers", *options, "--set", "server.targets.worker_types=[regular, decode]", *WITHOUT_SUMMARY
        )
        assert result.exit_code == 0, result.output
        assert "start" not in servers[2].commands()
        assert {router.commands().count(command) for command in ("start", "status")} == {0}
        worker_types = {record.name: record.worker_type for record in manifest().targets}
        assert worker_types == {servers[0].url: "regular", servers[1].url: "decode", servers[3].url: None}
    assert re.search(r"server/\d decode simulated", join_lines(result.stderr))


def test_worker_that_its_router_reports_unhealthy_is_not_captured(cli: Cli, fleet: Fleet) -> None:
    with fleet(3) as (router, *servers):
        worker_states = [{"url": server.url, "is_healthy": server is servers[0]} for server in servers]
        router.acts["workers"] = [Act(content=json.dumps({"workers": worker_states}).encode())]
        result = cli("capture", "servers", "--router", router.url, *FIVE_ITERATIONS, "--json")
        assert result.exit_code == 1
        assert servers[1].commands() == []
    states = {server["url"]: server["state"] for server in json.loads(result.stdout)["servers"]}
    assert states == {servers[0].url: "ready", servers[1].url: "unhealthy"}
    assert "The router reports that this worker is unhealthy, so it is not captured." in join_lines(result.stderr)


def test_servers_are_read_from_a_targets_file(
    cli: Cli, fleet: Fleet, manifest: Callable[..., Manifest], tmp_path: Path
) -> None:
    with fleet(2) as servers:
        content = f"- {servers[0].url}\n- {{url: '{servers[1].url}', replica: 7, worker_type: regular}}\n"
        (tmp_path / "targets.yaml").write_text(content)
        result = cli("capture", "servers", "--targets", "targets.yaml", *WITHOUT_SUMMARY)
        assert result.exit_code == 0, result.output
        assert {record.replica: record.name for record in manifest().targets} == {
            0: servers[0].url,
            7: servers[1].url,
        }


def test_roles_with_different_backends_are_captured_into_one_run(
    cli: Cli, fleet: Fleet, tmp_path: Path, manifest: Callable[..., Manifest]
) -> None:
    with fleet(3) as servers:
        servers[2].backend = "other"
        roles = {
            "rollout": {
                "backend": "simulated",
                "ranks": "all",
                "targets": {"urls": [server.url for server in servers[:2]]},
            },
            "reward": {"backend": "other", "targets": {"urls": [servers[2].url]}},
            "trainer": {"backend": "paper"},
        }
        (tmp_path / "job.yaml").write_text(json.dumps({"roles": roles}))
        result = cli("capture", "servers", "--config", "job.yaml", *FIVE_ITERATIONS, "--json")
        assert result.exit_code == 0, result.output
        assert manifest(role="reward").backend == "other"
        starts = [arrival.body for server in servers for arrival in server.arrivals if arrival.command == "start"]
        assert [(start["role"], start["ranks"]) for start in starts] == [("rollout", "all")] * 2 + [("reward", [0])]
        assert {server["role"] for server in json.loads(result.stdout)["servers"]} == {"rollout", "reward"}
        result = cli("capture", "servers", "--config", "job.yaml", "--role", "reward", *FIVE_ITERATIONS)
        assert result.exit_code == 0, result.output
        assert [server.commands().count("start") for server in servers] == [1, 1, 2]


# Checks before the start.


def test_servers_with_different_backends_are_rejected(cli: Cli, fleet: Fleet) -> None:
    with fleet(3) as servers:
        servers[1].backend = "other"
        result = cli("capture", "servers", *url_options(servers), *WITHOUT_SUMMARY)
        assert result.exit_code == 2
        assert not any("start" in server.commands() for server in servers)
    stderr = join_lines(result.stderr)
    simulated = ", ".join(sorted([servers[0].url, servers[2].url]))
    assert f"simulated: {simulated}" in stderr
    assert f"other: {servers[1].url}" in stderr
    assert "Define a role for each backend in a config" in stderr


def test_servers_with_different_output_directories_are_rejected(cli: Cli, fleet: Fleet, tmp_path: Path) -> None:
    with fleet(2) as servers:
        servers[1].output = str(tmp_path / "elsewhere")
        result = cli("capture", "servers", *url_options(servers), *WITHOUT_SUMMARY)
        assert result.exit_code == 2
        assert "start" not in servers[0].commands()
    assert f"{tmp_path}/elsewhere: {servers[1].url}" in join_lines(result.stderr)


def test_output_directory_of_a_server_on_another_host_is_ignored(cli: Cli, fleet: Fleet, tmp_path: Path) -> None:
    with fleet(1) as servers:
        servers[0].host, servers[0].output = "elsewhere", "/nowhere"
        result = cli("capture", "servers", *url_options(servers), *FIVE_ITERATIONS, "--json")
    assert json.loads(result.stdout)["run"] == str(tmp_path / "profiles" / "run")


def test_version_mismatch_is_reported(cli: Cli, fleet: Fleet) -> None:
    with fleet(4) as servers:
        for server, version in zip(servers, ("0.1.7", "0.0.9", "0.0.9", "strange"), strict=True):
            server.version = version
        result = cli("capture", "servers", *url_options(servers), *WITHOUT_SUMMARY)
    assert result.exit_code == 0, result.output
    stderr = join_lines(result.stderr)
    assert "and 1 more: the version of profdeck is 0.0.9 there and 0.1.0 here." in stderr
    assert f"{servers[3].url}: the version of profdeck is strange there and 0.1.0 here." in stderr
    assert "profdeck is 0.1.7" not in stderr


@pytest.mark.parametrize("several", [False, True])
def test_unhealthy_server_is_reported(cli: Cli, fleet: Fleet, *, several: bool) -> None:
    with fleet(1 + several) as servers:
        servers[0].acts = {"status": [Act(status=404)], "health": [Act(status=503)]}
        result = cli("capture", "servers", *url_options(servers), *WITHOUT_SUMMARY)
        assert [server.commands().count("health") for server in servers] == [1, 0][: 1 + several]
    assert result.exit_code == 1
    stderr = join_lines(result.stderr)
    assert ("warning" in stderr) is not several
    assert f"{servers[0].url}: The health check at /health failed." in stderr


def test_health_route_depends_on_the_backend(cli: Cli, fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SimulatedBackend, "health", "/cheap")
    with fleet(2) as servers:
        for server in servers:
            server.acts = {"status": [Act(status=404)], "cheap": [Act(status=503)]}
        servers[1].backend = "unheard-of"  # no health route is known
        result = cli("capture", "servers", *url_options(servers), *WITHOUT_SUMMARY)
        assert [server.commands().count("cheap") for server in servers] == [1, 0]
        assert "health" not in servers[0].commands() + servers[1].commands()
    assert f"{servers[0].url}: The health check at /cheap failed." in join_lines(result.stderr)


@pytest.mark.parametrize("several", [False, True])
@pytest.mark.parametrize("host", ["", "elsewhere"])
def test_server_without_write_access_is_reported(
    cli: Cli, fleet: Fleet, tmp_path: Path, host: str, *, several: bool
) -> None:
    with fleet(1 + several) as servers:
        server_info = {"host": host or socket.gethostname(), "output": f"{tmp_path}/profiles", "profdeck": "0.1.0"}
        status = json.dumps({"server": server_info | {"writable": False}, "answer": {"ranks": []}})
        servers[0].acts["status"] = [Act(content=status.encode()), Act()]
        servers[0].acts["start"] = [Act(status=409, error="nothing can be written")]
        result = cli("capture", "servers", *url_options(servers), *FIVE_ITERATIONS, "--json")
        assert "start" in servers[0].commands()  # the check of permissions is not conclusive
    assert result.exit_code == 1
    stderr = join_lines(result.stderr)
    message = f"{servers[0].url}: The server cannot write to {tmp_path}/profiles on {server_info['host']}."
    assert message.replace(" ", "") in stderr.replace(" ", "")  # a long path is wrapped
    assert ("warning" in stderr) is not several
    assert ("simulated 0.1.0 not writable" in stderr) is several
    if several:
        (server,) = (server for server in json.loads(result.stdout)["servers"] if server["url"] == servers[0].url)
        assert server["state"] == "not_writable"
        assert "restart it with another output in its config" in server["reason"]


def test_server_without_profdeck_is_reported(cli: Cli, fleet: Fleet) -> None:
    with fleet(2) as servers:
        servers[0].acts["status"] = [Act(status=404)]
        result = cli("capture", "servers", *url_options(servers), *FIVE_ITERATIONS)
        assert result.exit_code == 1
        assert f"{servers[0].url} server/" in join_lines(result.stderr)
        assert re.search(r"simulated own profiler only", join_lines(result.stderr))
        assert f"{servers[0].url}: not_enabled:" in join_lines(result.stdout)
        assert "Start the engine with PROFDECK_CONFIG in its environment" in join_lines(result.stdout)


def test_missing_token_is_reported(cli: Cli, fleet: Fleet) -> None:
    with fleet(1) as servers:
        servers[0].token = "a secret"  # noqa: S105  # not a real token
        result = cli("capture", "servers", *url_options(servers), *FIVE_ITERATIONS)
        assert (result.exit_code, result.stdout) == (1, "")
        assert "returned status 401: The token is missing or wrong. Set PROFDECK_TOKEN" in join_lines(result.stderr)


def test_server_without_a_matching_backend_is_reported(cli: Cli, fleet: Fleet) -> None:
    with fleet(2) as servers:
        servers[0].backend = servers[1].backend = "unheard-of"
        single = cli("capture", "servers", "--url", servers[0].url, *WITHOUT_SUMMARY)
        several = cli("capture", "servers", *url_options(servers), *WITHOUT_SUMMARY)
        servers[1].backend = "simulated"
        mixed = cli("capture", "servers", *url_options(servers), *WITHOUT_SUMMARY)
    assert (single.exit_code, several.exit_code) == (3, 3)
    assert f"No backend recognises the server at {servers[0].url}. Check its address." in join_lines(single.stderr)
    assert "and 1 more. Check its address." in join_lines(several.stderr)
    assert f"{servers[0].url}: No installed backend recognises this server." in join_lines(mixed.stderr)
    assert mixed.exit_code == 0, mixed.output  # the server is captured with the backend of the others


def test_backend_setting_overrides_the_detected_backend(cli: Cli, fleet: Fleet) -> None:
    with fleet(2) as servers:
        servers[0].backend = servers[1].backend = "unheard-of"
        for selected_servers in (servers, servers[:1]):
            result = cli(
                "capture",
                "servers",
                *url_options(selected_servers),
                *WITHOUT_SUMMARY,
                "--set",
                "server.backend=simulated",
            )
            assert result.exit_code == 0, result.output
        result = cli("capture", "servers", *url_options(servers), *WITHOUT_SUMMARY, "--set", "server.backend=paper")
    assert result.exit_code == 2
    assert "The backend 'paper' records its own process and cannot control servers." in join_lines(result.stderr)


@pytest.mark.parametrize("backend_option", [[], ["--set", "server.backend=simulated"]])
@pytest.mark.usefixtures("fleet")
def test_capture_without_a_reachable_server_fails(cli: Cli, backend_option: list[str]) -> None:
    with unreachable_urls(2) as (first, second):
        single = cli("capture", "servers", "--url", first, *WITHOUT_SUMMARY, *backend_option)
        several = cli(
            "capture",
            "servers",
            "--url",
            first,
            "--url",
            second,
            *WITHOUT_SUMMARY,
            *backend_option,
            "--output",
            "profiles",
        )
    assert (single.exit_code, several.exit_code) == (1, 1)
    assert f"error: {first} cannot be reached: Connection refused. Is the server running?" in join_lines(single.stderr)
    expected = "Only 0 of 2 targets are ready" if backend_option else "None of 2 servers can be captured."
    assert expected in join_lines(several.stderr)
    assert join_lines(several.stderr).count("unreachable") == 2


def test_long_table_omits_servers_that_are_ready(cli: Cli, fleet: Fleet) -> None:
    with fleet(20) as servers:
        servers[7].backend = "unheard-of"
        result = cli("capture", "servers", *url_options(servers), *WITHOUT_SUMMARY)
    assert result.exit_code == 0, result.output
    messages = result.stderr.splitlines()
    assert {line.partition(" ")[0].rstrip(":") for line in messages if line.startswith("http://")} == {servers[7].url}
    assert "19 of 20 servers are ready." in messages


def test_router_errors_are_reported(cli: Cli, fleet: Fleet) -> None:
    with fleet(1) as (router,):
        for act, message in (
            (Act(status=503), f"The router {router.url} replied to /workers with 503. Check its log."),
            (Act(status=401), "Set the environment variable in router_key_variable to its API key."),
            (Act(content=b'{"workers": []}'), f"There is no target (none found). Searched: {router.url}."),
            (Act(content=b"<html>"), "replied to /workers with an unknown format"),
        ):
            router.acts["workers"] = [act]
            result = cli("capture", "servers", "--router", router.url, *FIVE_ITERATIONS)
            assert (result.exit_code, result.stdout) == (1, "")
            assert message in join_lines(result.stderr)
    with unreachable_urls() as (absent,):
        result = cli("capture", "servers", "--router", absent, *FIVE_ITERATIONS)
    assert result.exit_code == 1
    assert f"{absent} cannot be reached: Connection refused." in join_lines(result.stderr)


@pytest.mark.parametrize("several", [False, True])
def test_router_is_rejected_as_a_server(cli: Cli, fleet: Fleet, *, several: bool) -> None:
    with fleet(2) as (router, server):
        router.acts["workers"] = worker_list(server)
        result = cli("capture", "servers", *url_options([router, *[server] * several]), *WITHOUT_SUMMARY)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "start" not in [*router.commands(), *server.commands()]
    assert f"{router.url}: this is a router" in join_lines(result.stderr)


URL = "http://127.0.0.1:1"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--url", "127.0.0.1:8000"], "'127.0.0.1:8000' is not the URL of a server"),
        (["--url", "ftp://host"], "'ftp://host' is not the URL of a server"),
        (["--url", "http://host:99999"], "'http://host:99999' is not the URL of a server"),
        (["--url", URL, "--url", f"{URL}/"], f"{URL}: this server is specified twice."),
        (["--router", "host"], "'host' is not the URL of a server"),
        (["--targets", "absent.yaml"], "absent.yaml: cannot be read: No such file"),
        (
            ["--router", URL, "--set", "server.targets.worker_types=[encode]"],
            "expected one of regular, prefill, decode",
        ),
        (["--router", URL, "--set", "server.targets.policy=most"], "expected one of any, quorum, all"),
        (["--url", URL, "--skip", "2"], "skip is set, but iterations is not."),
        (["--url", URL, "--ranks", "first"], "ranks: expected all, or numbers such as 0,8 or 0..7, got 'first'"),
        (["--url", URL, "--ranks", "7..0"], "ranks: the range '7..0' is empty"),
        (["--url", URL, "--ranks", "0,7.."], "ranks[1]: expected an integer, got '7..'"),
        (["--url", URL, "--ranks", "-1"], "ranks: -1 is not a rank"),
        (["--url", URL, "--set", "server.ranks=7..0"], "roles.server.ranks: the range '7..0' is empty"),
        (["--router", URL, "--set", "server.ranks=[-1]"], "roles.server: ranks: -1 is not a rank"),
        (["--url", URL, "--batch-kind", "encode"], "batch_kinds[0]: expected one of prefill, decode, mixed"),
        (["--url", URL, "--role", "a b"], "'a b' is not a role"),
        (["--url", URL, "--set", "run=profiles/run"], "run: 'profiles/run' is not a directory name"),
        (["--config", "job.yaml"], "no role in the config has targets"),
        (["--config", "job.yaml", "--role", "trainer"], "The role 'trainer' has no servers under targets"),
        (["--url", URL, "--config", "job.yaml", "--role", "TRAINER"], "Its roles are trainer."),
        ([], "No server is specified. Use --url, --router"),
        (
            ["--url", URL, "--set", "serve.targets.policy=all"],
            "'serve' is not captured. Captured roles: server.",
        ),
        (["--url", URL, "--role", "rollout", "--set", "server.backend=vllm"], "Captured roles: rollout."),
        (["--url", URL, "--set", "mode=discrete"], "--set mode: it has no effect on a capture of servers."),
        (["--url", URL, "--set", "roles=3"], "roles: expected a mapping of role names, got 3"),
    ],
)
def test_invalid_options_are_rejected(cli: Cli, tmp_path: Path, arguments: list[str], message: str) -> None:
    (tmp_path / "job.yaml").write_text("roles: {trainer: {backend: paper}}")
    result = cli("capture", "servers", *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert message in join_lines(re.sub(r"[│╭╮╰╯─]", " ", result.stderr))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["servers", "--url", URL, "--stage", "decode"], "--stage was removed. Use --batch-kind."),
        (["servers", "--policy=all"], "--policy was removed. Use --set server.targets.policy=POLICY."),
        (["servers", "--run", "run"], "To capture a running job, use 'profdeck capture job RUN'."),
        (["job", "--run", "run"], "The run directory is an argument: profdeck capture job RUN."),
        (["job", "run", "--iterations=2"], "To capture servers without a job: profdeck capture servers"),
        (["--url", URL, "--skip", "2"], f"For servers: 'profdeck capture servers --url {URL} --skip 2'."),
        (["--run", "run"], "--run was replaced by an argument: 'profdeck capture job RUN'."),
        (["--router", URL], "For a running job: 'profdeck capture job RUN'."),
        (["start", "--url", URL], "No such command 'capture start'. Use 'profdeck capture servers' without"),
        (["stop", "--run", "run"], "No such command 'capture stop'. Use 'profdeck capture servers' without"),
    ],
)
def test_removed_options_and_commands_name_their_replacement(cli: Cli, arguments: list[str], message: str) -> None:
    result = cli("capture", *arguments)
    assert (result.exit_code, result.stdout) == (2, ""), result.output
    assert message in join_lines(re.sub(r"[│╭╮╰╯─]", " ", result.stderr))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"iterations": 0}, "iterations must be at least 1, got 0."),
        ({"sample": 0}, "sample must be at least 1, got 0."),
        ({"iterations": 1, "skip": -1}, "skip must be at least 0, got -1."),
        ({"ranks": "7..0"}, "ranks: the range '7..0' is empty"),
        ({"timeout_s": -1.0}, "timeout_s must be a positive number of seconds, got -1.0."),
        ({"timeout_s": float("nan")}, "timeout_s must be a positive number"),
        ({"urls": URL}, "urls: expected a tuple of strings, got"),
        ({"urls": (b"x",)}, "urls: expected a tuple of strings, got"),
    ],
)
def test_invalid_requests_are_rejected(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        capture_servers(ServerRequest(**({"urls": (URL,)} | changes)))


def test_stop_event_ends_the_recording(fleet: Fleet) -> None:
    class StoppingObserver(ServerObserver):
        def recording_started(self, *_: object) -> None:
            stop.set()

    with fleet(1) as servers:
        stop, request = asyncio.Event(), ServerRequest(urls=(servers[0].url,), settings={"run": "run"})
        captured = asyncio.run(acapture_servers(request, StoppingObserver(), stop))
        assert captured.error is None
        assert "stop" in servers[0].commands()


def test_error_names_the_source_of_settings() -> None:
    request = ServerRequest(urls=(URL,), settings={"mode": "discrete"})
    with pytest.raises(ConfigError, match="^file x mode: it has no effect on a capture of servers"):
        capture_servers(request, settings_source="file x")


def test_capture_servers_rejects_a_running_event_loop() -> None:
    async def host() -> None:
        capture_servers(ServerRequest(urls=(URL,)))

    with pytest.raises(ConfigError, match=r"Use: await acapture_servers\(\.\.\.\)"):
        asyncio.run(host())


@pytest.mark.parametrize("count", [1, 2])
def test_servers_of_a_request_replace_the_servers_of_the_config(fleet: Fleet, tmp_path: Path, count: int) -> None:
    targets_file, config = tmp_path / "servers.yaml", tmp_path / "profdeck.yaml"
    with fleet(count + 1) as servers:
        urls = [server.url for server in servers[:count]]
        targets_file.write_text(json.dumps([servers[-1].url]))
        targets = {"file": str(targets_file), "actors": ["rollout_*"]}
        config.write_text(json.dumps({"run": "run", "roles": {"server": {"targets": targets}}}))
        captured = capture_servers(ServerRequest(urls=tuple(urls), iterations=5, config=config, output=tmp_path))
        assert sorted(server.url for server in captured.servers) == sorted(urls)
        assert ["start" in server.commands() for server in servers] == [True] * count + [False]


def test_settings_override_the_servers_of_a_request(fleet: Fleet) -> None:
    with fleet(2) as servers:
        settings = {"server.targets.urls": [servers[1].url], "run": "run"}
        captured = capture_servers(ServerRequest(urls=(servers[0].url,), iterations=5, settings=settings))
        assert [server.url for server in captured.servers] == [servers[1].url]
        assert ["start" in server.commands() for server in servers] == [False, True]


# Errors of some servers.

POLICIES = [
    (["--set", "server.targets.policy=any"], True),
    (["--set", "server.targets.policy=quorum", "--set", "server.targets.quorum=7"], True),
    (["--set", "server.targets.policy=quorum", "--set", "server.targets.quorum=8"], False),
    (["--set", "server.targets.policy=all"], False),
]


@pytest.mark.parametrize("as_json", [False, True])
@pytest.mark.parametrize(("policy", "is_captured"), POLICIES)
def test_policy_decides_whether_a_partial_fleet_is_captured(
    cli: Cli, fleet: Fleet, policy: list[str], *, is_captured: bool, as_json: bool
) -> None:
    with unreachable_urls() as (absent,), fleet(7) as servers:
        result = cli(
            "capture",
            "servers",
            *url_options(servers),
            "--url",
            absent,
            *policy,
            *FIVE_ITERATIONS,
            *(["--json"] if as_json else []),
        )
        assert result.exit_code == 1
        started = ["start" in server.commands() for server in servers]
        assert started == [is_captured] * 7
    stderr = join_lines(result.stderr)
    assert re.search(rf"{absent} server/\d unreachable", stderr)
    assert f"{absent} cannot be reached: Connection refused. Is the server running?" in stderr
    assert ("Only 7 of 8 targets are ready" in stderr) is not is_captured
    assert ("To list the result of each server: profdeck ls profiles/run" in stderr) is not is_captured
    if as_json:
        document = json.loads(result.stdout)
        assert (document["complete"], document["problem"] is None) == (False, is_captured)
        (fleet_target,) = (target for target in document["ls"]["targets"] if target["targets"])
        outcomes = [member["outcome"] for member in fleet_target["targets"] if member["name"] == absent]
        assert outcomes == ["unreachable"]
    elif is_captured:
        assert "Restart the target, or correct its address." in join_lines(result.stdout)
        assert "7 captures; ranks: 7 complete" in result.stdout
    else:
        assert result.stdout == ""


def test_timeout_ends_an_incomplete_window(cli: Cli, fleet: Fleet) -> None:
    with fleet(2) as servers:
        servers[0].iterations_after_start = 0
        result = cli("capture", "servers", *url_options(servers), *FIVE_ITERATIONS, "--timeout", 1)
    assert result.exit_code == 1
    assert "Only 0 of 5 iterations ran before the stop." in join_lines(result.stdout)
    assert "1 complete" in result.stdout


def test_capture_fails_if_all_servers_fail_during_it(cli: Cli, fleet: Fleet, manifest: Callable[..., Manifest]) -> None:
    with fleet(2) as servers:
        for server in servers:
            server.engine, server.iterations_after_start = (
                SimulatedEngine(),
                0,
            )  # this engine records nothing, so no stop is needed
            server.acts["status"] = [Act(), Act(), Act(), Act(status=500, error="dead")]
            server.acts["stop"] = [Act(status=500, error="dead")]
        result = cli("capture", "servers", *url_options(servers), "--iterations", 5, "--set", "run=run", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["complete"] is False
    assert manifest().problems[0].startswith("None of the 2 targets responded. http://")
    assert [record.outcome for record in manifest().targets] == ["refused"] * 2


@pytest.mark.parametrize("method", ["recording_started", "recording_stopped"])
def test_error_of_an_observer_is_recorded(
    fleet: Fleet, manifest: Callable[..., Manifest], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the terminal is closed")

    monkeypatch.setattr(ServerObserver, method, fail)
    with fleet(2) as servers:
        request = ServerRequest(urls=tuple(server.url for server in servers), iterations=5, settings={"run": "run"})
        with pytest.raises(RuntimeError, match="the terminal is closed"):
            capture_servers(request, ServerObserver())
        assert all("stop" in server.commands() for server in servers)
    assert manifest().problems == ("RuntimeError: the terminal is closed.",)


# Progress.


def test_progress_text_describes_the_target_states() -> None:
    states = {
        "http://armed": TargetState(ended=False, iterations=0),
        "http://recording": TargetState(ended=False, iterations=1),
        "http://writing": TargetState(ended=True, iterations=2, writing=True),
        "http://ended": TargetState(ended=True, iterations=3),
    }
    describe_recording, describe_files = capture_progress.describe_recording, capture_progress.describe_files
    completed_and_total = capture_progress.completed_and_total
    assert describe_recording(states, 3, 4) == "2 of 4 targets have recorded 3 iterations"
    assert describe_recording(states, None, 5) == "2 of 5 targets have recorded their windows"
    assert describe_recording({"http://armed": states["http://armed"]}, 1, 1) == "Recording 1 iteration"
    assert describe_recording({}, None, 1) == "Recording"
    waiting = {"http://armed": attrs.evolve(states["http://armed"], waits_for="trainer, step3")}
    assert describe_recording(waiting, 1, 1) == "Recording 1 iteration (http://armed waits for trainer, step3)"
    assert describe_files(states) == "Waiting for the files of http://writing"
    writing = {f"http://{index}": states["http://writing"] for index in range(4)}
    assert describe_files(writing) == "Waiting for the files of http://0, http://1 and 2 more"
    assert describe_files({"http://ended": states["http://ended"]}) == "Collecting the files"
    assert completed_and_total(states, 3, stopping=False) == (0 + 1 + 3 + 3, 12)
    assert completed_and_total(states, None, stopping=False) == (0, None)
    assert completed_and_total({}, 3, stopping=False) == (0, None)
    assert completed_and_total(states, 3, stopping=True) == (3, 4)


def test_check_connects_to_targets(cli: Cli, fleet: Fleet, tmp_path: Path) -> None:
    config = tmp_path / "profdeck.yaml"
    with fleet(2) as servers, socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        urls = [server.url for server in servers]
        config.write_text(json.dumps({"roles": {"rollout": {"backend": "simulated", "targets": {"urls": urls}}}}))
        result = cli("check", config, "--connect")
        assert result.exit_code == 0, result.output
        assert "2 of 2 respond" in result.output
        assert not [arrival for server in servers for arrival in server.arrivals if arrival.command == "start"]

        urls.append(f"http://127.0.0.1:{closed.getsockname()[1]}")
        rollout = {"backend": "simulated", "targets": {"urls": urls}, "options": {"auth": "none"}}
        config.write_text(json.dumps({"roles": {"rollout": rollout}}))
        result = cli("check", config)
        assert (result.exit_code, "auth applies to servers that load this config" in join_lines(result.output)) == (
            0,
            True,
        )
        result = cli("check", config, "--connect", "--json")
    assert result.exit_code == 1
    (problem,) = [check for check in json.loads(result.stdout)["checks"] if not check["ok"]]
    assert problem["what"] == "roles.rollout.targets"
    assert problem["detail"].startswith(f"1 of 3 cannot be reached. {urls[-1]}: ")
