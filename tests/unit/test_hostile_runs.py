"""Runs that somebody damaged, by accident or not: each costs what is damaged, is said, and never the whole run."""

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
    """A run of three captures, at the steps 1, 3 and 5."""
    profiler = Profiler.from_config(
        settings={"output": str(tmp_path), "run": "run", "steps": [1, 3, 5], "trainer.backend": "tally"}
    )
    for step in range(7):
        with profiler.capture(step):
            pass
    report = read_run(tmp_path / "run")
    assert [str(one.status) for one in report.captures] == ["complete"] * 3
    assert report.problems == ()
    return tmp_path / "run"


def manifest_of(run: Path, step: int = 3) -> Path:
    return run / f"step_{step:06d}" / "trainer" / f"rank_0000.step{step}.json"


def trace_of(run: Path, step: int = 3) -> Path:
    return next((run / f"step_{step:06d}" / "trainer").glob("*.trace.json*"))


def ls(run: Path, *options: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["ls", str(run), *options], env={"COLUMNS": "300"})
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def edit(file: Path, **changed: Any) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | changed))


def replace_by(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        file.unlink()
        make(file)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "not UTF-8": lambda file: file.write_bytes(file.read_bytes().replace(b"trainer", b"tr\xffiner", 1)),
    "nested": lambda file: file.write_text("[" * 100_000),
    "nested inside": lambda file: edit(file, options=json.loads("[" * 900 + "]" * 900)),
    "a number": lambda file: file.write_text("3"),
    "empty": lambda file: file.write_bytes(b""),
    "a huge pid": lambda file: edit(file, status="recording", pid=10**30),
    "a huge rank": lambda file: edit(file, rank=10**30),
    "a million ranks": lambda file: edit(file, expected_ranks=list(range(1_000_000))),
    "another rank": lambda file: edit(file, rank=1),
    "another step": lambda file: edit(file, first_step=4),
    "another role": lambda file: edit(file, role="critic"),
    "a name that leads out": lambda file: edit(file, artifacts=[{"name": "../../../etc/passwd", "kind": "trace"}]),
    "a name from the root": lambda file: edit(file, artifacts=[{"name": "/", "kind": "trace"}]),
    "a long name": lambda file: edit(file, artifacts=[{"name": "x" * 300, "kind": "trace"}]),
    "a name with NUL": lambda file: edit(file, artifacts=[{"name": "x\0", "kind": "trace"}]),
    "a pipe": replace_by(os.mkfifo),
    "a directory": replace_by(Path.mkdir),
    "an endless device": replace_by(lambda file: file.symlink_to("/dev/zero")),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES.keys())
def test_a_manifest_that_cannot_be_read_is_one_rank(run: Path, damage: Callable[[Path], object]) -> None:
    damage(manifest_of(run))
    code, output = ls(run)
    assert code == 1, output
    report = read_run(run)
    assert sum(str(one.status) == "complete" for one in report.captures) == 2
    bad = [one for one in report.captures if str(one.status) != "complete"]
    assert bad or any("rank_0000.step3" in problem for problem in report.problems)


@pytest.mark.parametrize("damage", [os.mkfifo, Path.mkdir, lambda file: file.symlink_to("/dev/zero")])
def test_a_trace_that_is_no_regular_file_is_not_opened(run: Path, damage: Callable[[Path], object]) -> None:
    replace_by(damage)(trace_of(run))
    code, output = ls(run)
    assert (code, "is not a regular file" in output) == (1, True), output


@pytest.mark.parametrize("damage", [os.mkfifo, Path.mkdir, lambda file: file.symlink_to("/dev/zero")])
def test_a_run_file_that_is_no_regular_file_is_not_opened(run: Path, damage: Callable[[Path], object]) -> None:
    replace_by(damage)(run / "run.json")
    with pytest.raises(ProfdeckError, match="cannot be read"):
        read_run(run)


@pytest.mark.parametrize("roles", [3, None, [3, {}], "trainer"])
def test_strange_roles_of_a_run(run: Path, roles: Any) -> None:
    edit(run / "run.json", roles=roles)
    assert len(read_run(run).captures) == 3


def test_a_copied_manifest_is_no_second_rank(run: Path) -> None:
    shutil.copy(manifest_of(run), manifest_of(run).with_name("rank_0001.step3.json"))
    code, output = ls(run)
    assert code == 1
    assert "rank_0001.step3.json is a copy" in output


def test_another_sound_trace_in_the_place_of_ours(run: Path) -> None:
    trace = trace_of(run)
    event = {"ph": "X", "cat": "cpu_op", "name": "x", "ts": 1, "dur": 1, "pid": 1, "tid": 1}
    text = json.dumps({"traceEvents": [event]})
    size = trace.stat().st_size
    edit(
        manifest_of(run),
        artifacts=[{"name": trace.name, "kind": "trace", "size_bytes": size, "whole": True, "events": 37}],
    )
    trace.write_text(text + " " * (size - len(text)))
    code, output = ls(run)
    assert code == 1
    assert "has 1 events, but" in output


def test_a_sound_trace_of_the_same_size_and_as_many_events(run: Path) -> None:
    trace = trace_of(run)
    events = [{"ph": "X", "cat": "cpu_op", "name": name, "ts": 1, "dur": 1, "pid": 1, "tid": 1} for name in "xy"]
    texts = [json.dumps({"traceEvents": [event]}) for event in events]
    digest = hashlib.sha256(texts[0].encode()).hexdigest()
    about = {"name": trace.name, "kind": "trace", "size_bytes": len(texts[0]), "whole": True, "events": 1}
    edit(manifest_of(run), artifacts=[about | {"sha256": digest}])
    trace.write_text(texts[0])
    assert "has changed since it was written" not in ls(run)[1]
    trace.write_text(texts[1])
    code, output = ls(run)
    assert code == 1
    assert "has changed since it was written: its SHA-256 differs" in output


def test_a_step_that_was_removed_is_missed(run: Path) -> None:
    shutil.rmtree(run / "step_000003")
    code, output = ls(run)
    assert code == 1
    assert "Step 3 has no files, although selected by the schedule and followed by a captured step." in output


def test_a_directory_that_cannot_be_read_is_named(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for directory in (run, *run.parents):
        if directory.stat().st_uid == os.geteuid() and directory != Path("/"):
            directory.chmod(directory.stat().st_mode | 0o555)
    closed = run / "step_000003"
    mode = closed.stat().st_mode
    closed.chmod(0)
    monkeypatch.chdir("/")
    left_out: dict[str, str] = {}
    root = os.geteuid() == 0  # who reads everything
    try:
        if root:
            os.seteuid(65534)
        code, output = ls(run, "--processes", "1")  # the user of a worker may not be allowed to start Python
        sources = find_sources([run], on_left_out=lambda path, why: left_out.update({path.name: why}))
    finally:
        if root:
            os.seteuid(0)
        closed.chmod(mode)
    assert code == 1
    assert "step_000003 cannot be read: Permission denied." in output
    assert len(sources) == 2  # as for summary, diff and merge
    assert left_out == {"step_000003": "cannot be read: Permission denied"}


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**30), 10**30) | st.text(max_size=300) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_manifest_ends_the_listing(run: Path, data: st.DataObject) -> None:
    file = manifest_of(run)
    document = json.loads(before := file.read_text())
    key = data.draw(st.sampled_from(sorted(document)))
    if data.draw(st.booleans()):
        content = json.dumps(document | {key: data.draw(VALUES)}).encode()
    else:
        at = data.draw(st.integers(0, len(before)))
        content = before.encode()[:at] + data.draw(st.binary(max_size=4)) + before.encode()[at + 1 :]
    try:
        file.write_bytes(content)
        report = read_run(run)
        assert isinstance(report, RunReport)
        assert len(report.captures) >= 2
        ls(run)
    finally:
        file.write_text(before)
