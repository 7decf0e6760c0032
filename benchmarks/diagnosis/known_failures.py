"""Known failures of the fast part: a JSON file with the failing parts of each recipe of generated traces.

A unit test compares the file with the current findings, so that each change of a result is seen.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from benchmarks.diagnosis.scoring import Score

KNOWN_FAILURES = Path(__file__).with_name("known_failures.json")


def describe_failures(score: Score) -> str:
    """Return the failing parts of a score without numbers, or an empty string."""
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
    """Write the failures of these scores to the file. The failures of other recipes are kept."""
    known = json.loads(KNOWN_FAILURES.read_text(encoding="utf-8"))
    for one in scores:
        known.pop(one.id, None)
        if failures := describe_failures(one):
            known[one.id] = failures
    KNOWN_FAILURES.write_text(json.dumps(known, indent=2, sort_keys=True) + "\n", encoding="utf-8")
