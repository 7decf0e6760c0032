"""Corrupt and hostile run directories. Each fault is reported and does not affect other captures."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from typer.testing import CliRunner

from profdeck import Profiler
from profdeck.cli import app
from profdeck.verification.report_model import RunReport
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.inputs.sources import find_sources

pytestmark = pytest.mark.usefixtures("tally")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Run with captures of the steps 1, 3 and 5."""
    profiler = Profiler.from_config(
        settings={"output": str(tmp_path), "run": "run", "steps": [1, 3, 5], "trainer.backend": "tally"}
    )
    for step in range(7):
        with profiler.capture(step):
            pass
    report = read_run(tmp_path / "run")
    assert [str(capture.status) for capture in report.captures] == ["complete"] * 3
    assert report.problems == ()
    return tmp_path / "run"


def manifest_path(run: Path, step: int = 3) -> Path:
    return run / f"step_{step:06d}" / "trainer" / f"rank_0000.step{step}.json"


def trace_path(run: Path, step: int = 3) -> Path:
    return next((run / f"step_{step:06d}" / "trainer").glob("*.trace.json*"))


def run_ls(run: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["ls", str(run), *options], env={"COLUMNS": "300"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def update_json(file: Path, **values: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def replace_with(create: Callable[[Path], object]) -> Callable[[Path], None]:
    def replace(file: Path) -> None:
        file.unlink()
        create(file)

    return replace


FAULTS: dict[str, Callable[[Path], object]] = {
    "not UTF-8": lambda file: file.write_bytes(file.read_bytes().replace(b"trainer", b"tr\xffiner", 1)),
    "nested": lambda file: file.write_text("[" * 100_000),
    "nested inside": lambda file: update_json(file, options=json.loads("[" * 900 + "]" * 900)),
    "a number": lambda file: file.write_text("3"),
    "empty": lambda file: file.write_bytes(b""),
    "a huge pid": lambda file: update_json(file, status="recording", pid=10**30),
    "a huge rank": lambda file: update_json(file, rank=10**30),
    "a million ranks": lambda file: update_json(file, expected_ranks=list(range(1_000_000))),
    "another rank": lambda file: update_json(file, rank=1),
    "another step": lambda file: update_json(file, first_step=4),
    "another role": lambda file: update_json(file, role="critic"),
    "a name that leads out": lambda file: update_json(
        file, artifacts=[{"name": "../../../etc/passwd", "kind": "trace"}]
    ),
    "a name from the root": lambda file: update_json(file, artifacts=[{"name": "/", "kind": "trace"}]),
    "a long name": lambda file: update_json(file, artifacts=[{"name": "x" * 300, "kind": "trace"}]),
    "a name with NUL": lambda file: update_json(file, artifacts=[{"name": "x\0", "kind": "trace"}]),
    "a pipe": replace_with(os.mkfifo),
    "a directory": replace_with(Path.mkdir),
    "an endless device": replace_with(lambda file: file.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("inject_fault", FAULTS.values(), ids=FAULTS.keys())
def test_corrupt_manifest_affects_only_its_rank(run: Path, inject_fault: Callable[[Path], object]) -> None:
    inject_fault(manifest_path(run))
    code, output = run_ls(run)
    assert code == 1, output
    report = read_run(run)
    assert sum(str(capture.status) == "complete" for capture in report.captures) == 2
    incomplete = [capture for capture in report.captures if str(capture.status) != "complete"]
    assert incomplete or any("rank_0000.step3" in problem for problem in report.problems)


@pytest.mark.parametrize("create", [os.mkfifo, Path.mkdir, lambda file: file.symlink_to("/dev/zero")])
def test_trace_that_is_not_a_regular_file_is_not_opened(run: Path, create: Callable[[Path], object]) -> None:
    replace_with(create)(trace_path(run))
    code, output = run_ls(run)
    assert (code, "is not a regular file" in output) == (1, True), output


@pytest.mark.parametrize("create", [os.mkfifo, Path.mkdir, lambda file: file.symlink_to("/dev/zero")])
def test_run_file_that_is_not_a_regular_file_is_not_opened(run: Path, create: Callable[[Path], object]) -> None:
    replace_with(create)(run / "run.json")
    with pytest.raises(ProfdeckError, match="cannot be read"):
        read_run(run)


@pytest.mark.parametrize("roles", [3, None, [3, {}], "trainer"])
def test_invalid_roles_in_the_run_file_do_not_hide_captures(run: Path, roles: Any) -> None:
    update_json(run / "run.json", roles=roles)
    assert len(read_run(run).captures) == 3


def test_copied_manifest_is_not_a_second_rank(run: Path) -> None:
    shutil.copy(manifest_path(run), manifest_path(run).with_name("rank_0001.step3.json"))
    code, output = run_ls(run)
    assert code == 1
    assert "rank_0001.step3.json was copied or moved" in output


def test_replaced_trace_with_another_event_count_is_reported(run: Path) -> None:
    trace = trace_path(run)
    event = {"ph": "X", "cat": "cpu_op", "name": "x", "ts": 1, "dur": 1, "pid": 1, "tid": 1}
    text = json.dumps({"traceEvents": [event]})
    size = trace.stat().st_size
    update_json(
        manifest_path(run),
        artifacts=[{"name": trace.name, "kind": "trace", "size_bytes": size, "whole": True, "events": 37}],
    )
    trace.write_text(text + " " * (size - len(text)))
    code, output = run_ls(run)
    assert code == 1
    assert "has 1 events, but" in output


def test_replaced_trace_with_another_digest_is_reported(run: Path) -> None:
    trace = trace_path(run)
    events = [{"ph": "X", "cat": "cpu_op", "name": name, "ts": 1, "dur": 1, "pid": 1, "tid": 1} for name in "xy"]
    texts = [json.dumps({"traceEvents": [event]}) for event in events]
    digest = hashlib.sha256(texts[0].encode()).hexdigest()
    artifact = {"name": trace.name, "kind": "trace", "size_bytes": len(texts[0]), "whole": True, "events": 1}
    update_json(manifest_path(run), artifacts=[artifact | {"sha256": digest}])
    trace.write_text(texts[0])
    assert "has changed since it was written" not in run_ls(run)[1]
    trace.write_text(texts[1])
    code, output = run_ls(run)
    assert code == 1
    assert "has changed since it was written: its SHA-256 differs" in output


def test_removed_step_is_reported(run: Path) -> None:
    shutil.rmtree(run / "step_000003")
    code, output = run_ls(run)
    assert code == 1
    assert "Step 3 has no files, although selected by the schedule and followed by a captured step." in output


def test_unreadable_directory_is_reported(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in (run, *run.parents):
        if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o555)
    unreadable = run / "step_000003"
    mode = unreadable.stat().st_mode
    unreadable.chmod(0)
    monkeypatch.chdir("/")
    skipped: dict[str, str] = {}
    is_root = os.geteuid() == 0  # root can read all directories
    try:
        if is_root:
            os.seteuid(65534)
        code, output = run_ls(run, "--processes", "1")  # another user may not be allowed to start Python
        sources = find_sources([run], on_left_out=lambda path, reason: skipped.update({path.name: reason}))
    finally:
        if is_root:
            os.seteuid(0)
        unreadable.chmod(mode)
    assert code == 1
    assert "step_000003 cannot be read: Permission denied." in output
    assert len(sources) == 2  # summary, diff and merge use these sources
    assert skipped == {"step_000003": "cannot be read: Permission denied"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text(max_size=300) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_random_changes_to_a_manifest_do_not_stop_the_report(run: Path, data: st.DataObject) -> None:
    file = manifest_path(run)
    document = json.loads(original_text := file.read_text())
    key = data.draw(st.sampled_from(sorted(document)))
    if data.draw(st.booleans()):
        content = json.dumps(document | {key: data.draw(VALUES)}).encode()
    else:
        position = data.draw(st.integers(0, len(original_text)))
        content = (
            original_text.encode()[:position]
            + data.draw(st.binary(max_size=4))
            + original_text.encode()[position + 1 :]
        )
    try:
        file.write_bytes(content)
        report = read_run(run)
        assert isinstance(report, RunReport)
        assert len(report.captures) >= 2
        run_ls(run)
    finally:
        file.write_text(original_text)
