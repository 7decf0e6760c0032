"""Tests shared by all engines' servers: profdeck's routes, the command line and shutdown during a capture.

The test module of each engine defines subclasses of `ServerContract` and `EndContract`, and the fixture ``server``.
"""

from __future__ import annotations

import gzip
import json
import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import plain_http
import pytest
from engine_contract import run_commands
from pages import Shell
from servers import TOKEN, busy, call, command_line, wait_for_command, wait_for_group

from profdeck.records.manifest import read_manifest
from profdeck.records.status import Status
from profdeck.verification.run_report import read_run


def status(server: Any) -> Any:
    """Return the status of the first rank."""
    return call(server, "GET", "status").json()["answer"]["ranks"][0]


def stop(server: Any, name: str) -> Any:
    """Stop a capture. Return the reply of the first rank, which is sent after its files are complete."""
    answer = call(server, "POST", "stop", {"request": name})
    assert answer.is_success, answer.text
    return answer.json()["answer"]["ranks"][0]


def metrics(server: Any) -> dict[str, float]:
    """Return profdeck's values in a server's ``/metrics``, keyed by name and label."""
    from prometheus_client.parser import text_string_to_metric_families

    response = plain_http.get(f"{server.url}/metrics").raise_for_status()
    return {
        " ".join(
            [sample.name, *(value for name, value in sample.labels.items() if name in {"status", "reason"})]
        ): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
        if sample.name.startswith("profdeck_") and not sample.name.endswith("_created")
    }


def steps(path: Path) -> list[str]:
    """Return the names of profdeck's iteration annotations in a trace."""
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return [event["name"] for event in events if event["name"].startswith("ProfilerStep#")]


class ServerContract:
    """Tests of an engine's server. Subclasses set the values that depend on the engine."""

    libraries: ClassVar[set[str]]
    """Packages whose versions must be in the manifests of the ranks."""
    page: ClassVar[Path]
    """How-to page of the engine."""
    url: ClassVar[str]
    """URL of the server on the page."""
    skipped: ClassVar[str]
    """Skip reason of the page's blocks with commands for a server."""
    runs: ClassVar[dict[str, set[str]]]
    """Roles that record in each run of these commands."""

    @staticmethod
    def kinds(path: Path) -> list[str]:
        """Return the batch kinds in a trace, according to the engine's own annotations."""
        raise NotImplementedError

    @pytest.fixture
    def load(self, server: Any) -> Iterator[None]:
        """Keep the server busy with concurrent requests during a test."""
        with busy(server, clients=3):
            yield

    @pytest.mark.usefixtures("load")
    def test_command_line_captures_five_decode_iterations(self, server: Any, root: Path) -> None:
        process = command_line(server, "--batch-kind", "decode", "--iterations", "5", "--set", "run=five")
        out, err = wait_for_command(process, server)
        assert process.returncode == 0, err
        assert re.search(r"^0 +server +decode +0 +complete", out, re.MULTILINE)
        assert "operator" in out
        report = read_run(root / "five")
        assert report.status is Status.COMPLETE
        (target,) = report.targets
        assert target.target == server.url
        # Other batches separate the decode batches, and each sequence of decode batches is a separate capture.
        artifacts = [rank.artifacts for capture in report.captures for rank in capture.ranks]
        assert [kind for (artifact,) in artifacts for kind in self.kinds(artifact.path)] == ["decode"] * 5

    @pytest.mark.usefixtures("load")
    def test_json_output_and_options(self, server: Any) -> None:
        process = command_line(
            server, "--iterations", "2", "--skip", "1", "--json", "--set", "server.options.record_shapes=true"
        )
        out, err = wait_for_command(process, server)
        assert process.returncode == 0, err
        document = json.loads(out)
        assert document["complete"] is True
        (capture,) = document["ls"]["captures"]
        (rank,) = capture["ranks"]
        (artifact,) = rank["artifacts"]
        assert artifact["iterations"] == [1, 2]
        (path,) = Path(document["run"]).rglob("rank_0000.step0.trace.json.gz")
        assert len(steps(path)) == 2
        assert '"Input Dims"' in gzip.decompress(path.read_bytes()).decode()
        manifest = read_manifest(path.with_name("rank_0000.step0.json"))
        assert manifest.stall_s is not None
        assert manifest.stall_s > 0
        assert manifest.versions.keys() >= self.libraries
        assert manifest.options["record_shapes"] is True

    @pytest.mark.parametrize("stage", ["prefill", "decode"])
    def test_window_by_stage_contains_the_selected_batches(self, server: Any, stage: str) -> None:
        request = {
            "id": "stage",
            "run": f"exact-{stage}",
            "batch_kinds": [stage],
            "iterations": {"count": 3, "skip": 1},
        }
        assert call(server, "POST", "start", request).is_success
        for index in range(6):
            server.complete(f"prompt {index}", tokens=3)
        reply = stop(server, "stage")
        assert (reply["state"], reply["iterations"], reply["problems"]) == ("ended", 3, [])
        kinds = [kind for capture in reply["captures"] for file in capture["files"] for kind in self.kinds(Path(file))]
        assert kinds == [stage] * 3

    def test_capture_with_too_few_iterations_is_partial(self, server: Any) -> None:
        process = command_line(server, "--iterations", "5", "--timeout", "0.5")
        out, _ = wait_for_command(process, server)
        assert process.returncode == 1
        assert "Only 0 of 5 iterations ran before the stop." in out
        assert status(server)["state"] == "ended"

    def test_capture_ends_with_the_work_of_the_engine(self, server: Any) -> None:
        assert call(server, "POST", "start", {"id": "work", "run": "work", "iterations": {"count": 1000}}).is_success
        server.complete(tokens=6)
        time.sleep(0.5)  # idle time, which must not count towards the last step
        reply = stop(server, "work")
        assert (reply["state"], reply["iterations"], reply["problems"]) == ("ended", 6, [])
        (capture,) = reply["captures"]
        manifest = read_manifest(Path(capture["manifest"]))
        assert manifest.status is Status.COMPLETE
        assert "The engine finished all requests after 6 of 1000 iterations." in manifest.notes
        # The last step in the trace ends with its iteration, before the idle time.
        (file,) = capture["files"]
        events = json.loads(gzip.decompress(Path(file).read_bytes()))["traceEvents"]
        last = max((event for event in events if event["name"].startswith("ProfilerStep#")), key=lambda one: one["ts"])
        assert last["dur"] < 400_000

    def test_routes_start_and_stop_captures_and_return_files(self, server: Any, root: Path) -> None:
        assert server.complete()
        started = call(server, "POST", "start", {"id": "step0", "run": "curl", "iterations": {"count": 3}})
        assert started.json()["answer"]["ranks"][0]["state"] == "armed"
        second = call(server, "POST", "start", {"id": "second"})
        assert second.status_code == 409
        assert "while capture step0 is armed" in second.json()["answer"]["ranks"][0]["error"]
        # A refused start does not stop the capture, even if both have the same name.
        process = command_line(server, "--iterations", "5", "--set", "run=refused")
        _, err = wait_for_command(process, server)
        assert (process.returncode, "is armed in this engine" in err) == (1, True), err
        server.complete()
        stopped = call(server, "POST", "stop", {"request": "step0"}).json()
        (capture,) = stopped["answer"]["ranks"][0]["captures"]
        assert (capture["status"], capture["problems"]) == ("complete", [])
        (file,) = capture["files"]
        assert Path(file).is_relative_to(root / "curl")
        assert Path(file).stat().st_size == capture["size_bytes"]
        assert len(self.kinds(Path(file))) == 3
        status_reply = call(server, "GET", "status").json()
        assert (status_reply["answer"], status_reply["server"]) == (
            stopped["answer"],
            stopped["server"] | {"writable": True},
        )
        # Stopping an earlier capture by ID returns the result of that capture and leaves the current capture running.
        call(server, "POST", "start", {"id": "third", "run": "curl"})
        assert stop(server, "step0")["captures"] == [capture]
        assert call(server, "GET", "status").json()["answer"]["ranks"][0]["state"] == "armed"
        assert stop(server, "third")["state"] == "ended"
        assert not list(root.glob("*/.replies-*"))

    def test_server_metrics_count_captures(self, server: Any, root: Path) -> None:
        before = metrics(server)
        assert before["profdeck_active"] == 0
        call(server, "POST", "start", {"id": "measured", "run": "measured", "iterations": {"count": 2}})
        assert call(server, "POST", "start", {"id": "second"}).status_code == 409
        during = metrics(server)
        server.complete()
        stop(server, "measured")
        after = metrics(server)
        increases = {name: after[name] - before[name] for name in after if name.startswith("profdeck_")}
        manifest = read_manifest(next((root / "measured").rglob("rank_0000.measured.json")))
        assert (during["profdeck_active"], after["profdeck_active"]) == (1, 0)
        assert {name: amount for name, amount in increases.items() if amount} == {
            "profdeck_captures_total complete": 1,
            "profdeck_refusals_total already_active": 1,
            "profdeck_capture_size_bytes_count": 1,
            "profdeck_capture_size_bytes_sum": sum(record.size_bytes for record in manifest.artifacts),
            "profdeck_capture_stall_seconds_count": 1,
            "profdeck_capture_stall_seconds_sum": pytest.approx(manifest.stall_s, abs=1e-6),
            "profdeck_capture_duration_seconds_count": 1,
            "profdeck_capture_duration_seconds_sum": pytest.approx(
                (manifest.ended_ns - manifest.started_ns) / 1e9, abs=1e-3
            ),
        }

    @pytest.mark.parametrize(
        ("body", "text"),
        [
            ({"output": "/tmp"}, "is not below"),
            ({"output": "../.."}, "is not below"),
            ({"run": "../up"}, "run"),
            ({"id": "a/b"}, "id"),
            ({"role": "../x"}, "role"),
            ({"batch_kinds": ["prefil"]}, "Did you mean 'prefill'?"),
            ({"iteration": 5}, "Did you mean 'iterations'?"),
            ({"ranks": "some"}, "ranks"),
            ({"first_step": True}, "first_step"),
            ({"first_step": 10**400}, "first_step"),
            ({"ranks": [10**400]}, "ranks"),
            ({"id": "a\0b"}, "id"),
            ({"output": "\0"}, "output"),
            ({"iterations": {"first": 5, "count": 1}}, "Use skip"),
            ([1], "not a JSON object"),
        ],
    )
    def test_invalid_starts_are_refused(self, server: Any, body: Any, text: str) -> None:
        answer = call(server, "POST", "start", body)
        assert (answer.status_code, text in answer.json()["error"]) == (400, True), answer.text

    def test_invalid_stops_are_refused(self, server: Any) -> None:
        assert call(server, "POST", "stop", {}).status_code == 400
        for body in ({"request": "x", "wait_s": 1e400}, {"request": "x", "wait_s": -1}):
            content, headers = json.dumps(body), {"Authorization": f"Bearer {TOKEN['PROFDECK_TOKEN']}"}
            answer = plain_http.post(f"{server.url}/profdeck/stop", content=content, headers=headers)
            assert (answer.status_code, "wait_s: expected a number of seconds" in answer.json()["error"]) == (400, True)

    def test_oversized_body_is_refused(self, server: Any) -> None:
        assert call(server, "POST", "start", {"id": "x" * (1 << 20)}).status_code == 413

    @pytest.mark.parametrize(
        ("options", "text"),
        [({"recordshapes": True}, "Did you mean 'record_shapes'?"), ({"activities": ["cuda"]}, "cuda")],
    )
    def test_refusal_by_ranks_is_in_the_reply(self, server: Any, options: Any, text: str) -> None:
        answer = call(server, "POST", "start", {"id": "refused", "run": "refused", "options": options})
        assert (answer.status_code, text in answer.text) == (409, True), answer.text
        assert status(server)["state"] in {"idle", "ended"}
        assert server.complete()

    def test_requests_without_the_token_are_refused(self, server: Any) -> None:
        for token in (None, "wrong", ""):
            for method, command in (("GET", "status"), ("POST", "start"), ("POST", "stop")):
                answer = call(server, method, command, {}, token)
                assert answer.status_code == 401
                assert "PROFDECK_TOKEN" in answer.json()["error"]
        process = command_line(server, "--iterations", "1", PROFDECK_TOKEN="wrong")  # noqa: S106  # not a real token
        _, err = wait_for_command(process, server)
        assert (process.returncode, "401" in err) == (1, True)

    def test_commands_of_the_guide_work(self, server: Any, root: Path, tmp_path: Path) -> None:
        shell = Shell(tmp_path)
        shell.environment |= TOKEN
        run_commands(self.page, self.url, self.skipped, shell, server)
        for name, roles in self.runs.items():
            assert read_run(root / name).status is Status.COMPLETE
            assert {path.name for path in (root / name / "step_000000").iterdir()} == roles
        assert (root / "merged" / "step_000000" / "server" / "target.step0.merged.json.gz").is_file()


class EndContract:
    """Test for shutdown during a capture. Define the subclass last in its module, because the test stops the server."""

    engine: ClassVar[dict[str, Any]] = {}
    """Engine options in the capture request."""
    roles: ClassVar[set[str]]
    """Roles of the processes that record with these options."""

    def test_server_shutdown_during_a_capture_keeps_its_traces(self, server: Any, root: Path) -> None:
        body = {"id": "last", "run": "ended", "role": "chat", "engine": self.engine}
        assert call(server, "POST", "start", body).is_success
        server.complete()
        server.process.send_signal(signal.SIGTERM)
        wait_for_group(server.process)
        report = read_run(root / "ended")
        assert {capture.role for capture in report.captures} == self.roles
        for capture in report.captures:
            (rank,) = capture.ranks
            assert (rank.status, rank.artifacts[0].whole) == (Status.PARTIAL, True), capture
            assert rank.events
