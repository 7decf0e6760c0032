from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from invented_summaries import STEP, run, trace
from typer.testing import Result

from profdeck_traces.analysis.detail_model import StepOfDevice
from profdeck_traces.analysis.model import RankSummary, RunSummary
from profdeck_traces.base.errors import TraceError
from profdeck_traces.cli import arguments

Cli = Callable[..., Result]
Document = Callable[..., Path]

STEPS = 5


def rank_summary(step_us: float | None = 1000, gemm_us: float = 400, **members: Any) -> RankSummary:
    """Return the summary of a rank with equal steps, or without steps if `step_us` is None."""
    steps = () if step_us is None else [step_us] * STEPS
    summary = trace(
        {"[gemm]": [gemm_us] * STEPS}, steps=steps, group=STEP if steps else None, path="run/rank0.trace.json"
    )
    device = StepOfDevice(
        device=0,
        start_us=0,
        duration_us=gemm_us,
        busy_us=gemm_us,
        compute_us=gemm_us,
        communication_us=0,
        exposed_communication_us=0,
        memory_us=0,
        idle=(),
    )
    summary = attrs.evolve(summary, steps=tuple(attrs.evolve(step, devices=(device,)) for step in summary.steps))
    return attrs.evolve(summary, **{"capture": "step1", "idle_us": 0, **members})


@pytest.fixture
def write_document(tmp_path: Path) -> Document:
    """Return a function that writes a run summary with the given ranks to a JSON file."""

    def write(name: str, *ranks: RankSummary) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(run(*ranks).to_dict(), indent=2), encoding="utf-8")
        return path

    return write


def output_lines(result: Result) -> list[str]:
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def output_text(result: Result) -> str:
    """Return stdout as a single line."""
    return " ".join(result.stdout.split())


def test_slower_run_has_a_verdict_and_tables(cli: Cli, write_document: Document) -> None:
    result = cli("diff", write_document("a.json", rank_summary()), write_document("b.json", rank_summary(1100, 500)))
    assert (result.exit_code, result.stderr) == (0, "")
    assert output_lines(result) == [
        "trainer is slower: the median global step takes 1.100 ms, before 1.000 ms,",
        "+0.100 ms, +10.0% (p 0.004); most of it: gemm +0.100 ms, [gemm] +0.100 ms.",
        "Times are per global step (5 before, 5 after): medians.",
        "",
        "before ms after ms change noise verdict sum",
        "0.400 0.500 +25.0% unknown slower kernels",
        "0.400 0.500 +25.0% 0.0% slower busy",
        "0.000 0.000 unknown same idle",
        "0.000 0.000 unknown same communication",
        "0.000 0.000 unknown same exposed communication",
        "",
        "before ms after ms change noise verdict class",
        "0.400 0.500 +25.0% 0.0% slower gemm",
        "",
        "before ms after ms change noise class verdict kernel",
        "0.400 0.500 +25.0% 0.0% gemm slower [gemm]",
    ]


def test_unchanged_rows_are_counted(cli: Cli, write_document: Document) -> None:
    path = write_document("a.json", rank_summary())
    result = cli("diff", path, path, "--fail-over", "0%")
    assert result.exit_code == 0
    verdict = "trainer is the same: the median global step takes 1.000 ms, before 1.000 ms, +0.0% (p 1). "
    assert output_text(result).startswith(verdict)
    assert output_lines(result)[-1] == "The same: 1 class, 1 kernel."


def test_new_kernel_is_shown_with_its_class(cli: Cli, write_document: Document) -> None:
    other_kernel = attrs.evolve(rank_summary().kernels[0], name="other")
    result = cli(
        "diff",
        write_document("a.json", rank_summary()),
        write_document("b.json", rank_summary(kernels=(other_kernel,))),
    )
    assert output_lines(result)[-4:-2] == [
        "0.400 0.000 -100.0% 0.0% gemm vanished; its class +0.0% [gemm]",
        "0.000 0.400 0.0% gemm appeared; its class +0.0% other",
    ]


def test_changed_number_of_calls_is_shown(cli: Cli, write_document: Document) -> None:
    (gemm,) = rank_summary(1000, 800).kernels
    doubled = attrs.evolve(gemm, count=2 * gemm.count)
    result = cli(
        "diff", write_document("a.json", rank_summary()), write_document("b.json", rank_summary(kernels=(doubled,)))
    )
    assert "0.400 0.800 +100.0% 0.0% gemm slower; calls 1→2 [gemm]" in output_lines(result)


def test_top_limits_the_kernels(cli: Cli, write_document: Document) -> None:
    def with_20_kernels(scale: float) -> RankSummary:
        kernels = [
            attrs.evolve(rank_summary(gemm_us=scale * (40 - n)).kernels[0], name=f"k{n}", share=1 / 20)
            for n in range(20)
        ]
        return rank_summary(kernels=tuple(kernels))

    def count_kernels(*options: object) -> int:
        rows = cli("diff", a, b, *options).stdout.splitlines()
        return (
            sum(row.rpartition("  ")[2].startswith("k") for row in rows) - 2
        )  # without the heading "kernel" and the sum "kernels"

    a, b = write_document("a.json", with_20_kernels(1)), write_document("b.json", with_20_kernels(1.5))
    assert (count_kernels(), count_kernels("--top", 0)) == (8, 20)
    assert "... and 12 more that changed: --top 0 shows all." in output_lines(cli("diff", a, b))
    (role,) = json.loads(cli("diff", a, b, "--top", 2, "--json").stdout)["roles"]
    assert [change["name"] for change in role["kernels"]] == ["k0", "k1"]


def test_json_document_has_regressions_and_roles(cli: Cli, write_document: Document) -> None:
    a, b = write_document("a.json", rank_summary()), write_document("b.json", rank_summary(1100))
    result = cli("diff", a, b, "--json", "--fail-over", "5%")
    assert (result.exit_code, result.stderr) == (5, "")
    document = json.loads(result.stdout)
    assert (document["before"], document["after"], document["fail_over"]) == (str(a), str(b), 0.05)
    assert document["regressions"] == [{"role": "trainer", "stage": None, "name": "global step"}]
    (role,) = document["roles"]
    assert (role["basis"], role["steps_before"], role["iterations"][0]["verdict"]) == ("global_step", 5, "slower")
    assert role["ranks"][0]["before"] == ["run/rank0.trace.json"]


@pytest.mark.parametrize(
    ("limit", "after", "code"),
    [
        ("5%", rank_summary(1051), 5),
        ("5", rank_summary(1051), 5),
        ("5%", rank_summary(1049), 0),
        (" 5.2 %", rank_summary(1051), 0),
        ("0.5%", rank_summary(1006), 5),
        ("0", rank_summary(1006), 5),
        ("5%", rank_summary(900), 0),
        ("5%", rank_summary(None, 424), 6),
        ("5%", rank_summary(None, 416), 6),
    ],
)
def test_exit_code_depends_on_the_fail_over_limit(
    cli: Cli, write_document: Document, limit: str, after: RankSummary, code: int
) -> None:
    result = cli(
        "diff", write_document("a.json", rank_summary()), write_document("b.json", after), "--fail-over", limit
    )
    assert result.exit_code == code
    assert ("Over the limit: trainer: " in result.stdout) == (code == 5)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        ("0.05", "Write 5% or 0.05%."),
        ("five", "'five' is not a percentage, such as 5% or 2.5%."),
        ("5%%", "is not a percentage"),
        ("nan", "is not a percentage"),
        ("1e3%", "is not a percentage"),
    ],
)
def test_invalid_percentage_is_rejected(cli: Cli, write_document: Document, limit: str, message: str) -> None:
    path = write_document("a.json", rank_summary())
    result = cli("diff", path, path, "--fail-over", limit)
    assert result.exit_code == 2
    assert message in " ".join(result.stderr.split())


def test_role_without_comparable_times_fails(cli: Cli, write_document: Document) -> None:
    incomparable = rank_summary(
        None, kernels=(), categories=(), busy_us=None, idle_us=None, communication_us=None, overlap_us=None
    )
    path = write_document("a.json", rank_summary(), attrs.evolve(incomparable, role="rollout"))
    for options in ((), ("--fail-over", "5%")):
        result = cli("diff", path, path, *options)
        assert result.exit_code == 6
        assert result.stderr == ""
        headline = "rollout is inconclusive: one of the runs has no steps, kernels or operators."
        assert headline in output_lines(result)


def test_incomplete_and_unmatched_traces_cause_warnings(cli: Cli, write_document: Document) -> None:
    truncated = rank_summary(problem="It ends early.", whole=False)
    unmatched = rank_summary(rank=1, path="run/rank1.trace.json")
    result = cli(
        "diff",
        write_document("a.json", truncated, unmatched),
        write_document("b.json", rank_summary(graph_launches=None)),
    )
    assert result.exit_code == 6
    assert result.stderr.splitlines() == [
        "warning: run/rank0.trace.json: It ends early. Only the readable part is compared.",
        "warning: a.json: the other run has no trace that corresponds to run/rank1.trace.json",
    ]
    assert "run/rank0.trace.json is corrupt and was read only in part." in output_text(result)
    assert "Operators are not compared: of some traces only the devices were read." in output_text(result)


def test_directory_of_traces_is_summarised(
    cli: Cli, write_document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_paths: list[Sequence[Path]] = []

    def summarise(paths: Sequence[Path], *, cache: bool) -> tuple[RunSummary, list[str]]:
        read_paths.append(paths)
        assert cache
        return run(rank_summary(1100)), ["rank1.trace.json: it is empty"]

    monkeypatch.setattr(arguments, "summarise_paths", summarise)
    result = cli("diff", write_document("a.json", rank_summary()), tmp_path, "--fail-over", "5%")
    assert read_paths == [[tmp_path]]
    assert (result.exit_code, result.stderr) == (4, "error: rank1.trace.json: it is empty\n")
    assert "Over the limit: trainer: global step" in result.stdout


def test_read_errors_are_reported_if_no_trace_is_readable(
    cli: Cli, write_document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "summarise_paths", lambda _, **_options: (run(), ["rank0.trace.json: it is empty"]))
    result = cli("diff", write_document("a.json", rank_summary()), tmp_path)
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr == "error: rank0.trace.json: it is empty\n"


def test_document_that_is_not_a_summary_is_rejected(cli: Cli, write_document: Document, tmp_path: Path) -> None:
    invalid = tmp_path / "b.json"
    invalid.write_text('{"ranks": [{}]}', encoding="utf-8")
    result = cli("diff", write_document("a.json", rank_summary()), invalid)
    assert (result.exit_code, result.stdout) == (4, "")
    assert "is no summary by this version of profdeck: Object missing required field `path`" in result.stderr


def test_read_error_ends_the_command(cli: Cli, write_document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(paths: Sequence[Path], *, cache: bool) -> tuple[RunSummary, list[str]]:
        raise TraceError(f"No trace found in {paths[0].name}.")

    monkeypatch.setattr(arguments, "summarise_paths", fail)
    path = write_document("a.json", rank_summary())
    result = cli("diff", path, path.parent)
    assert (result.exit_code, result.stdout) == (4, "")
    assert "No trace found in" in result.stderr


def test_run_equals_its_saved_summary(cli: Cli, record: Callable[..., Path], tmp_path: Path) -> None:
    traces = record(3, ranks=(0, 1), world_size=2)
    summary = tmp_path / "baseline.json"
    summary.write_text(cli("summary", traces, "--json", "--top", 0).stdout, encoding="utf-8")
    result = cli("diff", summary, traces, "--fail-over", "0%", "--json")
    assert (result.exit_code, "fewer than 3 measurements" in result.stderr) == (6, True)
    (role,) = json.loads(result.stdout)["roles"]
    assert (role["role"], len(role["ranks"])) == ("trainer", 2)
    assert {change["verdict"] for change in (*role["kernels"], *role["operators"])} == {"same"}


@pytest.mark.parametrize(("judges", "code"), [(("steps",), 0), (("device",), 5), (("steps", "device"), 5)])
def test_fail_on_selects_the_judged_times(
    cli: Cli, write_document: Document, judges: tuple[str, ...], code: int
) -> None:
    options = [option for judge in judges for option in ("--fail-on", judge)]
    slower = write_document("b.json", rank_summary(gemm_us=800))
    result = cli("diff", write_document("a.json", rank_summary()), slower, "--fail-over", "5%", *options)
    assert result.exit_code == code
    assert "slower inside: 1 of 1 classes, 1 of 1 kernels" in output_text(result)


@pytest.mark.parametrize(("median_us", "verdict"), [(1010, "trainer is the same:"), (1300, "trainer is inconclusive:")])
def test_large_uncertain_change_is_not_called_the_same(
    cli: Cli, write_document: Document, median_us: float, verdict: str
) -> None:
    def noisy(*durations_us: float) -> RankSummary:
        summary = rank_summary()
        steps = [attrs.evolve(summary.steps[0], duration_us=duration_us) for duration_us in durations_us]
        return attrs.evolve(summary, steps=steps)

    paths = write_document("a.json", noisy(600, 1000, 1400)), write_document("b.json", noisy(700, median_us, 1900))
    assert output_lines(cli("diff", *paths))[0].startswith(verdict)


_UNCERTAIN = ((600, 1000, 1400), (700, 1090, 1900))
_FEW = ((1000, 1000), (1000, 1000))
_SAME = ((1000, 1001, 1002), (1001, 1002, 1003))
_SLOWER = ((1000, 1001, 1002, 1003, 1004), (1500, 1501, 1502, 1503, 1504))


@pytest.mark.parametrize("options", [(), ("--json",)])
@pytest.mark.parametrize(
    ("samples", "limit", "code"),
    [
        (_SAME, None, 0),
        (_SAME, "5%", 0),
        (_SLOWER, None, 0),
        (_SLOWER, "5%", 5),
        (_SLOWER, "60%", 0),
        (_UNCERTAIN, None, 6),
        (_UNCERTAIN, "5%", 6),
        (_UNCERTAIN, "50%", 6),
        (_UNCERTAIN, "1000%", 0),
        (_FEW, None, 6),
        (_FEW, "5%", 6),
        (_FEW, "50%", 6),
    ],
)
def test_exit_code_matches_the_headline(
    cli: Cli,
    write_document: Document,
    samples: tuple[tuple[float, ...], tuple[float, ...]],
    limit: str | None,
    code: int,
    options: tuple[str, ...],
) -> None:
    summary = rank_summary()
    ranks = [
        attrs.evolve(summary, steps=[attrs.evolve(summary.steps[0], duration_us=us) for us in durations_us])
        for durations_us in samples
    ]
    paths = [write_document(name, rank) for name, rank in zip(("a.json", "b.json"), ranks, strict=True)]
    result = cli("diff", *paths, *options, *(("--fail-over", limit) if limit else ()))
    assert result.exit_code == code
    # A reason that the headline on stdout contains is not printed again.
    assert ("inconclusive: trainer: " in result.stderr) == (code == 6 and bool(options))
    if options:
        assert bool(json.loads(result.stdout)["undecided"]) == (code == 6)
    else:
        assert output_lines(result)[0].startswith("trainer is inconclusive: ") == (code == 6)


def test_role_that_only_the_first_run_has_is_inconclusive(cli: Cli, write_document: Document) -> None:
    before = write_document("a.json", rank_summary(), rank_summary(role="rollout"))
    for options in ((), ("--fail-over", "5%")):
        result = cli("diff", before, write_document("b.json", rank_summary()), *options)
        assert (result.exit_code, "inconclusive: rollout: the second run" in result.stderr) == (6, True)


def test_fail_on_requires_fail_over(cli: Cli, write_document: Document) -> None:
    path = write_document("a.json", rank_summary())
    result = cli("diff", path, path, "--fail-on", "device")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "--fail-on has no effect without --fail-over." in result.stderr


def test_fail_on_stages_fails_without_stages(cli: Cli, write_document: Document) -> None:
    path = write_document("a.json", rank_summary())
    result = cli("diff", path, path, "--fail-over", "5%", "--fail-on", "stages")
    assert result.exit_code == 6
    assert result.stderr == "inconclusive: trainer: one of the runs has no stages or other annotations.\n"
