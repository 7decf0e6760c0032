from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ascend_files
import msgspec
import pytest
from typer.testing import Result

Cli = Callable[..., Result]
Record = Callable[..., Path]


def read_events(path: Path) -> list[dict[str, Any]]:
    data = path.read_bytes()
    events: list[dict[str, Any]] = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)["traceEvents"]
    return events


def read_labels(path: Path) -> list[str]:
    """Return the process names in a trace. They start with the label of a rank."""
    return sorted({event["args"]["name"] for event in read_events(path) if event["name"] == "process_name"})


@pytest.mark.parametrize("name", ["all.json", "all.json.gz"])
def test_processes_in_a_merged_run_are_labelled_by_rank(cli: Cli, record: Record, tmp_path: Path, name: str) -> None:
    run = record(3, ranks=(0, 1), world_size=2)
    record(3, role="rollout", replica=1)

    result = cli("merge", run, "-o", tmp_path / name)

    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{tmp_path / name}: 3 traces, ")
    assert result.stdout.endswith("; clocks aligned by: none\n")
    labels = read_labels(tmp_path / name)
    assert [label.split(":")[0] for label in labels if label.startswith("rollout")] == ["rollout/1 rank 0"] * (
        sum(label.startswith("rollout") for label in labels)
    )
    assert {label.split(":")[0] for label in labels} == {"rollout/1 rank 0", "trainer rank 0", "trainer rank 1"}


def test_json_document_describes_the_merged_trace(cli: Cli, record: Record, tmp_path: Path) -> None:
    run = record(3)
    document = json.loads(cli("merge", run, "-o", tmp_path / "all.json", "--json").stdout)
    (trace,) = run.rglob("*.trace.json")
    assert document == {
        "path": str(tmp_path / "all.json"),
        "traces": [str(trace)],
        "align": "none",
        "unaligned": 0,
        "clock_error_us": None,
        "events": sum("ph" in event for event in read_events(tmp_path / "all.json")),
        "size_bytes": (tmp_path / "all.json").stat().st_size,
        "problems": [],
        "unread": 0,
    }


def test_role_and_rank_options_select_traces(cli: Cli, record: Record, tmp_path: Path) -> None:
    run = record(3, ranks=(0, 1, 2), world_size=3)
    record(3, role="ref")

    cli("merge", run, "-o", tmp_path / "all.json", "--role", "trainer", "--rank", "1..2")
    assert {label.split(":")[0] for label in read_labels(tmp_path / "all.json")} == {"trainer rank 1", "trainer rank 2"}

    result = cli("merge", run, "-o", tmp_path / "none.json", "--role", "critic")
    assert result.exit_code == 4
    assert "Available: ref rank 0, trainer rank 0, trainer rank 1, trainer rank 2." in result.stderr
    assert not (tmp_path / "none.json").exists()


def test_category_and_steps_options_select_events(cli: Cli, record: Record, tmp_path: Path) -> None:
    run = record(3)
    result = cli("merge", run, "-o", tmp_path / "part.json", "--category", "kernel")
    assert result.exit_code == 0
    assert {event["cat"] for event in read_events(tmp_path / "part.json") if event["ph"] == "X"} == {"kernel"}
    missing = cli("merge", run, "-o", tmp_path / "missing.json", "--steps", "9")
    assert missing.exit_code == 4
    assert "9" in missing.stderr


def test_steps_option_means_the_global_step_of_a_run(cli: Cli, record: Record, tmp_path: Path) -> None:
    run = record(3, 5)
    for manifest in run.rglob("*.step5.json"):  # make it the manifest of an engine process
        manifest.write_bytes(msgspec.json.encode(msgspec.json.decode(manifest.read_bytes()) | {"request": "a"}))

    result = cli("merge", run, "-o", tmp_path / "five.json", "--steps", "5")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{tmp_path / 'five.json'}: 1 trace, ")
    (engine,) = run.rglob("*.step5.trace.json")
    assert sum("ph" in event for event in read_events(engine)) <= len(read_events(tmp_path / "five.json"))

    result = cli("merge", run, "-o", tmp_path / "three.json", "--steps", "3")
    assert result.stdout.startswith(f"{tmp_path / 'three.json'}: 1 trace, ")

    result = cli("merge", run, "-o", tmp_path / "four.json", "--steps", "3..4")
    assert result.exit_code == 4
    message = "--steps 3..4: no trace covers global step 4. Captured: 3, 5. For engine iterations, use --iterations"
    assert message in result.stderr.replace("\n", " ").replace("  ", " ")
    assert not (tmp_path / "four.json").exists()


@pytest.mark.parametrize("name", ["all.pftrace", "all.pftrace.gz"])
def test_slim_trace_has_devices_and_annotations(cli: Cli, record: Record, tmp_path: Path, name: str) -> None:
    run = record(3, ranks=(0, 1), world_size=2)

    result = cli("merge", run, "-o", tmp_path / name)

    assert (result.exit_code, result.stderr) == (0, "")
    data = (tmp_path / name).read_bytes()
    data = gzip.decompress(data) if name.endswith(".gz") else data
    assert b"trainer rank 0" in data
    assert b"trainer rank 1" in data
    assert b"void [press]" in data
    assert b"ProfilerStep#3" in data
    assert b"critical path" in data
    without_path = tmp_path / f"without.{name}"
    cli("merge", run, "-o", without_path, "--no-critical-path")
    data = without_path.read_bytes()
    data = gzip.decompress(data) if name.endswith(".gz") else data
    assert b"critical path" not in data
    assert b"paper::fold" not in data
    with_operators = tmp_path / "more.pftrace"
    cli("merge", run, "-o", with_operators, "--category", "cpu_op")
    assert b"paper::fold" in with_operators.read_bytes()


def test_critical_path_is_added_to_other_files_on_request(cli: Cli, record: Record, tmp_path: Path) -> None:
    run = record(3)
    (trace,) = run.rglob("*.trace.json*")
    for name, options in (("plain.json", []), ("path.json", ["--critical-path"])):
        for command, source in (("merge", [run]), ("trim", [trace, "--steps", "3"])):
            file = tmp_path / f"{command}.{name}"
            assert cli(command, *source, "-o", file, *options).exit_code == 0
            assert ("critical path" in file.read_text()) is bool(options)
    again = cli("trim", tmp_path / "trim.path.json", "--steps", "3", "--critical-path", "-o", tmp_path / "again.json")
    assert "Could not add the critical path: The trace already contains its critical path." in again.stderr


def test_kernel_tables_are_merged_only_into_slim_traces(cli: Cli, record: Record, tmp_path: Path) -> None:
    run = record(3)
    (tmp_path / "ascend").mkdir()
    table = tmp_path / "ascend" / "kernel_details.csv"
    table.write_text("Name,Type,Start Time(us),Duration(us)\nMatMulV2_7,MatMulV2,2000.5,4.25\n")

    result = cli("merge", run, table, "-o", tmp_path / "all.json")
    assert result.exit_code == 0
    assert (
        result.stderr
        == "warning: ascend/kernel_details.csv is skipped. It can be merged only into a slim trace (.pftrace).\n"
    )
    assert result.stdout.startswith(f"{tmp_path / 'all.json'}: 1 trace, ")
    assert "MatMulV2" not in (tmp_path / "all.json").read_text()

    without_traces = cli("merge", table, "-o", tmp_path / "table.json")
    assert without_traces.exit_code == 4
    assert "There are no JSON traces. To merge these traces, use a slim trace: -o OUT.pftrace" in without_traces.stderr
    assert not (tmp_path / "table.json").exists()

    result = cli("merge", run, table, "-o", tmp_path / "all.pftrace")
    reason = "A kernel table has no critical path because it contains no host events."
    assert (result.exit_code, result.stderr) == (0, f"warning: Could not add the critical path: {reason}\n")
    assert b"MatMulV2" in (tmp_path / "all.pftrace").read_bytes()


def test_anchors_align_clocks_of_different_hosts(cli: Cli, record: Record, tmp_path: Path) -> None:
    run = record(3, ranks=(0, 1), world_size=2)
    first, second = sorted(run.rglob("rank_*.step3.json"))
    shifts_ms = (5, 12)
    for file, shift_ms in zip((first, second), shifts_ms, strict=True):
        manifest = msgspec.json.decode(file.read_bytes())
        manifest["host"] = file.name
        manifest["artifacts"][0] |= {
            "base_time_ns": 0,
            "anchors": [{"unix_ns": 2_000_000 + shift_ms * 1_000_000, "uncertainty_ns": 10, "trace_us": "2000.000"}],
        }
        file.write_bytes(msgspec.json.encode(manifest))
    unaligned = cli("merge", run, "-o", tmp_path / "plain.json", "--align", "none")
    result = cli("merge", run, "-o", tmp_path / "aligned.json")

    assert unaligned.exit_code == result.exit_code == 0
    assert "clocks aligned by: anchors" in result.stdout

    def step_times(path: Path) -> list[float]:
        return [float(event["ts"]) for event in read_events(path) if event["name"] == "ProfilerStep#3"]

    shifts_us = [
        after - before
        for before, after in zip(
            step_times(tmp_path / "plain.json"), step_times(tmp_path / "aligned.json"), strict=True
        )
    ]
    assert shifts_us == [1000 * shift_ms for shift_ms in shifts_ms]


@pytest.mark.parametrize("content", [None, b"", b"text", b'{"traceEvents": []}'])
@pytest.mark.parametrize("suffix", ["json", "pftrace"])
def test_trace_without_readable_events_is_not_counted(
    cli: Cli, record: Record, tmp_path: Path, content: bytes | None, suffix: str
) -> None:
    (trace,) = record(3).rglob("*.trace.json")
    other = tmp_path / "other.json"
    if content is not None:
        other.write_bytes(content)
    result = cli("merge", trace, other, "-o", tmp_path / f"a.{suffix}")
    assert (result.exit_code, "other.json" in result.stderr) == (4, True)
    assert " 1 of 2 traces (not all could be read completely), " in " ".join(result.stdout.split())
    document = json.loads(cli("merge", trace, other, "-o", tmp_path / f"b.{suffix}", "--json").stdout)
    assert (len(document["traces"]), document["unread"], len(document["problems"])) == (2, 1, 1)


def test_clock_offsets_of_hosts_are_applied(cli: Cli, record: Record, tmp_path: Path) -> None:
    run = record(3)
    rollouts = record(3, role="rollout", ranks=(0, 1), world_size=2)
    anchor = {"unix_ns": 2_000_000, "uncertainty_ns": 10_000, "trace_us": "2000.000"}
    manifests = sorted(run.rglob("trainer/rank_*.step3.json")) + sorted(rollouts.rglob("rollout/rank_*.step3.json"))
    for file, host, token in zip(manifests, ("head", "far", "farther"), (None, "t", "t"), strict=True):
        manifest = msgspec.json.decode(file.read_bytes())
        manifest |= {"host": host, "request": token, "request_token": token}
        manifest["artifacts"][0] |= {"base_time_ns": 0, "anchors": [anchor]}
        file.write_bytes(msgspec.json.encode(manifest))
    clock = {"host": "far", "reference": "head", "offset_ns": 7_000_000, "error_ns": 190_000}
    target = {"host": "head", "target": "http://far:1", "clock": clock, "artifacts": []}
    content = msgspec.json.decode(manifests[1].read_bytes())
    (manifests[1].parent / "target.step3.json").write_bytes(msgspec.json.encode(content | target))

    def step_times(*options: object) -> list[float]:
        path = tmp_path / f"{len([*tmp_path.glob('*.json')])}.json"
        assert cli("merge", run, "-o", path, *options).exit_code == 0
        return [float(event["ts"]) for event in read_events(path) if event["name"] == "ProfilerStep#3"]

    unaligned = step_times("--align", "none")
    assert [after - before for before, after in zip(unaligned, step_times(), strict=True)] == [7000, 0, 0]
    with_known_clock = cli("merge", run, "-o", tmp_path / "known.json", "--rank", "0")
    assert with_known_clock.stdout.endswith("; clocks aligned by: anchors within 200 us\n")
    with_unknown_clock = cli("merge", run, "-o", tmp_path / "partly.json")
    assert with_unknown_clock.stdout.endswith("; clocks aligned by: anchors\n")


def test_clocks_without_data_are_unchanged(cli: Cli, record: Record, tmp_path: Path) -> None:
    run = record(3, ranks=(0, 1), world_size=2)
    result = cli("merge", run, "-o", tmp_path / "all.json", "--align", "anchors")
    assert result.exit_code == 0
    assert result.stderr.count("no clock data for --align anchors. The times are unchanged.") == 2
    same_host = cli("merge", run, "-o", tmp_path / "shared.json", "--align", "collectives")
    assert (same_host.exit_code, same_host.stderr) == (0, "")  # ranks of one host share a clock


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["-o", "all.txt"], 2, "the file name must end in .json, .json.gz, .pftrace, .pftrace.gz"),
        (["-o", "all.json", "--align", "guess"], 2, "expected one of none, anchors, collectives"),
        (["-o", "no/such/all.json"], 2, "is not a directory. Create it"),
        (["-o", "there.json"], 2, "already exists. Choose another path."),
        (["-o", "all.json", "--steps", "x"], 2, "'x' is not a valid range"),
        (
            ["-o", "all.json", "--steps", "3", "--time", "1s..2s"],
            2,
            "--steps and --time cannot be combined. Use only one of them.",
        ),
        ([], 2, "Missing option '--output'"),
    ],
)
def test_invalid_options_write_no_file(
    cli: Cli, record: Record, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    run = record(3)
    (tmp_path / "there.json").write_text("mine")

    result = cli("merge", run, *arguments)

    assert result.exit_code == code
    assert message in " ".join(result.stderr.replace("│", " ").split())
    assert (tmp_path / "there.json").read_text() == "mine"
    assert not (tmp_path / "all.json").exists()


def test_output_inside_a_run_is_rejected(cli: Cli, record: Record) -> None:
    run = record(3)
    result = cli("merge", run, "-o", run / "all.json")
    assert result.exit_code == 2
    assert "is inside the run" in result.stderr


def test_readable_part_of_a_truncated_trace_is_merged(cli: Cli, record: Record, tmp_path: Path) -> None:
    run = record(3, ranks=(0, 1), world_size=2)
    trace = sorted(run.rglob("*.trace.json"))[1]
    trace.write_bytes(trace.read_bytes()[:-20])
    for name in ("all.json", "all.pftrace"):
        result = cli("merge", run, "-o", tmp_path / name)
        assert result.exit_code == 4
        assert "The JSON is not closed" in result.stderr
        assert (tmp_path / name).exists()


def test_directories_of_torch_npu_are_labelled_by_rank(cli: Cli, tmp_path: Path) -> None:
    for rank in (1, 2, 3):
        ascend_files.analysed(ascend_files.raw(tmp_path, f"rank_000{rank}.step10_4711_2026_ascend_pt", rank=rank))
    (tmp_path / "rank_0003.step10_4711_2026_ascend_pt" / ascend_files.OUTPUT / "trace_view.json").unlink()

    result = cli("merge", tmp_path, "-o", tmp_path / "all.json", "--rank", "1..2", "--steps", "10")
    assert result.exit_code == 0
    assert {label.partition(":")[0] for label in read_labels(tmp_path / "all.json")} == {"rank 1", "rank 2"}

    result = cli("merge", tmp_path, "-o", tmp_path / "more.json")
    assert result.exit_code == 0
    assert (
        "rank_0003.step10_4711_2026_ascend_pt is skipped. It can be merged only into a slim trace (.pftrace)."
        in result.stderr
    )

    result = cli("merge", tmp_path, "-o", tmp_path / "all.pftrace")
    assert result.exit_code == 0
    assert (tmp_path / "all.pftrace").read_bytes().count(b"group 445") == 3

    result = cli("merge", tmp_path, "-o", tmp_path / "none.json", "--rank", "7")
    assert result.exit_code == 4
    assert "Available: rank 1, rank 2, rank 3." in " ".join(result.stderr.split())


def test_directory_of_raw_torch_npu_data_is_rejected(cli: Cli, tmp_path: Path) -> None:
    ascend_files.raw(tmp_path)
    for name in ("all.json", "all.pftrace"):
        result = cli("merge", tmp_path, "-o", tmp_path / name)
        assert result.exit_code == 4
        assert "has no timeline, only raw data. Generate text files with torch_npu" in " ".join(result.stderr.split())
        assert not (tmp_path / name).exists()
