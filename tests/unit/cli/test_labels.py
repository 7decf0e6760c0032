"""Tests that traces of different runs or programs are not treated as ranks of the same job."""

from __future__ import annotations

import gzip
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from gpu_job import GpuJob
from profdeck_traces.analysis.model import RunSummary
from profdeck_traces.analysis.rank_labels import labels_of
from profdeck_traces.findings.overview import about, teams_of
from profdeck_traces.loading import summarise
from profdeck_traces.report.page import write_page

Cli = Callable[..., Result]
Record = Callable[..., Path]


def read_run(*paths: Path) -> RunSummary:
    run, errors = summarise(paths)
    assert not errors
    return run


@pytest.fixture
def two_runs(record: Record, tmp_path: Path) -> list[Path]:
    """Return two runs with equal captures, roles and ranks."""
    first = record(3, ranks=(0, 1), world_size=2)
    return [Path(shutil.copytree(first, tmp_path / "other" / name)) for name in ("main", "change")]


def test_two_runs_are_two_teams(two_runs: list[Path], cli: Cli) -> None:
    run = read_run(*two_runs)
    teams = teams_of(run)
    assert [team.name for team in teams] == ["trainer of main", "trainer of change"]
    assert [len(team.views) for team in teams] == [2, 2]
    assert about(run, teams).startswith("2 runs, 2 captures, 4 ranks of trainer")
    assert sorted(labels_of(run.ranks).values()) == [
        f"trainer rank {rank} of {name}" for rank in (0, 1) for name in ("change", "main")
    ]
    assert "no ranks of one program" not in cli("summary", *two_runs, "--full").stdout
    page = write_page([run], ["both"])
    for path in (rank.path for rank in run.ranks):
        assert page.count(f">{path}<") == 1


def test_runs_with_the_same_name_are_labelled_by_directory(two_runs: list[Path], tmp_path: Path) -> None:
    copy = Path(shutil.copytree(two_runs[0], tmp_path / "elsewhere" / "main"))
    labels = labels_of(read_run(two_runs[0], copy).ranks)
    assert len(set(labels.values())) == len(labels) == 4


def test_run_is_found_from_its_subdirectories(two_runs: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    (step,) = two_runs[0].glob("step_*")
    assert {rank.run for rank in read_run(step).ranks} == {str(two_runs[0])}
    monkeypatch.chdir(step / "trainer")
    assert {rank.run for rank in read_run(Path()).ranks} == {str(two_runs[0])}


def test_ranks_of_unrelated_jobs_are_not_compared(tmp_path: Path) -> None:
    """Regression test: for such a directory, rank 1 was reported as slow."""
    for name, job in {"a": GpuJob(), "b": GpuJob(load_us=90_000), "c": GpuJob(ranks=2, slow_rank=1)}.items():
        for trace in job.write(tmp_path / name).iterdir():
            shutil.move(trace, tmp_path / f"{name}-{trace.name}")
        (tmp_path / name).rmdir()
    run = read_run(tmp_path)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert sorted(labels_of(run.ranks).values()) == names
    assert sorted(team.name for team in teams_of(run)) == names
    assert "slow-stage" not in {finding.rule for finding in run.findings}
    assert about(run, teams_of(run)).startswith("4 traces")


def test_different_world_sizes_are_different_jobs(tmp_path: Path) -> None:
    directory = GpuJob(ranks=2).write(tmp_path / "job")
    assert [team.name for team in teams_of(read_run(directory))] == [""]
    second = directory / "rank1.trace.json.gz"
    document = json.loads(gzip.decompress(second.read_bytes()))
    document["distributedInfo"]["world_size"] = 8
    second.write_bytes(gzip.compress(json.dumps(document).encode()))
    assert len(teams_of(read_run(directory))) == 2


def test_timeline_has_no_link_to_a_trace_without_events(tmp_path: Path) -> None:
    directory = GpuJob(ranks=2, slow_rank=1).write(tmp_path / "job")
    (directory / "rank0.trace.json.gz").write_bytes(gzip.compress(b'{"traceEvents": [{"ph": "M", "name": "x"}]}'))
    run, _ = summarise([directory], buckets=256)
    page = write_page([run], ["job"])
    data = json.loads(page.partition('id="data">')[2].partition("</script>")[0])
    (rank,) = data["ranks"]
    assert rank["label"] == "rank 1"
    assert 'data-rank="0"' in page
    assert 'data-rank="1"' not in page


def test_steps_of_several_captures_are_counted_together(record: Record, tmp_path: Path) -> None:
    run = record(3, 5, 7)
    for step, trace in enumerate(sorted(run.rglob("*.trace.json*")), 1):
        GpuJob(steps=1).write(tmp_path / str(step))
        shutil.copy(tmp_path / str(step) / "rank0.trace.json.gz", trace)
        rules = {finding.rule for finding in read_run(*sorted(run.glob("step_*"))[:step]).findings}
        assert ("few-steps" in rules) is (step < 3)


def test_only_some_of_many_traces_are_shown(tmp_path: Path, cli: Cli) -> None:
    for number in range(20):
        (trace,) = GpuJob(steps=3).write(tmp_path / str(number)).iterdir()
        shutil.move(trace, tmp_path / f"{number}.trace.json.gz")
    output = cli("summary", tmp_path).stdout
    assert output.count("steps on the host") == 4
    assert "16 more traces with --full." in output
    assert cli("summary", tmp_path, "--full").stdout.count("steps on the host") == 20
    run, _ = summarise([tmp_path], buckets=64)
    page = write_page([run], ["many"])
    assert page.count("<h3>Device time per") == 16
    assert "4 more traces" in page
    assert len(page) < 1_500_000
