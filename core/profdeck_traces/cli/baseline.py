"""`profdeck baseline`: keep the numbers of a run under a name, and check later runs against them."""

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

from profdeck_traces.analysis.diff_text import headline_of, label_of_role, verdict_of
from profdeck_traces.base.errors import ConfigError, TraceError
from profdeck_traces.base.text import plural
from profdeck_traces.cli import arguments, regression_limit, terminal, text_layout

if TYPE_CHECKING:
    from profdeck_traces.analysis.diff_model import Change, RoleDiff
    from profdeck_traces.analysis.model import RunSummary
    from profdeck_traces.cli.regression_limit import Judgement

command = typer.Typer(help="Keep the numbers of a run, and check later runs against them.", no_args_is_help=True)

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_ON_GITHUB = "GITHUB_ACTIONS"

_Name = Annotated[str, typer.Argument(metavar="NAME", help="What to call the baseline.")]
_Directory = Annotated[
    Path, typer.Option("--directory", metavar="DIR", help="Where baselines are; a file NAME.json each.")
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
    """Keep the numbers of a run as the baseline NAME, in place of those before.

    The file has what `profdeck summary --json` says of steps, stages, kernels and operators: without pictures, stacks
    and memory. `profdeck diff` takes it, too. A run with a trace that is not whole is no baseline.
    """
    file = _file(directory, name)
    summary, problems = arguments.summarise_paths([run], processes=processes, cache=cache)
    problems += [f"{rank.path}: {rank.problem}" for rank in summary.ranks if rank.problem]
    problems += [
        f"{capture.role} of step {capture.first_step} is {capture.status}."
        for capture in summary.captures
        if capture.status != "complete"
    ]
    if problems:
        raise TraceError(f"{terminal.short_path(run)} cannot be a baseline because it is incomplete. {problems[0]}")
    terminal.write_file(file, msgspec.json.encode(_without_pictures(summary).to_dict()), durable=True)
    typer.echo(
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
        Path | None, typer.Option(metavar="FILE", help="Write the result as JUnit XML, a test for each time judged.")
    ] = None,
    github: Annotated[
        bool | None,
        typer.Option(
            "--github/--no-github", help="Print annotations of GitHub Actions. Default: where GITHUB_ACTIONS is set."
        ),
    ] = None,
    processes: arguments.Processes = 0,
    cache: arguments.Cache = True,
    json: terminal.JsonOption = False,
) -> None:
    """Compare a run with the baseline NAME; exit with 5 if it got slower by more than --fail-over, 5% if not given."""
    from profdeck_traces.analysis.diff import diff_runs, load_summary
    from profdeck_traces.cli.diff import warn

    file, limit = _file(directory, name), 0.05 if fail_over is None else fail_over
    if not file.exists():
        raise ConfigError(
            f"There is no baseline {name} in {terminal.short_path(directory)}. Create it with `profdeck baseline save`."
        )
    before = load_summary(file)
    after, problems = arguments.summarise_paths([run], processes=processes, cache=cache)
    for problem in problems:
        terminal.print_stderr(f"error: {problem}")
    diff = diff_runs(before, after)
    warn(diff, (before, after), (file, run))
    judgement = regression_limit.judge(diff, limit, fail_on)
    if not diff.roles:
        judgement.undecided.append(f"{terminal.short_path(run)} and the baseline {name} have no role in common.")
    if json:
        terminal.print_json(
            {
                "baseline": name,
                "run": str(run),
                "fail_over": limit,
                "judged": [_plain(role, change, judgement) for role, change in judgement.judged],
                "undecided": judgement.undecided,
            }
        )
    else:
        console = terminal.stdout_console()
        width = text_layout.width_of(console, full_names=False)
        lines: list[Text] = []
        for role in diff.roles:
            over = any(of is role for of, _ in judgement.regressions)
            text = f"{verdict_of(role)} {'Over' if over else 'Within'} the limit of {limit * 100:g}%."
            lines += text_layout.wrapped(text, width, indent="  ", first="", style="bold red" if over else "")
        text_layout.show(console, lines)
    if junit is not None:
        _write_junit(junit, name, judgement)
    if github or (github is None and os.environ.get(_ON_GITHUB) == "true" and not json):
        for role, change in judgement.regressions:
            typer.echo(f"::error title=profdeck {_escaped(name)}::{_escaped(headline_of(role, change))}")
        for lack in judgement.undecided:
            typer.echo(f"::warning title=profdeck {_escaped(name)}::{_escaped(lack)}")
    judgement.end(problems)


def _file(directory: Path, name: str) -> Path:
    if not _NAME.fullmatch(name):
        raise ConfigError(f"NAME: {name!r} is no file name; expected letters, digits, '.', '_' and '-', no path.")
    return directory / f"{name}.json"


def _without_pictures(summary: RunSummary) -> RunSummary:
    """Leave out what no comparison needs."""
    ranks = tuple(
        attrs.evolve(rank, timelines=(), stacks=(), functions=(), shapes=(), memory=()) for rank in summary.ranks
    )
    return attrs.evolve(summary, ranks=ranks)


def _plain(role: RoleDiff, change: Change, judgement: Judgement) -> dict[str, object]:
    over = any(of is change for _, of in judgement.regressions)
    return {"role": role.role, "stage": role.stage, "over": over, **attrs.asdict(change)}


def _write_junit(file: Path, name: str, judgement: Judgement) -> None:
    """Write the result as continuous integration reads it.

    The format is that of Apache Ant's JUnit task, as Jenkins, GitLab and GitHub's actions take it.
    """
    cases = [
        (label_of_role(role), change.name, headline_of(role, change), (role, change) in judgement.regressions)
        for role, change in judgement.judged
    ]
    failures, errors = sum(over for *_, over in cases), len(judgement.undecided)
    counts = {"tests": str(len(cases) + errors), "failures": str(failures), "errors": str(errors)}
    suite = ET.Element("testsuite", {"name": f"profdeck baseline {name}", **counts})
    for role, what, text, over in cases:
        case = ET.SubElement(suite, "testcase", {"classname": _xml(role), "name": _xml(what)})
        ET.SubElement(case, "failure" if over else "system-out", {"message": _xml(text)} if over else {}).text = _xml(
            text
        )
    for lack in judgement.undecided:
        case = ET.SubElement(suite, "testcase", {"classname": name, "name": "judged"})
        ET.SubElement(case, "error", {"message": _xml(lack)})
    terminal.write_file(file, ET.tostring(suite, encoding="utf-8", xml_declaration=True))


def _xml(text: str) -> str:
    """Leave out what XML 1.0 cannot hold."""
    return re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "?", text)


def _escaped(text: str) -> str:
    """Write a text as a workflow command of GitHub takes it."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
