"""Fast subset of `benchmarks.diagnosis`: findings for generated GPU traces with planted causes, and for controls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.diagnosis import gpu_recipes
from benchmarks.diagnosis.known_failures import KNOWN_FAILURES, describe_failures
from benchmarks.diagnosis.recipe import Answer, Kind, Recipe, Truth
from benchmarks.diagnosis.scoring import score, score_sentence, table, totals

from profdeck_traces import load

RECIPES = gpu_recipes.RECIPES.by_id
KNOWN = json.loads(KNOWN_FAILURES.read_text(encoding="utf-8"))


@pytest.mark.parametrize("identifier", RECIPES)
def test_diagnosis_of_generated_traces(identifier: str, tmp_path: Path) -> None:
    recipe = RECIPES[identifier]
    truth = gpu_recipes.record(recipe, tmp_path, 0)
    result = score(recipe, truth, load(tmp_path, cache=False).summary.to_dict()["findings"])
    known = KNOWN.get(identifier, "")
    update = f"Update {KNOWN_FAILURES.name}: python -m benchmarks.diagnosis --kind gpu --update-known"
    assert describe_failures(result) == known, f"{result}\n{update}"


def test_known_failures_are_recipes() -> None:
    assert KNOWN.keys() <= RECIPES.keys()


def planted(amount: Truth) -> None:
    """Planted function for the recipes below."""
    assert amount  # planted


ANSWER = Answer(rules=("data-loading", "slow-rank"), cure=("num_workers",))
RECIPE = Recipe(id="job/x", kind=Kind.JOB, answer=ANSWER, plant=planted, options={"stacks": True})
CONTROL = Recipe(id="job/y", kind=Kind.JOB, answer=None, plant=planted, tolerates=("profiler-overhead",))
TRUTH = Truth(cost_us=1000.0, step_us=4000.0, places=("rank 1",), lines=RECIPE.lines())


def finding(rule: str = "data-loading", gain_us: float | None = 1100.0, **more: object) -> dict[str, object]:
    place = {"file": "tests/test_diagnosis.py", "line": planted.__code__.co_firstlineno}
    return {"rule": rule, "text": "on rank 1", "do": "raise Num_workers", "gain_us": gain_us, "where": place, **more}


def test_correct_finding_passes() -> None:
    result = score(RECIPE, TRUTH, [finding()])
    assert (result.named, result.cost, result.place, result.line, result.cure) == (True,) * 5
    assert describe_failures(result) == ""


def test_each_part_is_scored() -> None:
    assert score(RECIPE, TRUTH, [finding(gain_us=1210)]).cost is False
    assert score(RECIPE, TRUTH, [finding(gain_us=None)]).cost is False
    assert score(RECIPE, TRUTH, [finding(text="on rank 0")]).place is False
    assert score(RECIPE, TRUTH, [finding(where={"file": "test_diagnosis.py", "line": 1})]).line is False
    assert score(RECIPE, TRUTH, [finding(where=None, text="test_diagnosis.py(1), rank 1")]).line is False
    assert score(RECIPE, TRUTH, [finding(do="wait")]).cure is False
    assert describe_failures(score(RECIPE, TRUTH, [finding(do="wait", gain_us=1)])) == "cost; cure"


def test_truth_is_kept() -> None:
    assert Truth.from_dict(json.loads(json.dumps(TRUTH.to_dict()))) == TRUTH


def test_only_the_first_finding_counts() -> None:
    result = score(RECIPE, TRUTH, [finding("host-bound"), finding()])
    assert (result.named, result.listed, result.first) == (False, True, "host-bound")
    assert describe_failures(result) == "named later than host-bound"


def test_notices_are_skipped() -> None:
    assert score(RECIPE, TRUTH, [finding("few-steps"), finding("busy-machine"), finding()]).named
    assert score(RECIPE, TRUTH, [finding("few-steps")]).named is False


def test_false_alarms_of_controls() -> None:
    findings = [finding("few-steps"), finding("profiler-overhead"), finding("straggler")]
    assert score(CONTROL, TRUTH, findings).false_alarms == ("straggler",)
    assert describe_failures(score(CONTROL, TRUTH, findings)) == "false alarm: straggler"


def test_verdict_in_a_sentence() -> None:
    right = score_sentence(RECIPE, TRUTH, "trainer is slower: +30%; most of it: load of rank 1 +0.950 ms")
    assert (right.named, right.cost) == (True, True)
    assert not score_sentence(RECIPE, TRUTH, "trainer is the same: rank 1 +0.950 ms").named
    assert score_sentence(CONTROL, TRUTH, "trainer is slower").false_alarms
    assert not score_sentence(CONTROL, TRUTH, "trainer is inconclusive").false_alarms


def test_totals_and_table() -> None:
    scores = [score(RECIPE, TRUTH, [finding(gain_us=1)]), score(CONTROL, TRUTH, [])]
    assert [(total.right, total.of) for total in totals(scores)] == [
        (1, 1), (1, 1), (0, 1), (1, 1), (1, 1), (1, 1), (1, 1)
    ]  # fmt: skip
    assert table(scores).endswith("| all | 1 of 1 | 1 of 1 | 0 of 1 | 1 of 1 | 1 of 1 | 1 of 1 | 1 of 1 |")
