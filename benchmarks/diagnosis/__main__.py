"""Record jobs with planted causes and clean controls, and score the findings of `profdeck summary`, `diff` and `trend`.

python -m benchmarks.diagnosis [--only PATTERN] [--kind KIND] [--list] [--json FILE] [--vllm-python PATH]

Recordings and scores are cached by recipe and code version, so an interrupted run can be resumed. After a change to the
rules, only the scores are recomputed.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import attrs
from benchmarks.diagnosis import (
    agent_recipes,
    comparison_recipes,
    gpu_recipes,
    job_recipes,
    rank_recipes,
    server_recipes,
)
from benchmarks.diagnosis.kept_results import KeptResults
from benchmarks.diagnosis.known_failures import KNOWN_FAILURES, update
from benchmarks.diagnosis.recipe import Kind, Recipe, Truth
from benchmarks.diagnosis.recording import BEFORE, RUN, record
from benchmarks.diagnosis.scoring import Score, score, score_sentence, table, totals
from benchmarks.diagnosis.serving import Servers
from benchmarks.measure import machine

from profdeck_traces import load

ALL = (
    gpu_recipes.RECIPES,
    job_recipes.RECIPES,
    rank_recipes.RECIPES,
    agent_recipes.RECIPES,
    server_recipes.VLLM,
    server_recipes.SGLANG,
    comparison_recipes.DIFF,
    comparison_recipes.TREND,
)
DEFAULT_DIRECTORY = Path(".nox") / "bench_diagnosis"


def chosen_recipes(only: str | None, kinds: list[str] | None) -> list[Recipe]:
    """Return the recipes whose ID contains the pattern and whose kind is in `kinds`. ``None`` matches all recipes."""
    recipes = [recipe for registry in ALL for recipe in registry.by_id.values()]
    return [
        recipe
        for recipe in recipes
        if (not kinds or recipe.kind in kinds) and (only is None or fnmatch.fnmatch(recipe.id, f"*{only}*"))
    ]


def measure(recipe: Recipe, results: KeptResults, servers: Servers) -> Score:
    """Record and score a recipe, reusing cached results if available."""
    if kept := results.score(recipe):
        return kept
    began_s = time.monotonic()
    try:
        truth = results.truth(recipe)
        if truth is None:
            directory = results.begin(recipe)
            record_kind = servers.record if recipe.kind in servers.pythons else record
            truth = record_kind(recipe, directory, results.seed)
            results.keep_truth(recipe, truth)
        result = judge(recipe, truth, results.recording(recipe))
    except Exception as error:  # noqa: BLE001  # one failed recipe must not stop the benchmark
        print(f"{recipe.id}: {error}", file=sys.stderr)
        return Score(id=recipe.id, is_control=recipe.answer is None, error=str(error).partition("\n")[0])
    result = attrs.evolve(result, seconds=time.monotonic() - began_s)
    results.keep_score(recipe, result)
    return result


def judge(recipe: Recipe, truth: Truth, directory: Path) -> Score:
    """Score the findings for a recording, or the verdict of `diff` or `trend`."""
    if recipe.kind is Kind.DIFF:
        return score_sentence(recipe, truth, first_paragraph("diff", directory / BEFORE, directory / RUN))
    if recipe.kind is Kind.TREND:
        return score_sentence(recipe, truth, first_paragraph("trend", directory / RUN))
    return score(recipe, truth, load(directory / RUN, cache=False).summary.to_dict()["findings"])


def first_paragraph(command: str, *paths: Path) -> str:
    """Run a profdeck command and return the first paragraph of its output as a single line."""
    arguments = [sys.executable, "-m", "profdeck", command, "--no-cache", *map(str, paths)]
    environ = os.environ | {"COLUMNS": "200", "NO_COLOR": "1"}
    result = subprocess.run(arguments, env=environ, check=False, capture_output=True, text=True)
    if not result.stdout:
        raise RuntimeError(f"profdeck {command} printed nothing: {result.stderr[-2000:]}")
    return " ".join(result.stdout.partition("\n\n")[0].split())


def main() -> None:
    """Run the benchmark from the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="PATTERN", help="recipes whose ID matches this pattern (* and ?)")
    parser.add_argument("--kind", action="append", choices=[*Kind], help="recipes of this kind; repeatable")
    parser.add_argument("--list", action="store_true", help="list the recipes without running them")
    parser.add_argument("--seed", type=int, default=0, help="seed for sizes and names; default: 0")
    parser.add_argument("--results", type=Path, default=DEFAULT_DIRECTORY, help="directory for cached results")
    for kind in (Kind.VLLM, Kind.SGLANG):
        parser.add_argument(f"--{kind}-python", metavar="PATH", help=f"Python with {kind}; otherwise, skip its recipes")
    parser.add_argument(
        "--update-known", action="store_true", help=f"write failures of generated traces to {KNOWN_FAILURES.name}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the result to this file")
    chosen = parser.parse_args()
    recipes = chosen_recipes(chosen.only, chosen.kind)
    if chosen.list:
        for recipe in recipes:
            expected = " or ".join(recipe.answer.rules) if recipe.answer else "nothing"
            print(f"{recipe.id:40} {expected}")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # raise SystemExit so that the server is stopped
    os.environ |= {"OMP_NUM_THREADS": "1", "KINETO_LOG_LEVEL": "6"}
    results = KeptResults(chosen.results.resolve(), chosen.seed)
    engines = {Kind.VLLM: chosen.vllm_python, Kind.SGLANG: chosen.sglang_python}
    missing = [kind for kind in engines if engines[kind] is None]
    for kind in missing:
        if skipped := [recipe for recipe in recipes if recipe.kind is kind]:
            print(f"{len(skipped)} {kind} recipes were skipped: --{kind}-python is not set.", file=sys.stderr)
    recipes = [recipe for recipe in recipes if recipe.kind not in missing]
    scores = []
    with Servers({kind: python for kind, python in engines.items() if python}, results.directory) as servers:
        for number, recipe in enumerate(recipes, 1):
            scores.append(measure(recipe, results, servers))
            print(f"[{number}/{len(recipes)}] {recipe.id}: {scores[-1].seconds:.1f} s", file=sys.stderr)
    print(table(scores))
    if chosen.update_known:
        update([one for one in scores if one.id in gpu_recipes.RECIPES.by_id])
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
