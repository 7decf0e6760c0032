"""Record jobs with planted causes and clean controls, and score the findings of `profdeck summary`.

python -m benchmarks.diagnosis [--only PATTERN] [--kind KIND] [--list] [--json FILE]

Recordings and scores are kept by recipe and by the version of the code, so that a later run continues. After a change
of the rules, only the scores are computed again.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from pathlib import Path

import attrs
from benchmarks.diagnosis import gpu_recipes, job_recipes, rank_recipes
from benchmarks.diagnosis.kept_results import KeptResults
from benchmarks.diagnosis.recipe import Kind, Recipe
from benchmarks.diagnosis.recording import RUN, record
from benchmarks.diagnosis.scoring import Score, score, table, totals
from benchmarks.measure import machine

from profdeck_traces import load

ALL = (gpu_recipes.RECIPES, job_recipes.RECIPES, rank_recipes.RECIPES)
DEFAULT_DIRECTORY = Path(".nox") / "bench_diagnosis"


def chosen_recipes(only: str | None, kinds: list[str] | None) -> list[Recipe]:
    """Return the recipes whose id matches a pattern and whose kind is one of `kinds`."""
    recipes = [recipe for registry in ALL for recipe in registry.by_id.values()]
    return [
        recipe
        for recipe in recipes
        if (not kinds or recipe.kind in kinds) and (only is None or fnmatch.fnmatch(recipe.id, f"*{only}*"))
    ]


def measure(recipe: Recipe, results: KeptResults) -> Score:
    """Record and score a recipe, unless the results are kept."""
    if kept := results.score(recipe):
        return kept
    began_s = time.monotonic()
    try:
        truth = results.truth(recipe)
        if truth is None:
            truth = record(recipe, results.begin(recipe), results.seed)
            results.keep_truth(recipe, truth)
        findings = load(results.recording(recipe) / RUN, cache=False).summary.to_dict()["findings"]
    except Exception as error:  # noqa: BLE001  # one failed recipe must not end the benchmark
        print(f"{recipe.id}: {error}", file=sys.stderr)
        return Score(id=recipe.id, is_control=recipe.answer is None, error=str(error).partition("\n")[0])
    result = attrs.evolve(score(recipe, truth, findings), seconds=time.monotonic() - began_s)
    results.keep_score(recipe, result)
    return result


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", help="recipes whose id contains this pattern (* and ?)")
    parser.add_argument("--kind", action="append", choices=[*Kind], help="recipes of this kind; repeatable")
    parser.add_argument("--list", action="store_true", help="list the recipes without running them")
    parser.add_argument("--seed", type=int, default=0, help="seed of the sizes and names; default: 0")
    parser.add_argument("--results", type=Path, default=DEFAULT_DIRECTORY, help="directory of kept results")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    chosen = parser.parse_args()
    recipes = chosen_recipes(chosen.only, chosen.kind)
    if chosen.list:
        for recipe in recipes:
            expected = " or ".join(recipe.answer.rules) if recipe.answer else "nothing"
            print(f"{recipe.id:40} {expected}")
        return
    results = KeptResults(chosen.results.resolve(), chosen.seed)
    scores = []
    for number, recipe in enumerate(recipes, 1):
        scores.append(measure(recipe, results))
        print(f"[{number}/{len(recipes)}] {recipe.id}: {scores[-1].seconds:.1f} s", file=sys.stderr)
    print(table(scores))
    if chosen.json:
        document = {
            "machine": machine(),
            "seed": chosen.seed,
            "totals": [attrs.asdict(total) for total in totals(scores)],
            "recipes": [attrs.asdict(one) for one in scores],
        }
        chosen.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
