"""Deletes old captures of a run, whole global steps at a time, or all that one role has in a step.

The directory gets a name that no reader looks at, in one rename. The deletion is recorded, and then the files go. What
was interrupted after the rename is completed by the next call.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import attrs

from profdeck.after_run.at_work import artifact_at_work, finish_at_work, is_record_of_finish, may_record
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.pruned import PrunedStep, read_pruned, write_pruned
from profdeck.records.run_directory import step_directories
from profdeck.verification.run_report import read_about
from profdeck_traces.base.errors import ConfigError, ProfdeckError, describe_error, did_you_mean
from profdeck_traces.base.files import directory_size
from profdeck_traces.inputs.artifact_kinds import ASIDE, files_below

PIN = "pinned"
"""A file of this name in the directory of a step keeps it."""
_NS_PER_DAY = 86_400_000_000_000


@attrs.frozen(kw_only=True)
class Limits:
    """How much of a run is kept; None is no limit. The newest step is always kept."""

    steps: int | None = None
    """How many global steps with captures."""
    size_bytes: float | None = None
    age_days: float | None = None
    """How long ago the last capture of a step ended, or began."""


@attrs.frozen(kw_only=True)
class StepOnDisk:
    """All that one global step has in a run, or all of one role in it."""

    directory: Path
    pruned: PrunedStep
    """What is to be recorded of it when it goes."""
    ended_ns: int
    stays_because: str | None
    """Why it must not be deleted whatever the limits are."""


@attrs.frozen(kw_only=True)
class Pruned:
    """What came of it."""

    deleted: tuple[StepOnDisk, ...]
    kept: tuple[StepOnDisk, ...]
    over: tuple[StepOnDisk, ...]
    """Those of the kept that the limits would not have kept."""


def prune(run: Path, limits: Limits, *, role: str | None = None, is_trial: bool = False) -> Pruned:
    """Delete the oldest steps until the rest is within the limits.

    Args:
        run: the run directory.
        limits: what is kept.
        role: of which role, so that all others stay; None for whole steps.
        is_trial: whether nothing is deleted, and only said what would be.

    Raises:
        ConfigError: nothing is there of the role.
        ProfdeckError: it is no run, or a step cannot be deleted; those before are.
    """
    read_about(run)
    if not is_trial:
        _complete(run)
    steps = list(_steps(run, role))
    chosen, over = _choose(steps, limits)
    for step in chosen if not is_trial else ():
        try:
            _delete(run, step)
        except OSError as error:
            raise ProfdeckError(f"{step.directory} cannot be deleted: {describe_error(error)}") from None
    kept = tuple(step for step in steps if step not in chosen)
    return Pruned(deleted=tuple(chosen), kept=kept, over=tuple(over))


def _steps(run: Path, role: str | None) -> Iterator[StepOnDisk]:
    steps = step_directories(run)
    if role is None:
        yield from map(_look, steps)
        return
    found = [path for step in steps for path in step.iterdir() if path.is_dir() and not path.is_symlink()]
    if role not in (roles := sorted({path.name for path in found})):
        hint = did_you_mean(role, roles) or f" It has {', '.join(roles) or 'none'}."
        raise ConfigError(f"{run} has no captures of a role '{role}'.{hint}")
    yield from (_look(path, role, path.parent) for path in found if path.name == role)


def _choose(steps: list[StepOnDisk], limits: Limits) -> tuple[list[StepOnDisk], list[StepOnDisk]]:
    """Return the steps that go, and those that would go if nothing kept them."""
    count, size_bytes = len(steps), sum(step.pruned.size_bytes for step in steps)
    chosen, over = [], []
    for step in steps[:-1]:
        is_too_old = limits.age_days is not None and time.time_ns() - step.ended_ns > limits.age_days * _NS_PER_DAY
        is_too_many = limits.steps is not None and count > limits.steps
        is_too_large = limits.size_bytes is not None and size_bytes > limits.size_bytes
        if not (is_too_old or is_too_many or is_too_large):
            continue
        if step.stays_because is not None:
            over.append(step)
            continue
        chosen.append(step)
        count, size_bytes = count - 1, size_bytes - step.pruned.size_bytes
    return chosen, over


def _look(directory: Path, role: str | None = None, step: Path | None = None) -> StepOnDisk:
    """Inspect a step directory, or the directory of a role in it."""
    step = step or directory
    why = ["it is pinned"] if any((place / PIN).exists() for place in {directory, step}) else []
    manifests, named, errors = list[Manifest](), set[Path](), dict[Path, str]()
    of_step = [path for path in step.glob("*") if path.is_file()] if role is not None else []
    for file in [*files_below(directory), *of_step]:
        if is_manifest(file):
            try:
                manifests.append(read_manifest(file))
            except ProfdeckError as error:
                errors[file] = str(error)
            else:
                named.update(file.parent / record.name for record in manifests[-1].artifacts)
        elif is_record_of_finish(file):
            why += filter(None, [finish_at_work(file)])
        else:
            why += filter(None, [artifact_at_work(file)])
    # The name of an artifact can look like a manifest's name.
    why += [error for file, error in errors.items() if file not in named]
    why += [f"rank {one.rank} of {one.role} records, or its host is gone" for one in manifests if may_record(one)]
    first = int(step.name.rpartition("_")[2])
    pruned = PrunedStep(
        first_step=first,
        last_step=max([first, *(one.last_step for one in manifests)]),
        role=role,
        captures=tuple(sorted({one.capture for one in manifests})),
        size_bytes=directory_size(directory),
    )
    ended_ns = max([one.ended_ns or one.started_ns for one in manifests], default=time.time_ns())
    return StepOnDisk(directory=directory, pruned=pruned, ended_ns=ended_ns, stays_because=why[0] if why else None)


def _delete(run: Path, step: StepOnDisk) -> None:
    aside = run / f"{ASIDE}{step.pruned.name}"
    try:
        step.directory.rename(aside)
    except FileNotFoundError:  # another process was faster
        return
    write_pruned(run, step.pruned)
    _remove(aside)


def _complete(run: Path) -> None:
    """Do the rest of what was interrupted."""
    for aside in run.glob(f"{ASIDE}step_*"):
        try:
            name = aside.name.removeprefix(ASIDE)
            if name not in {one.name for one in read_pruned(run)}:
                step, _, role = name.partition(".")
                write_pruned(run, _look(aside, role or None, run / step).pruned)
            _remove(aside)
        except OSError as error:
            raise ProfdeckError(f"{aside} cannot be deleted: {describe_error(error)}") from None


def _remove(aside: Path) -> None:
    while aside.exists():
        with suppress(FileNotFoundError):  # another process deletes it as well
            shutil.rmtree(aside)
