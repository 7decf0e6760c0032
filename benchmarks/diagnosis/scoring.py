"""Comparison of a recording's findings with the planted cause."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
from benchmarks.diagnosis.recipe import Answer, Lines, Recipe, Truth

TOLERANCE = 0.2
NOTICES = frozenset({"incomplete", "partial-recording", "few-steps", "cold-step", "busy-machine"})
"""Rules about the recording rather than the job. Other users of the machine can trigger ``busy-machine``."""
_LINE = re.compile(r"([\w.-]+\.py)(?::|\(|, line |\", line )(\d+)")


@attrs.frozen(kw_only=True)
class Score:
    """Result for one recipe. A value is None if it does not apply, such as ``line`` for a recording without stacks."""

    id: str
    is_control: bool
    named: bool | None = None
    """True if the first finding names the cause."""
    listed: bool | None = None
    """True if any finding names the cause."""
    cost: bool | None = None
    place: bool | None = None
    line: bool | None = None
    cure: bool | None = None
    false_alarms: tuple[str, ...] = ()
    """Rules that report an unexpected finding on a control."""
    first: str = ""
    """Rule of the first finding."""
    text: str = ""
    """Text of the first finding."""
    reported_us: float | None = None
    cost_us: float | None = None
    step_us: float = 0.0
    seconds: float = 0.0
    error: str = ""

    @classmethod
    def from_dict(cls, document: Mapping[str, Any]) -> Score:
        """Create a score from its JSON-compatible values."""
        return cls(**{**document, "false_alarms": tuple(document["false_alarms"])})


def score(recipe: Recipe, truth: Truth, findings: Sequence[Mapping[str, Any]]) -> Score:
    """Score the findings in the output of ``profdeck summary --json``."""
    expected = recipe.answer.rules if recipe.answer else ()
    about_job = [
        finding
        for finding in findings
        if finding.get("state", "found") == "found" and (finding["rule"] not in NOTICES or finding["rule"] in expected)
    ]
    if recipe.answer is None:
        false = tuple(finding["rule"] for finding in about_job if finding["rule"] not in recipe.tolerates)
        return Score(id=recipe.id, is_control=True, false_alarms=false, text=_text(about_job), step_us=truth.step_us)
    first = about_job[0] if about_job else None
    blank = Score(
        id=recipe.id,
        is_control=False,
        listed=any(finding["rule"] in expected for finding in about_job),
        first=first["rule"] if first else "",
        text=_text(about_job),
        reported_us=first["gain_us"] if first else None,
        cost_us=truth.cost_us,
        step_us=truth.step_us,
    )
    return _judge(blank, recipe.answer, truth, first or {"rule": "", "do": "", "gain_us": None})


def score_sentence(recipe: Recipe, truth: Truth, sentence: str) -> Score:
    """Score the verdict of ``profdeck diff`` or ``profdeck trend``.

    The verdict must state that the job is slower, and name the stage of the cause or an owner that matches the recipe's
    pattern. One of its times must match the cost of the cause.
    """
    slower = re.search(r"\bis slower\b", sentence) is not None
    if recipe.answer is None:
        false_alarms = ("slower",) if slower else ()
        return Score(id=recipe.id, is_control=True, false_alarms=false_alarms, text=sentence, step_us=truth.step_us)
    names = [*map(re.escape, truth.places), *filter(None, [recipe.options.get("pattern")])]
    is_named = any(re.search(name, sentence) for name in names)
    times = [float(text.replace(",", "")) * 1000 for text in re.findall(r"\+([\d,.]+) ms", sentence)]
    cost_us = truth.cost_us or 0.0
    nearest = min(times, key=lambda time_us: abs(time_us - cost_us), default=None)
    return Score(
        id=recipe.id,
        is_control=False,
        named=slower and is_named,
        listed=slower,
        cost=nearest is not None and abs(nearest / cost_us - 1) <= TOLERANCE,
        first="slower" if slower else "not slower",
        text=sentence,
        reported_us=nearest,
        cost_us=truth.cost_us,
        step_us=truth.step_us,
    )


def _judge(blank: Score, answer: Answer, truth: Truth, finding: Mapping[str, Any]) -> Score:
    """Add the result of each check to a score. A result is None if the recipe has no expected value for it."""
    text = json.dumps({key: value for key, value in finding.items() if key != "do"}, ensure_ascii=False)
    cost = None
    if truth.cost_us is not None:
        reported_us = finding["gain_us"]
        cost = reported_us is not None and abs(reported_us / truth.cost_us - 1) <= TOLERANCE
    return attrs.evolve(
        blank,
        named=finding["rule"] in answer.rules,
        cost=cost,
        place=any(place in text for place in truth.places) if truth.places else None,
        line=any(_is_in(truth.lines, *line) for line in _cited_lines(finding)) if truth.lines else None,
        cure=any(re.search(cure, finding["do"], re.IGNORECASE) for cure in answer.cure),
    )


def _is_in(lines: Lines, file: str, line: int) -> bool:
    return file == lines.file and lines.first <= line <= lines.last


def _cited_lines(value: Any) -> Iterator[tuple[str, int]]:
    """Yield the file and line number of each source line that a finding cites, in text or as ``file`` and ``line``."""
    if isinstance(value, str):
        for file, line in _LINE.findall(value):
            yield file, int(line)
    elif isinstance(value, Mapping):
        if isinstance(value.get("file"), str) and isinstance(value.get("line"), int):
            yield value["file"].rpartition("/")[2], value["line"]
        for part in value.values():
            yield from _cited_lines(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from _cited_lines(part)


def _text(findings: Sequence[Mapping[str, Any]]) -> str:
    return str(findings[0]["text"]) if findings else ""


@attrs.frozen(kw_only=True)
class Total:
    """Number of recipes that pass one check, out of the recipes to which it applies."""

    part: str
    right: int
    of: int


def totals(scores: Sequence[Score]) -> list[Total]:
    """Return the totals. Those for cost, place, line and cure cover only causes named by the first finding."""
    planted = [one for one in scores if not one.is_control]
    controls = [one for one in scores if one.is_control]
    named = [one for one in planted if one.named]
    rows = [
        Total(part="Named first", right=len(named), of=len(planted)),
        Total(part="Listed", right=sum(bool(one.listed) for one in planted), of=len(planted)),
    ]
    for part in ("cost", "place", "line", "cure"):
        judged = [getattr(one, part) for one in named if getattr(one, part) is not None]
        rows.append(Total(part=part.capitalize(), right=sum(judged), of=len(judged)))
    silent = sum(not one.false_alarms and not one.error for one in controls)
    return [*rows, Total(part="Silent controls", right=silent, of=len(controls))]


_MARKS = {True: "yes", False: "NO", None: ""}


def table(scores: Sequence[Score]) -> str:
    """Return a text table of the scores, followed by the totals."""
    header = ("recipe", "named", "cost", "place", "line", "cure", "first finding", "reported / cost, ms")
    rows: list[tuple[str, ...]] = [header]
    for one in scores:
        marks = [_MARKS[part] for part in (one.named, one.cost, one.place, one.line, one.cure)]
        first = f"error: {one.error}" if one.error else one.first or ", ".join(one.false_alarms) or "-"
        if one.named is False and one.listed:
            marks[0] = "later"
        rows.append((one.id, *marks, first[:60], _costs(one)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join([*lines, "", *_totals_by_kind(scores)])


def _totals_by_kind(scores: Sequence[Score]) -> list[str]:
    """Return the lines of a Markdown table with the totals of each kind and of all recipes."""
    groups: dict[str, list[Score]] = {}
    for one in scores:
        groups.setdefault(one.id.partition("/")[0], []).append(one)
    rows = [(name, totals(group)) for name, group in [*groups.items(), ("all", [*scores])]]
    parts = [total.part for total in rows[0][1]]
    lines = [f"| Kind | {' | '.join(parts)} |", f"| --- |{' --- |' * len(parts)}"]
    for name, row in rows:
        cells = (f"{total.right} of {total.of}" if total.of else "" for total in row)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _costs(one: Score) -> str:
    if one.cost_us is None:
        return ""
    reported = "-" if one.reported_us is None else f"{one.reported_us / 1000:.2f}"
    return f"{reported} / {one.cost_us / 1000:.2f} of {one.step_us / 1000:.2f}"
