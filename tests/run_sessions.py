"""Run nox sessions and print a table of their results.

Usage: ``python tests/run_sessions.py [NOX OPTION...]``. Run this script in the directory of the noxfile, with a Python
that can import nox. The script returns nox's exit status, which is 130 after Ctrl-C.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

RESULTS = Path(".nox", "results")  # relative to the directory of the noxfile
WIDTH = 80
MAX_FAILURES = 20  # per session; pytest's output lists all failures


def main(options: list[str]) -> int:
    RESULTS.mkdir(parents=True, exist_ok=True)
    for file in RESULTS.iterdir():
        file.unlink()
    report = RESULTS / "nox.json"
    status = _run_nox(["--report", str(report), *options])
    if report.exists():  # nox writes no report if an option is invalid
        sessions = json.loads(report.read_text(encoding="utf-8"))["sessions"]
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="replace")  # a test's reason may have characters that stdout cannot encode
        sys.stdout.write("\n".join(["", *table(sessions), ""]))
    return status


def _run_nox(options: list[str]) -> int:
    """Run nox and return its exit status, in the form of a shell if a signal ended nox."""
    with subprocess.Popen([sys.executable, "-m", "nox", *options]) as nox:
        while True:
            try:
                status = nox.wait()
            except KeyboardInterrupt:  # the terminal also sends Ctrl-C to nox, which stops its session and exits
                continue
            return status if status >= 0 else 128 - status


def table(sessions: list[dict[str, Any]]) -> Iterator[str]:
    """Format sessions as a table. `sessions` is the list in nox's JSON report."""
    yield f"{'session':<10}{'result':<10}{'passed':>8}{'failed':>8}{'skipped':>9}{'minutes':>9}"
    for session in sessions:
        name, minutes = session["name"], session["duration"] / 60
        passed, failed, reasons, unreadable = outcomes(name)
        has_counts = not unreadable and (passed or failed or reasons)
        counts = (len(passed), len(failed), len(reasons)) if has_counts else ("-", "-", "-")
        yield f"{name:<10}{session['result']:<10}{counts[0]:>8}{counts[1]:>8}{counts[2]:>9}{minutes:>9.1f}"
        if session["reason"]:
            yield from _indent(session["reason"])
        for file in unreadable:
            yield from _indent(f"unreadable results: {file}")
        for test in failed[:MAX_FAILURES]:
            yield from _indent(f"failed: {test}")
        if len(failed) > MAX_FAILURES:
            yield from _indent(f"and {len(failed) - MAX_FAILURES} more failed")
        for reason, count in sorted(Counter(reasons).items()):
            yield from _indent(f"{count} skipped: {reason}")
    yield f"{'total':<45}{sum(session['duration'] for session in sessions) / 60:>9.1f}"


def outcomes(session: str) -> tuple[list[str], list[str], list[str], list[Path]]:
    """Return a session's passed tests, its failed tests, one reason per skipped test, and its unreadable files."""
    passed, failed, reasons, unreadable = [], [], [], []
    for file in sorted(RESULTS.glob(f"{session}.*.xml")):
        tests: dict[str, dict[str, str]] = {}
        try:
            results = ET.parse(file)  # noqa: S314 - pytest wrote it in this run
        except ET.ParseError:  # pytest was killed, or the disk is full
            unreadable.append(file)
            continue
        for case in results.iter("testcase"):
            # If a fixture fails after the test, pytest writes a second test case with the same name.
            outcome = tests.setdefault(f"{case.get('classname')}::{case.get('name')}", {})
            outcome.update({element.tag: element.get("message", "") for element in case})
        for test, outcome in tests.items():
            if "failure" in outcome or "error" in outcome:
                failed.append(test)
            elif "skipped" in outcome:
                reasons.append(outcome["skipped"])
            else:
                passed.append(test)
    return passed, failed, reasons, unreadable


def _indent(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
