"""Known failures of the fast part of the benchmark, stored in a JSON file.

The file lists the failed checks of each recipe with generated traces. A unit test compares it with the current
findings, so no result can change unnoticed.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.diagnosis.scoring import Score

KNOWN_FAILURES = Path(__file__).with_name("known_failures.json")


def describe_failures(score: Score) -> str:
    """Describe the failed checks of a score, without numbers. Return an empty string if none failed."""
    if score.error:
        return f"error: {score.error}"
    parts = []
    if score.false_alarms:
        parts.append(f"false alarm: {', '.join(score.false_alarms)}")
    if score.named is False:
        order = "later than" if score.listed else "not, but"
        parts.append(f"named {order} {score.first}" if score.first else "not named")
    parts += [part for part in ("cost", "place", "line", "cure") if getattr(score, part) is False]
    return "; ".join(parts)


def update(scores: Sequence[Score]) -> None:
    """Update the entries of the scored recipes in the file. Keep the entries of other recipes."""
    known = json.loads(KNOWN_FAILURES.read_text(encoding="utf-8"))
    for one in scores:
        known.pop(one.id, None)
        if failures := describe_failures(one):
            known[one.id] = failures
    KNOWN_FAILURES.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")
