"""Cache of recordings and scores. Later runs reuse an entry if neither the code nor the recipe has changed."""

from __future__ import annotations

import functools
import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import attrs
from benchmarks.diagnosis.recipe import Kind, Recipe, Truth
from benchmarks.diagnosis.scoring import Score

ROOT = Path(__file__).resolve().parents[2]
_RECORDING = ("core/profdeck", "plugins")
_READING = ("core/profdeck_traces", "native")
_HERE = Path(__file__).parent
_JOB = ("recipe.py", "recording.py", "training_job.py")
_COMMON = {
    Kind.GPU: ("recipe.py", "simulated_gpu.py", "gpu_jobs.py"),
    Kind.JOB: _JOB,
    Kind.RANKS: _JOB,
    Kind.VLLM: ("recipe.py", "serving.py"),
    Kind.AGENT: _JOB,
    Kind.DIFF: (*_JOB, "simulated_gpu.py", "gpu_jobs.py"),
    Kind.TREND: _JOB,
    Kind.SGLANG: ("recipe.py", "serving.py"),
}
"""Modules in this directory that recordings of each kind depend on, in addition to the recipe's source."""


@functools.cache
def _version(paths: tuple[Path, ...]) -> str:
    digest = hashlib.sha256()
    for path in paths:
        digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def _sources(*directories: str) -> tuple[Path, ...]:
    paths: Iterable[Path] = (path for name in directories for path in (ROOT / name).rglob("*"))
    return tuple(sorted(path for path in paths if path.suffix in {".py", ".cpp", ".h", ".hpp"}))


def recording_version(recipe: Recipe, seed: int) -> str:
    """Return a hash of the code and values that a recording depends on."""
    common = _version(tuple(_HERE / name for name in _COMMON[recipe.kind]))
    profiler = "" if recipe.kind is Kind.GPU else _version(_sources(*_RECORDING))
    parts = (profiler, common, recipe.source, repr(recipe.options), str(seed))
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def score_version(recipe: Recipe, seed: int) -> str:
    """Return a hash of the code and values that a score depends on."""
    scoring = _version((_HERE / "scoring.py",))
    parts = (recording_version(recipe, seed), _version(_sources(*_READING)), scoring)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


@attrs.frozen
class KeptResults:
    """Cached recordings and scores in a directory, one entry per recipe."""

    directory: Path
    seed: int

    def recording(self, recipe: Recipe) -> Path:
        """Return the directory of a recipe's recording."""
        return self.directory / recipe.id

    def truth(self, recipe: Recipe) -> Truth | None:
        """Return the truth of a finished recording made by the current version, or None."""
        path = self.recording(recipe) / "truth.json"
        if not path.exists():
            return None
        document = json.loads(path.read_text(encoding="utf-8"))
        is_current = document["version"] == recording_version(recipe, self.seed)
        return Truth.from_dict(document["truth"]) if is_current else None

    def begin(self, recipe: Recipe) -> Path:
        """Delete a recipe's existing recording, and return an empty directory for a new one."""
        path = self.recording(recipe)
        shutil.rmtree(path, ignore_errors=True)
        path.mkdir(parents=True)
        return path

    def keep_truth(self, recipe: Recipe, truth: Truth) -> None:
        """Save the truth, which marks the recording as finished."""
        document = {"version": recording_version(recipe, self.seed), "truth": truth.to_dict()}
        (self.recording(recipe) / "truth.json").write_text(json.dumps(document, indent=1), encoding="utf-8")

    def score(self, recipe: Recipe) -> Score | None:
        """Return the score computed by the current version, or None."""
        path = self.recording(recipe) / "score.json"
        if not path.exists():
            return None
        document = json.loads(path.read_text(encoding="utf-8"))
        is_current = document["version"] == score_version(recipe, self.seed)
        return Score.from_dict(document["score"]) if is_current else None

    def keep_score(self, recipe: Recipe, score: Score) -> None:
        """Save the score of a successful recording."""
        document = {"version": score_version(recipe, self.seed), "score": attrs.asdict(score)}
        (self.recording(recipe) / "score.json").write_text(json.dumps(document, indent=1), encoding="utf-8")
