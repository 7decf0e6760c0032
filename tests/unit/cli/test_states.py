"""Tests for consistent rank statuses in `profdeck ls` and the commands that read traces."""

from __future__ import annotations

import errno
import gzip
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from typer.testing import Result

from profdeck.records.manifest import is_manifest
from profdeck.verification.run_report import read_run
from profdeck_traces.base.errors import TraceError
from profdeck_traces.base.files import sha256_of
from profdeck_traces.loading import summarise

Cli = Callable[..., Result]
Record = Callable[..., Path]


def read_statuses(cli: Cli, run: Path) -> tuple[dict[tuple[str, int], str], dict[tuple[str, int], str]]:
    """Return the status by capture and rank, according to `profdeck ls` and to `profdeck summary`."""
    report = json.loads(cli("ls", run, "--json").stdout)
    by_ls = {
        (capture["id"], rank["rank"]): rank["status"] for capture in report["captures"] for rank in capture["ranks"]
    }
    summary = json.loads(cli("summary", run, "--json").stdout)
    by_summary = {(entry["capture"], entry["rank"]): entry["status"] for entry in summary["captures"]}
    return by_ls, by_summary


def add_digests(run: Path) -> None:
    """Add the SHA-256 digests of the artifacts to the manifests of a run."""
    for file in run.rglob("rank_*.json"):
        if is_manifest(file):
            document = json.loads(file.read_text())
            for artifact in document["artifacts"]:
                artifact["sha256"] = sha256_of(file.parent / artifact["name"])
            file.write_text(json.dumps(document))


@pytest.mark.parametrize("damage", ["none", "other content", "zeros", "cut", "gone", "empty", "manifest gone", "dead"])
def test_ls_and_summary_report_the_same_statuses(cli: Cli, record: Record, damage: str) -> None:
    run = record(3, 5, ranks=(0, 1), world_size=2)
    trace = next(run.rglob("rank_0001*step3.trace.json*"))
    manifest = next(run.rglob("rank_0001*step3.json"))
    add_digests(run)
    match damage:
        case "other content":
            change_content(trace)
        case "zeros":
            trace.write_bytes(bytes(trace.stat().st_size))
        case "cut":
            truncate(trace)
        case "gone":
            trace.unlink()
        case "empty":
            trace.write_bytes(b"")
        case "manifest gone":
            manifest.unlink()
        case "dead":
            document = json.loads(manifest.read_text())
            manifest.write_text(json.dumps(document | {"status": "recording", "artifacts": [], "pid": 2**22 + 1}))
    by_ls, by_summary = read_statuses(cli, run)
    assert by_summary == by_ls
    assert (by_ls["step3", 1] == "complete") is (damage == "none")
    assert by_ls["step5", 1] == "complete"


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-20])


def change_content(path: Path) -> None:
    """Rename events, which changes the digest but not the validity of the trace."""
    is_compressed = path.read_bytes().startswith(b"\x1f\x8b")
    text = gzip.decompress(path.read_bytes()) if is_compressed else path.read_bytes()
    text = text.replace(b"paper::fold", b"paper::tear")
    path.write_bytes(gzip.compress(text) if is_compressed else text)


def remove_events(path: Path) -> None:
    path.write_text('{"traceEvents": [{"ph": "X", "name": "a", "ts": 1, "dur": 1, "pid": 1, "tid": 1}]}')


def replace_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def copy_to_other_rank(path: Path) -> None:
    shutil.copy(path, path.with_name(path.name.replace("rank_", "rank_9")))


DAMAGES: list[Callable[[Path], object]] = [
    truncate,
    change_content,
    remove_events,
    replace_by_link,
    copy_to_other_rank,
    Path.unlink,
    lambda path: path.write_bytes(b""),
    lambda path: path.write_bytes(bytes(path.stat().st_size)),
    lambda path: (path.unlink(), os.mkfifo(path)),
    lambda path: path.write_bytes(b"{}"),
]


@given(
    damages=st.lists(st.tuples(st.integers(0, 7), st.sampled_from(DAMAGES)), min_size=1, max_size=4),
)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_statuses_agree_for_combinations_of_damages(
    record: Record, tmp_path: Path, damages: list[tuple[int, Callable[[Path], object]]]
) -> None:
    recorded = tmp_path / "profiles" / "job"
    if not recorded.exists():
        add_digests(record(3, 5, ranks=(0, 1), world_size=2))
    run = tmp_path / "damaged"
    shutil.rmtree(run, ignore_errors=True)
    shutil.copytree(recorded, run)
    files = sorted(path for path in run.rglob("rank_*") if path.is_file())
    assert len(files) == 8
    for number, damage in damages:
        if files[number].is_file():
            damage(files[number])
    report = read_run(run)
    by_ls = {(capture.id, rank.rank): str(rank.status) for capture in report.captures for rank in capture.ranks}
    try:
        summary, _ = summarise([run])
    except TraceError:  # no trace remains
        return
    assert {(entry.capture, entry.rank): entry.status for entry in summary.captures} == by_ls


@pytest.mark.parametrize("directory", ["trainer", "."])
def test_copied_manifests_are_ignored_with_relative_paths(
    record: Record, monkeypatch: pytest.MonkeyPatch, directory: str
) -> None:
    role = record(3, ranks=(0, 1), world_size=2) / "step_000003" / "trainer"
    shutil.copy(role / "rank_0000.step3.json", role / "rank_9000.step3.json")
    monkeypatch.chdir(role if directory == "." else role.parent)
    summary, _ = summarise([Path(directory)])
    assert [(entry.rank, entry.status) for entry in summary.captures] == [(0, "complete"), (1, "complete")]


def test_run_inside_another_run_is_ignored(cli: Cli, record: Record) -> None:
    run = record(3, ranks=(0, 1), world_size=2)
    shutil.copytree(run, run / "backup")
    shutil.copy(run / "run.json", run / "step_000003")
    by_ls, by_summary = read_statuses(cli, run)
    assert by_summary == by_ls == {("step3", 0): "complete", ("step3", 1): "complete"}
    summary = cli("summary", run)
    assert "1 capture, 2 ranks" in " ".join(summary.stdout.split())
    assert "backup is a different run than" in " ".join(summary.stderr.split())
    assert json.loads(cli("trend", run, "--json").stdout)["series"][0]["points"][0]["ranks"] == 2


def test_linked_step_directories_are_not_read(cli: Cli, record: Record, tmp_path: Path) -> None:
    run = record(3, 5, ranks=(0, 1), world_size=2)
    (run / "step_000005").rename(tmp_path / "elsewhere")
    (run / "step_000005").symlink_to(tmp_path / "elsewhere")
    shutil.copytree(run / "step_000003" / "trainer", tmp_path / "role")
    (run / "step_000003" / "linked").symlink_to(tmp_path / "role")
    by_ls, by_summary = read_statuses(cli, run)
    assert by_summary == by_ls == {("step3", 0): "complete", ("step3", 1): "complete"}
    ls_output, summary_errors = cli("ls", run).stdout, cli("summary", run).stderr
    for name in ("step_000005", "step_000003/linked"):
        assert f"{name} cannot be read: it is a symbolic link." in " ".join(ls_output.split())
        assert f"{name} cannot be read: it is a symbolic link." in " ".join(summary_errors.split())


def ranks_and_warnings(cli: Cli, *paths: object) -> tuple[dict[tuple[str, int], str], int, str]:
    """Return the statuses in `profdeck summary`, the number of its ranks, and its warnings."""
    result = cli("summary", *paths, "--json")
    document = json.loads(result.stdout)
    by_rank = {(capture["capture"], capture["rank"]): capture["status"] for capture in document["captures"]}
    assert len(by_rank) == len(document["captures"])
    return by_rank, len(document["ranks"]), " ".join(result.stderr.split())


@pytest.mark.parametrize("path", [".", "..", "../trainer", "../../step_000003", "../.."])
def test_missing_rank_is_reported_for_any_path_below_a_run(
    cli: Cli, record: Record, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    role = record(3, ranks=(0, 1), world_size=2) / "step_000003" / "trainer"
    for file in role.glob("rank_0001*"):
        file.unlink()
    monkeypatch.chdir(role)
    by_rank, count, _ = ranks_and_warnings(cli, path)
    assert (by_rank, count) == ({("step3", 0): "complete", ("step3", 1): "missing"}, 1)


def copy_step(run: Path) -> None:
    shutil.copytree(run / "step_000003", run / "step_000003.bak")


def copy_step_to_backup(run: Path) -> None:
    shutil.copytree(run / "step_000003", run / "backup" / "step_000003")


def copy_step_into_role(run: Path) -> None:
    shutil.copytree(run / "step_000003", run.with_name("step_000003"))
    run.with_name("step_000003").rename(run / "step_000003" / "trainer" / "copy")


def copy_run_without_run_file(run: Path) -> None:
    shutil.copytree(run, run.with_name("other"))
    (run.with_name("other") / "run.json").unlink()
    run.with_name("other").rename(run / "step_000003" / "other")


def copy_manifest(run: Path) -> None:
    role = run / "step_000003" / "trainer"
    shutil.copy(role / "rank_0000.step3.json", role / "rank_0000.copy.step3.json")
    shutil.copy(role / "rank_0000.step3.json", role / "rank_0000 2.step3.json")


def copy_run_without_a_manifest(run: Path) -> None:
    shutil.copytree(run, run.with_name("other"))
    next(run.with_name("other").rglob("rank_0001.step3.json")).unlink()
    run.with_name("other").rename(run / "other")


@pytest.mark.parametrize(
    "copy",
    [
        copy_step,
        copy_step_to_backup,
        copy_step_into_role,
        copy_run_without_run_file,
        copy_manifest,
        copy_run_without_a_manifest,
    ],
)
def test_copies_in_a_run_do_not_count(cli: Cli, record: Record, copy: Callable[[Path], None]) -> None:
    run = record(3, ranks=(0, 1), world_size=2)
    expected = {("step3", 0): "complete", ("step3", 1): "complete"}
    copy(run)
    by_ls, _ = read_statuses(cli, run)
    by_rank, count, warnings = ranks_and_warnings(cli, run)
    assert by_ls == by_rank == expected
    assert count == 2
    assert copy is copy_manifest or "contains copies" in warnings or "is a different run" in warnings
    (series,) = [entry for entry in json.loads(cli("trend", run, "--json").stdout)["series"] if "step" in entry["what"]]
    assert [point["ranks"] for point in series["points"]] == [2]
    assert len(json.loads(cli("ls", run, "--json").stdout)["captures"][0]["ranks"]) == 2


def test_moved_step_directory_is_reported_everywhere(cli: Cli, record: Record) -> None:
    run = record(3, 5, ranks=(0, 1), world_size=2)
    (run / "step_000003").rename(run / "step_000004")
    by_ls, by_summary = read_statuses(cli, run)
    assert by_ls == by_summary == {("step5", 0): "complete", ("step5", 1): "complete"}
    assert "was copied or moved: its contents belong to another rank, step or role" in cli("ls", run, "--json").stdout
    assert "contains copies" in " ".join(cli("summary", run).stderr.split())


def test_order_and_spelling_of_paths_do_not_matter(cli: Cli, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(3, ranks=(0, 1), world_size=2)
    shutil.copytree(run, run.with_name("other"))
    other_run = run.with_name("other").rename(run / "other")
    (run.parent / "link").symlink_to(run)
    for paths in ((run, other_run), (other_run, run)):
        result = cli("summary", *paths, "--json")
        document = json.loads(result.stdout)
        assert (len(document["captures"]), len(document["ranks"]), result.stderr) == (4, 4, "")
    monkeypatch.chdir(run.parent)
    for paths in ((run, run.name), ("link", run), (run / "step_000003", run), (run.name, f"{run.name}/.")):
        _, count, _ = ranks_and_warnings(cli, *paths)
        assert count == 2


def test_output_directory_contains_the_runs_that_ls_lists(cli: Cli, record: Record) -> None:
    run = record(3, ranks=(0, 1), world_size=2)
    copy_step_to_backup(run)
    shutil.copytree(run, run.with_name("other"))
    run.with_name("other").rename(run / "other")
    _, count, warnings = ranks_and_warnings(cli, run.parent)
    assert count == 2
    assert "is a different run" in warnings
    assert "contains copies" in warnings


def test_silent_roles_are_those_of_each_run(cli: Cli, record: Record) -> None:
    first = record(3)
    second = first.with_name("second")
    shutil.copytree(first, second)
    for run, roles in ((first, ["trainer", "critic"]), (second, ["trainer"])):
        document = json.loads((run / "run.json").read_text())
        (run / "run.json").write_text(json.dumps(document | {"roles": roles}))
    for paths in ((first,), (first, second), (first.parent,)):
        assert json.loads(cli("summary", *paths, "--json").stdout)["silent_roles"] == ["critic"]


def test_run_that_cannot_be_read_is_no_empty_run(cli: Cli, record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    run = record(3)
    iterdir = Path.iterdir

    def deny(path: Path) -> Iterator[Path]:
        if path == run:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return iterdir(path)

    monkeypatch.setattr(Path, "iterdir", deny)
    result = cli("ls", run)
    assert (result.exit_code, "cannot be read: Permission denied." in result.stderr) == (4, True)


def test_diff_reports_incomplete_captures(cli: Cli, record: Record, tmp_path: Path) -> None:
    run = record(3, 5, ranks=(0, 1), world_size=2)
    damaged = tmp_path / "damaged"
    shutil.copytree(run, damaged)
    remove_events(next(damaged.rglob("rank_0001*step3.trace.json")))
    result = cli("diff", run, damaged)
    assert "damaged has incomplete captures (1 partial). For details: profdeck ls" in " ".join(result.stderr.split())
    assert "incomplete captures" not in cli("diff", run, run).stderr


def test_named_pipe_is_reported_and_not_read(cli: Cli, record: Record) -> None:
    run = record(3, ranks=(0, 1), world_size=2)
    trace = next(run.rglob("rank_0001*step3.trace.json"))
    trace.unlink()
    os.mkfifo(trace)
    assert "is not a regular file" in cli("summary", run).stderr
    result = cli("summary", trace)
    assert (result.exit_code, "is not a regular file." in result.stderr) == (4, True)


def test_run_with_a_corrupt_run_file_is_listed(cli: Cli, record: Record) -> None:
    run = record(3)
    (run / "run.json").write_text('{"roles": {"a": 1}, "config": [], "created_ns": "x"}')
    assert json.loads(cli("ls", run, "--json").stdout)["captures"]
