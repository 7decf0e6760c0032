from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import pytest
from invented_summaries import STEP, run, trace
from typer.testing import Result

from profdeck_traces.analysis.model import RankSummary, RunSummary
from profdeck_traces.base.errors import TraceError
from profdeck_traces.cli import arguments

Cli = Callable[..., Result]
Document = Callable[..., Path]

STEPS = 5


def rank(step_us: float | None = 1000, gemm_us: float = 400, **members: Any) -> RankSummary:
    """Return the summary of a rank with equal steps, or without steps."""
    steps = () if step_us is None else [step_us] * STEPS
    summary = trace({"[gemm]": [gemm_us] * STEPS}, steps=steps, of=STEP if steps else None, path="run/rank0.trace.json")
    return attrs.evolve(summary, **{"capture": "step1", "idle_us": 0, **members})


@pytest.fixture
def document(tmp_path: Path) -> Document:
    """Return a function that writes a summary of ranks to a JSON file."""

    def write(name: str, *ranks: RankSummary) -> Path:
        path = tmp_path / name
        path.write_text(json.dumps(run(*ranks).to_dict(), indent=2), encoding="utf-8")
        return path

    return write


def lines(result: Result) -> list[str]:
    return [" ".join(line.split()) for line in result.stdout.splitlines()]


def words(result: Result) -> str:
    """Return stdout as one line."""
    return " ".join(result.stdout.split())


def test_slower_run(cli: Cli, document: Document) -> None:
    result = cli("diff", document("a.json", rank()), document("b.json", rank(1100, 500)))
    assert (result.exit_code, result.stderr) == (0, "")
    assert lines(result) == [
        "trainer is slower: the median global step takes 1.100 ms, before 1.000 ms,",
        "+10.0% (p 0.004); most of it: gemm +0.100 ms, [gemm] +0.100 ms.",
        "Times are per global step, of 5 before and 5 after in all.",
        "",
        "before ms after ms change verdict sum",
        "0.400 0.500 +25.0% slower kernels",
        "0.400 0.500 +25.0% slower busy",
        "0.000 0.000 same idle",
        "0.000 0.000 same communication",
        "0.000 0.000 same exposed communication",
        "",
        "before ms after ms change noise verdict class",
        "0.400 0.500 +25.0% 0.0% slower gemm",
        "",
        "before ms after ms change noise class verdict kernel",
        "0.400 0.500 +25.0% 0.0% gemm slower [gemm]",
    ]


def test_unchanged_rows_are_counted(cli: Cli, document: Document) -> None:
    path = document("a.json", rank())
    result = cli("diff", path, path, "--fail-over", "0%")
    assert result.exit_code == 0
    said = "trainer is the same: the median global step takes 1.000 ms, before 1.000 ms, +0.0% (p 1). "
    assert words(result).startswith(said)
    assert lines(result)[-1] == "The same: 1 class, 1 kernel."


def test_new_kernel_is_shown_with_its_class(cli: Cli, document: Document) -> None:
    other = attrs.evolve(rank().kernels[0], name="other")
    result = cli("diff", document("a.json", rank()), document("b.json", rank(kernels=(other,))))
    assert lines(result)[-4:-2] == [
        "0.400 0.000 -100.0% 0.0% gemm vanished; its class +0.0% [gemm]",
        "0.000 0.400 0.0% gemm appeared; its class +0.0% other",
    ]


def test_number_of_calls_is_shown_for_a_change(cli: Cli, document: Document) -> None:
    (gemm,) = rank(1000, 800).kernels
    twice = attrs.evolve(gemm, count=2 * gemm.count)
    result = cli("diff", document("a.json", rank()), document("b.json", rank(kernels=(twice,))))
    assert "0.400 0.800 +100.0% 0.0% gemm slower; calls 1→2 [gemm]" in lines(result)


def test_top(cli: Cli, document: Document) -> None:
    def many(scale: float) -> RankSummary:
        kernels = [
            attrs.evolve(rank(gemm_us=scale * (40 - n)).kernels[0], name=f"k{n}", share=1 / 20) for n in range(20)
        ]
        return rank(kernels=tuple(kernels))

    def shown(*options: object) -> int:
        return (
            sum(line.rpartition("  ")[2].startswith("k") for line in cli("diff", a, b, *options).stdout.splitlines())
            - 2
        )

    a, b = document("a.json", many(1)), document("b.json", many(1.5))
    assert (shown(), shown("--top", 0)) == (8, 20)
    assert "... and 12 more that changed: --top 0 shows all." in lines(cli("diff", a, b))
    (role,) = json.loads(cli("diff", a, b, "--top", 2, "--json").stdout)["roles"]
    assert [change["name"] for change in role["kernels"]] == ["k0", "k1"]


def test_json_document(cli: Cli, document: Document) -> None:
    a, b = document("a.json", rank()), document("b.json", rank(1100))
    result = cli("diff", a, b, "--json", "--fail-over", "5%")
    assert (result.exit_code, result.stderr) == (5, "")
    plain = json.loads(result.stdout)
    assert (plain["before"], plain["after"], plain["fail_over"]) == (str(a), str(b), 0.05)
    assert plain["regressions"] == [{"role": "trainer", "stage": None, "name": "global step"}]
    (role,) = plain["roles"]
    assert (role["basis"], role["steps_before"], role["iterations"][0]["verdict"]) == ("global_step", 5, "slower")
    assert role["ranks"][0]["before"] == ["run/rank0.trace.json"]


@pytest.mark.parametrize(
    ("limit", "after", "code"),
    [
        ("5%", rank(1051), 5),
        ("5", rank(1051), 5),
        ("5%", rank(1049), 0),
        (" 5.2 %", rank(1051), 0),
        ("0.5%", rank(1006), 5),
        ("0", rank(1006), 5),
        ("5%", rank(900), 0),
        ("5%", rank(None, 424), 5),
        ("5%", rank(None, 416), 0),
    ],
)
def test_fail_over(cli: Cli, document: Document, limit: str, after: RankSummary, code: int) -> None:
    result = cli("diff", document("a.json", rank()), document("b.json", after), "--fail-over", limit)
    assert result.exit_code == code
    assert ("Over the limit: trainer: " in result.stdout) == (code == 5)


@pytest.mark.parametrize(
    ("limit", "told"),
    [
        ("0.05", "Write 5% or 0.05%."),
        ("five", "'five' is not a percentage, such as 5% or 2.5%."),
        ("5%%", "is not a percentage"),
        ("nan", "is not a percentage"),
        ("1e3%", "is not a percentage"),
    ],
)
def test_invalid_percentage(cli: Cli, document: Document, limit: str, told: str) -> None:
    path = document("a.json", rank())
    result = cli("diff", path, path, "--fail-over", limit)
    assert result.exit_code == 2
    assert told in " ".join(result.stderr.split())


def test_role_without_comparable_times_fails(cli: Cli, document: Document) -> None:
    empty = rank(None, kernels=(), categories=(), busy_us=None, idle_us=None, communication_us=None, overlap_us=None)
    path = document("a.json", rank(), attrs.evolve(empty, role="rollout"))
    assert cli("diff", path, path).exit_code == 0
    result = cli("diff", path, path, "--fail-over", "5%")
    assert result.exit_code == 4
    assert (
        result.stderr
        == "error: rollout: cannot be compared, because one of the runs has no steps, kernels or operators.\n"
    )


def test_warnings_about_incomplete_traces(cli: Cli, document: Document) -> None:
    cut = rank(problem="It ends early.", whole=False)
    alone = rank(rank=1, path="run/rank1.trace.json")
    result = cli("diff", document("a.json", cut, alone), document("b.json", rank(graph_launches=None)))
    assert result.exit_code == 0
    assert result.stderr.splitlines() == [
        "warning: run/rank0.trace.json: It ends early. Only the readable part is compared.",
        "warning: a.json: the other run has no trace that corresponds to run/rank1.trace.json",
    ]
    assert "Operators are not compared: of some traces only the devices were read." in words(result)


def test_traces_are_summarised(cli: Cli, document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Sequence[Path]] = []

    def summarise(paths: Sequence[Path], *, cache: bool) -> tuple[RunSummary, list[str]]:
        read.append(paths)
        assert cache
        return run(rank(1100)), ["rank1.trace.json: it is empty"]

    monkeypatch.setattr(arguments, "summarise_paths", summarise)
    result = cli("diff", document("a.json", rank()), tmp_path, "--fail-over", "5%")
    assert read == [[tmp_path]]
    assert (result.exit_code, result.stderr) == (4, "error: rank1.trace.json: it is empty\n")
    assert "Over the limit: trainer: global step" in result.stdout


def test_read_errors_are_reported_if_no_trace_is_readable(
    cli: Cli, document: Document, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(arguments, "summarise_paths", lambda _, **_how: (run(), ["rank0.trace.json: it is empty"]))
    result = cli("diff", document("a.json", rank()), tmp_path)
    assert (result.exit_code, result.stdout) == (4, "")
    assert result.stderr.startswith("error: rank0.trace.json: it is empty\nerror: There is nothing to compare: ")


def test_document_is_not_a_summary(cli: Cli, document: Document, tmp_path: Path) -> None:
    wrong = tmp_path / "b.json"
    wrong.write_text('{"ranks": [{}]}', encoding="utf-8")
    result = cli("diff", document("a.json", rank()), wrong)
    assert (result.exit_code, result.stdout) == (4, "")
    assert "is no summary by this version of profdeck: Object missing required field `path`" in result.stderr


def test_error_ends_the_command(cli: Cli, document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(paths: Sequence[Path], *, cache: bool) -> tuple[RunSummary, list[str]]:
        raise TraceError(f"No trace found in {paths[0].name}.")

    monkeypatch.setattr(arguments, "summarise_paths", fail)
    path = document("a.json", rank())
    result = cli("diff", path, path.parent)
    assert (result.exit_code, result.stdout) == (4, "")
    assert "No trace found in" in result.stderr


def test_run_equals_its_saved_summary(cli: Cli, record: Callable[..., Path], tmp_path: Path) -> None:
    traces = record(3, ranks=(0, 1), world_size=2)
    summary = tmp_path / "baseline.json"
    summary.write_text(cli("summary", traces, "--json", "--top", 0).stdout, encoding="utf-8")
    result = cli("diff", summary, traces, "--fail-over", "0%", "--json")
    assert (result.exit_code, result.stderr) == (0, "")
    (role,) = json.loads(result.stdout)["roles"]
    assert (role["role"], len(role["ranks"])) == ("trainer", 2)
    assert {change["verdict"] for change in (*role["kernels"], *role["operators"])} == {"same"}


@pytest.mark.parametrize(("judges", "code"), [(("steps",), 0), (("device",), 5), (("steps", "device"), 5)])
def test_fail_on_selects_the_judged_times(cli: Cli, document: Document, judges: tuple[str, ...], code: int) -> None:
    options = [word for judge in judges for word in ("--fail-on", judge)]
    slower = document("b.json", rank(gemm_us=800))
    result = cli("diff", document("a.json", rank()), slower, "--fail-over", "5%", *options)
    assert result.exit_code == code
    assert "slower inside: 1 of 1 classes, 1 of 1 kernels" in words(result)


@pytest.mark.parametrize(
    ("middle_us", "said"), [(1010, "trainer is the same:"), (1300, "trainer may differ by chance:")]
)
def test_large_uncertain_change_is_not_called_the_same(
    cli: Cli, document: Document, middle_us: float, said: str
) -> None:
    def noisy(*durations_us: float) -> RankSummary:
        plain = rank()
        return attrs.evolve(plain, steps=[attrs.evolve(plain.steps[0], duration_us=one) for one in durations_us])

    sides = document("a.json", noisy(600, 1000, 1400)), document("b.json", noisy(700, middle_us, 1900))
    assert lines(cli("diff", *sides))[0].startswith(said)


def test_fail_on_stages_without_stages(cli: Cli, document: Document) -> None:
    path = document("a.json", rank())
    result = cli("diff", path, path, "--fail-over", "5%", "--fail-on", "stages")
    assert result.exit_code == 4
    assert (
        result.stderr
        == "error: trainer: cannot be compared, because one of the runs has no stages or other annotations.\n"
    )
