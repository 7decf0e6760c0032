"""Finds the manifests below a path, and separates a run's own manifests from copies and from other runs."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import attrs

from profdeck.base.identity import file_stem
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.run_directory import RUN_FILE, is_step_directory, replica_directory, run_of
from profdeck_traces.base.errors import ProfdeckError
from profdeck_traces.inputs.artifact_kinds import files_below, is_trace_path

_COPIES = "contains copies: the manifests in it belong to other ranks, steps or roles. Its traces are skipped"


@attrs.frozen
class RunManifest:
    """A manifest at its original path in a run."""

    file: Path
    """Path below the given path."""
    real_file: Path
    """Absolute path without symbolic links."""
    manifest: Manifest
    run: Path
    """Run directory, relative to the current directory if the given path is relative."""
    real_run: Path


@attrs.frozen
class SkippedManifest:
    """A manifest that does not count, because it is a copy or belongs to another run."""

    file: Path
    manifest: Manifest
    directory: Path
    """Directory to report."""
    reason: str


@attrs.frozen
class RunManifests:
    """Manifests below a path."""

    own: Sequence[RunManifest]
    skipped: Sequence[SkippedManifest]
    other_runs: Sequence[Path]
    """Directories of runs inside another run. None of their files count."""
    unreadable: Sequence[tuple[Path, str]]
    """Directories, and manifests in runs, that cannot be read, and the reasons."""


def find_manifests(path: Path) -> RunManifests:
    """Return the manifests of a trace, or of all traces below a directory.

    Below a run directory, only the files of this run count. Other directories can contain several runs. In a directory
    outside of all runs, all manifests count.
    """
    is_trace = is_trace_path(path)
    directory = path.parent if is_trace else path
    base = Path(os.path.realpath(directory))
    is_run = cache(is_run_directory)
    run_above = next(filter(is_run, base.parents), None)
    own, skipped, other_runs = [], [], []
    errors: list[OSError] = []
    unreadable: dict[Path, str] = {}
    listed: set[Path] = set()
    for file in sorted(directory.glob("*.json") if is_trace else files_below(directory, on_error=errors.append)):
        relative = file.relative_to(directory)
        real_file = base / relative
        runs = [level for parent in reversed(relative.parents) if is_run(level := base / parent)]  # outermost first
        run = runs[0] if runs else run_above
        if file.name == RUN_FILE and is_run(real_file.parent) and real_file.parent != run:
            other_runs.append(file.parent)
        if real_file.parent == run and is_step_directory(file.name):
            unreadable[file] = "cannot be read: it is not a directory"
        if not is_manifest(file):
            continue
        try:
            manifest = read_manifest(file)
        except ProfdeckError:  # the trace can be read without it
            if run is not None and not is_trace:
                unreadable[file] = "is not a readable manifest"
            continue
        listed.update(file.parent / record.name for record in manifest.artifacts)
        manifest_run = run_of(real_file, manifest.replica)
        if run is None or (run == manifest_run and is_in_place(real_file, manifest, run)):
            shown = _shown(manifest_run, directory, base)
            own.append(RunManifest(file, real_file, manifest, shown, manifest_run))
            continue
        if len(runs) > 1 and is_run(manifest_run):
            reason = f"is a different run than {_shown(run, directory, base)}. To read it, pass its path"
            skipped.append(SkippedManifest(file, manifest, _shown(manifest_run, directory, base), reason))
        else:
            skipped.append(SkippedManifest(file, manifest, file.parent, _COPIES))
    unreadable |= {Path(error.filename): f"cannot be read: {error.strerror}" for error in errors}
    # An artifact may have a name like a manifest, such as rank_0000.step1.memory.json.
    reasons = [(file, reason) for file, reason in unreadable.items() if listed.isdisjoint((file, *file.parents))]
    return RunManifests(own, skipped, other_runs, reasons)


def is_run_directory(directory: Path) -> bool:
    """Return whether a directory is a run.

    A copy of ``run.json`` in the directory of a step, role or replica does not make this directory a run.
    """
    if not (directory / RUN_FILE).exists():
        return False
    levels = (directory, *directory.parents[:2])
    is_inside = any(is_step_directory(level.name) and (level.parent / RUN_FILE).exists() for level in levels)
    return not is_inside or any(is_step_directory(child.name) for child in directory.iterdir())


def is_in_place(file: Path, manifest: Manifest, run: Path) -> bool:
    """Return True if the path of a manifest matches its contents.

    Copies at other paths must not count as additional ranks.
    """
    directory = run / f"step_{manifest.first_step:06d}" / manifest.role
    if manifest.replica is not None:
        directory = replica_directory(directory, manifest.replica)
    stem = "target" if manifest.target is not None else file_stem(manifest.rank, manifest.parallel)
    return file == directory / f"{stem}.{manifest.capture}.json"


def _shown(run: Path, directory: Path, base: Path) -> Path:
    """Return a run's path for display, from its real path.

    Args:
        run: real path of the run.
        directory: directory that the user passed.
        base: real path of this directory.
    """
    if run.is_relative_to(base):
        return directory / run.relative_to(base)
    if not directory.is_absolute():
        relative = Path(os.path.relpath(run))
        if relative.parts[:1] != ("..",):
            return relative
    return run
