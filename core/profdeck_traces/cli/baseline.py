"""`profdeck baseline`: saves a run's summary as a named baseline, and compares later runs with it."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from xml.etree import ElementTree as ET

import attrs
import msgspec
import typer
from rich.text import Text

from profdeck_traces.analysis.diff_text import headline_of, label_of_role
from profdeck_traces.base.errors import ConfigError, ProfdeckError, TraceError
from profdeck_traces.base.files import user_path
from profdeck_traces.base.text import plural, printable
from profdeck_traces.cli import arguments, json_limit, regression_limit, terminal, text_layout
from profdeck_traces.inputs.outputs import check_output

if TYPE_CHECKING:
    from collections.abc import Sequence

    from profdeck_traces.analysis.diff_model import Change, RoleDiff, RunDiff
    from profdeck_traces.analysis.model import RunSummary
    from profdeck_traces.cli.regression_limit import Judgement

command = typer.Typer(help="Save a run as a baseline, and compare later runs with it.", no_args_is_help=True)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_RUN = "run"
_ON_GITHUB = "GITHUB_ACTIONS"
_JUNIT = re.compile(rb'<\?xml[^>]*>\s*<testsuite name="profdeck ')

_Name = Annotated[str, typer.Argument(metavar="NAME", help="Name of the baseline.")]
_Directory = Annotated[
    Path,
    typer.Option(
        "--directory", metavar="DIR", parser=user_path, help="Directory of baselines, one file NAME.json each."
    ),
]


@command.command()
def save(
    name: _Name,
    run: arguments.Run,
    *,
    directory: _Directory = Path("baselines"),
    processes: arguments.Processes = 0,
    cache: arguments.Cache = True,
) -> None:
    """Save a run as the baseline NAME, replacing an existing one.

    The file contains the output of `profdeck summary --json` without timelines, stacks and memory. It is also a valid
    argument of `profdeck diff`. A run with an incomplete trace cannot be a baseline.
    """
    from profdeck_traces.analysis.diff import SUMMARY

    file = _file(directory, name)
    if name.lower() == _RUN:
        raise ConfigError(f"NAME: {name!r} is reserved, because {_RUN}.json identifies a run. Choose another name.")
    check_output(file, SUMMARY)
    summary, problems = arguments.summarise_paths([run], processes=processes, cache=cache)
    problems = problems or [f"{path} cannot be read." for path in summary.unread]
    problems += [f"{rank.path}: {rank.problem}" for rank in summary.ranks if rank.problem]
    problems += [
        f"{capture.role} of step {capture.first_step} is {capture.status}."
        for capture in summary.captures
        if capture.status != "complete"
    ]
    if problems:
        reason = "it is incomplete" if summary.ranks else "no trace could be read"
        raise TraceError(f"{terminal.short_path(run)} cannot be a baseline because {reason}. {problems[0]}")
    terminal.write_file(file, msgspec.json.encode(_without_details(summary).to_dict()), durable=True)
    terminal.print_line(
        f"{terminal.short_path(file)}: {plural(len(summary.ranks), 'trace')}, {terminal.size(file.stat().st_size)}"
    )


@command.command()
def check(  # noqa: PLR0913 - the options of the command line
    name: _Name,
    run: arguments.Run,
    *,
    fail_over: regression_limit.FailOver = None,
    fail_on: regression_limit.FailOn = None,
    directory: _Directory = Path("baselines"),
    junit: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            parser=user_path,
            help="Write the result as JUnit XML, with one test per compared time.",
        ),
    ] = None,
    github: Annotated[
        bool | None,
        typer.Option(
            "--github/--no-github", help="Print GitHub Actions annotations. Default: if GITHUB_ACTIONS is true."
        ),
    ] = None,
    processes: arguments.Processes = 0,
    cache: arguments.Cache = True,
    json: terminal.JsonOption = False,
    max_bytes: json_limit.MaxBytes = None,
) -> None:
    """Compare a run with the baseline NAME; exit with 5 if it is slower by more than --fail-over (default: 5%).

    The exit code is 6 if the result is inconclusive, for example with fewer than 3 steps or a corrupt trace.
    """
    file, limit = _file(directory, name), 0.05 if fail_over is None else fail_over
    json_limit.check_option(max_bytes, as_json=json)
    if junit is not None:
        check_output(junit, _JUNIT)
        _delete(junit)
    try:
        if not file.exists():
            raise ConfigError(
                f"There is no baseline {name} in {terminal.short_path(directory)}. Create it with "
                "`profdeck baseline save`."
            )
        diff, problems = _compare(file, run, processes=processes, cache=cache)
    except ProfdeckError as error:
        if junit is not None:
            _write_junit(junit, name, None, terminal.error_lines(error))
        raise
    judgement = regression_limit.judge(diff, limit, fail_on)
    sentences = [judgement.sentence_of(role, problems) for role in diff.roles]
    if json:
        json_limit.print_limited(
            {
                "baseline": name,
                "run": str(run),
                "fail_over": limit,
                "roles": [
                    {
                        "role": role.role,
                        "stage": role.stage,
                        "verdict": role.verdict(limit),
                        "headline": sentence,
                    }
                    for role, sentence in zip(diff.roles, sentences, strict=True)
                ],
                "judged": [_plain(role, change, judgement) for role, change in judgement.judged],
                "undecided": judgement.undecided,
            },
            max_bytes,
            ("roles", "undecided", "judged"),
        )
    else:
        console = terminal.stdout_console()
        width = text_layout.width_of(console, full_names=False)
        lines: list[Text] = []
        for role, text in zip(diff.roles, sentences, strict=True):
            is_over = any(slower is role for slower, _ in judgement.regressions)
            style = "bold red" if is_over else "bold yellow" if problems or judgement.is_undecided(role) else ""
            lines += text_layout.wrapped(text, width, indent="  ", first="", style=style)
        text_layout.show(console, lines)
    if junit is not None:
        _write_junit(junit, name, judgement, problems)
    if github or (github is None and os.environ.get(_ON_GITHUB) == "true" and not json):
        _print_annotations(name, judgement, problems)
    judgement.end(problems, verdicts=() if json else sentences)


def _compare(file: Path, run: Path, *, processes: int, cache: bool) -> tuple[RunDiff, list[str]]:
    """Compare a run with a baseline file. Print warnings and errors about the run's traces.

    Returns:
        The comparison, and an error message for each trace that cannot be read.

    Raises:
        TraceError: The baseline or all traces of the run cannot be read, or run and baseline have no trace in common.
    """
    from profdeck_traces.analysis.diff import diff_runs, load_summary
    from profdeck_traces.cli.diff import warn

    before = load_summary(file)
    after, problems = arguments.summarise_paths([run], processes=processes, cache=cache)
    if problems and not after.ranks:
        raise TraceError(*problems)
    for problem in problems:
        terminal.print_stderr(f"error: {problem}")
    diff = diff_runs(before, after)
    warn(diff, (before, after), (file, run))
    return diff, problems


def _file(directory: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"NAME: {name!r} is not a valid name. Use only letters, digits, '.', '_' and '-'.")
    return directory / f"{name}.json"


def _without_details(summary: RunSummary) -> RunSummary:
    """Remove data that comparisons do not use, to keep the file small."""
    ranks = tuple(
        attrs.evolve(rank, timelines=(), stacks=(), functions=(), shapes=(), memory=()) for rank in summary.ranks
    )
    return attrs.evolve(summary, ranks=ranks)


def _plain(role: RoleDiff, change: Change, judgement: Judgement) -> dict[str, object]:
    over = any(slower is change for _, slower in judgement.regressions)
    return {"role": role.role, "stage": role.stage, "over": over, **attrs.asdict(change)}


def _delete(report: Path) -> None:
    """Delete an earlier report, so that it is not mistaken for this check's result if this check is killed."""
    if report.is_file():
        try:
            Path(os.path.realpath(report)).unlink()
        except OSError as error:
            raise ConfigError(f"{report} cannot be written: {error.strerror}.") from error


def _write_junit(file: Path, name: str, judgement: Judgement | None, problems: Sequence[str]) -> None:
    """Write the result in the XML format of Apache Ant's JUnit task, which Jenkins, GitLab and GitHub Actions can read.

    Args:
        file: Path of the XML file.
        name: Name of the baseline.
        judgement: The judgement; ``None`` if the run and the baseline could not be compared.
        problems: Error messages for files that cannot be read.
    """
    cases, reasons = [], [*problems]
    if judgement is not None:
        for role, change in judgement.judged:
            text = headline_of(role, change, judgement.limit)
            if is_over := (role, change) in judgement.regressions:
                text = f"{judgement.sentence_of(role, problems)} {text}"
            cases.append((label_of_role(role), change.name, text, is_over))
        reasons += judgement.undecided
    failures, errors = sum(over for *_, over in cases), len(reasons)
    counts = {"tests": str(len(cases) + errors), "failures": str(failures), "errors": str(errors)}
    suite = ET.Element("testsuite", {"name": f"profdeck baseline {name}", **counts})
    for label, measure, text, over in cases:
        case = ET.SubElement(suite, "testcase", {"classname": _xml(label), "name": _xml(measure)})
        result = ET.SubElement(case, "failure", {"message": _xml(text)}) if over else ET.SubElement(case, "system-out")
        result.text = _xml(text)
    for reason in reasons:
        case = ET.SubElement(suite, "testcase", {"classname": name, "name": "judged"})
        ET.SubElement(case, "error", {"message": _xml(reason)})
    terminal.write_file(file, ET.tostring(suite, encoding="utf-8", xml_declaration=True))


def _xml(text: str) -> str:
    """Replace characters that XML 1.0 does not allow."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def _print_annotations(name: str, judgement: Judgement, problems: Sequence[str]) -> None:
    regressions = {id(role): judgement.sentence_of(role, problems) for role, _ in judgement.regressions}
    for text in [*regressions.values(), *problems]:
        typer.echo(f"::error title=profdeck {_escaped(name)}::{_escaped(text)}")
    undecided = {id(role): judgement.sentence_of(role, problems) for role, _ in judgement.undecided_roles}
    sentences = [text for role, text in undecided.items() if role not in regressions]
    for text in [*sentences, *judgement.reasons_not_in([*regressions.values(), *sentences])]:
        typer.echo(f"::warning title=profdeck {_escaped(name)}::{_escaped(text)}")


def _escaped(text: str) -> str:
    """Escape a message for a GitHub workflow command."""
    return printable(text).replace("%", "%25")
