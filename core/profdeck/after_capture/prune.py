"""Deletes a run's oldest captures. All captures of a global step are deleted together.

To delete a step, `prune` writes a record of the deletion and renames the step directory, which hides it from readers.
Then it deletes the files. The next call completes an interrupted deletion.
"""

from __future__ import annotations

import shutil
import stat
import time
from collections.abc import Callable
from pathlib import Path

import attrs

from profdeck.after_capture.work_in_progress import (
    describe_running_analysis,
    describe_running_finish,
    is_finish_record,
)
from profdeck.records.manifest import Manifest, is_manifest, read_manifest
from profdeck.records.pruned import PrunedStep, locked_records, write_pruned
from profdeck.records.run_directory import step_directories
from profdeck.verification.run_report import read_about
from profdeck_traces.base.errors import ProfdeckError, describe_error
from profdeck_traces.base.files import directory_size
from profdeck_traces.inputs.artifact_kinds import ASIDE, files_below

PIN = "pinned"
"""File name. A step is not deleted if its directory contains this file."""
_NS_PER_DAY = 86_400_000_000_000


@attrs.define(kw_only=True)
class StepOnDisk:
    """A global step that has captures in a run directory."""

    directory: Path
    pruned: PrunedStep
    """The record that is written if the step is deleted."""
    ended_ns: int
    stays_because: str | None
    """Reason why the step must not be deleted, regardless of the limits; None if there is no reason."""
    exceeds: bool = False
    """True if the step exceeds a limit."""

    @property
    def is_deleted(self) -> bool:
        """True if the step exceeds a limit and nothing prevents its deletion."""
        return self.exceeds and self.stays_because is None


def prune(  # noqa: PLR0913  # keyword-only limits
    run: Path,
    *,
    steps: int | None = None,
    size_bytes: float | None = None,
    age_days: float | None = None,
    dry_run: bool = False,
    reason_to_keep: Callable[[Path], str | None] = lambda _: None,
) -> list[StepOnDisk]:
    """Delete the steps that are older than the newest steps within the limits. The newest step is always kept.

    Older steps that cannot be deleted, such as pinned steps, are kept in addition to the newest steps.

    Args:
        run: the run directory.
        steps: number of global steps to keep, counted from the newest; None for no limit.
        size_bytes: total size of the newest steps to keep.
        age_days: maximum age in days, counted from the end of a step's last capture. If a capture has no recorded end,
            its start counts.
        dry_run: whether to return the steps without deleting any.
        reason_to_keep: function that takes a step's directory and returns a reason to keep the step, or None. It is
            called before each deletion.

    Returns:
        All steps, sorted from oldest to newest.

    Raises:
        ProfdeckError: the path is not a run, or a step cannot be deleted. Older steps may have been deleted.
    """
    read_about(run)
    if dry_run:
        steps_on_disk = _inspected(run, steps, size_bytes, age_days)
        for step in [step for step in steps_on_disk if step.is_deleted]:
            step.stays_because = reason_to_keep(step.directory)
        return steps_on_disk
    try:
        with locked_records(run):
            _delete_hidden(run)
            steps_on_disk = _inspected(run, steps, size_bytes, age_days)
            for step in steps_on_disk:
                if step.is_deleted:
                    files = _file_versions(step.directory)
                    step.stays_because = reason_to_keep(step.directory)
                if step.is_deleted:
                    write_pruned(run, step.pruned)
                    hidden = step.directory.rename(run / f"{ASIDE}{step.directory.name}")
                    if _file_versions(hidden) != files:
                        hidden.rename(step.directory)
                        step.stays_because = "its files have just changed"
                    _delete_hidden(run)
    except OSError as error:
        raise ProfdeckError(f"Cannot delete old captures of {run}: {describe_error(error)}") from None
    return steps_on_disk


def _file_versions(directory: Path) -> dict[Path, tuple[int, int, int]]:
    """Return the inode, size and modification time of each file below a directory, by relative path."""
    versions = {}
    for path in directory.rglob("*"):
        status = path.lstat()
        if not stat.S_ISDIR(status.st_mode):
            versions[path.relative_to(directory)] = status.st_ino, status.st_size, status.st_mtime_ns
    return versions


def _delete_hidden(run: Path) -> None:
    for directory in run.glob(f"{ASIDE}*"):
        shutil.rmtree(directory)


def _inspected(run: Path, limit: int | None, limit_bytes: float | None, limit_days: float | None) -> list[StepOnDisk]:
    """Return all steps, with `exceeds` set to True for steps that exceed a limit."""
    steps = [_inspect(directory) for directory in step_directories(run)]
    size_bytes = 0
    for count, step in enumerate(reversed(steps), start=1):
        size_bytes += step.pruned.size_bytes
        age_ns = time.time_ns() - step.ended_ns
        step.exceeds = count > 1 and (
            (limit is not None and count > limit)
            or (limit_bytes is not None and size_bytes > limit_bytes)
            or (limit_days is not None and age_ns > limit_days * _NS_PER_DAY)
        )
    return steps


def _inspect(directory: Path) -> StepOnDisk:
    reasons = ["it is pinned"] if (directory / PIN).exists() else []
    manifests, artifacts, errors = list[Manifest](), set[Path](), dict[Path, str]()
    for file in files_below(directory):
        if is_manifest(file):
            try:
                manifests.append(read_manifest(file))
            except ProfdeckError as error:
                errors[file] = str(error)
            else:
                artifacts.update(file.parent / record.name for record in manifests[-1].artifacts)
        elif is_finish_record(file):
            reasons += filter(None, [describe_running_finish(file)])
        else:
            reasons += filter(None, [describe_running_analysis(file)])
    # An artifact can be named like a manifest, so do not report artifacts as invalid manifests.
    reasons += [error for file, error in errors.items() if file not in artifacts]
    reasons += [
        f"rank {manifest.rank} of {manifest.role} may still be recording"
        for manifest in manifests
        if manifest.under_way is not False
    ]
    first_step = int(directory.name.rpartition("_")[2])
    pruned = PrunedStep(
        first_step=first_step,
        last_step=max([first_step, *(manifest.last_step for manifest in manifests)]),
        captures=tuple(sorted({manifest.capture for manifest in manifests})),
        size_bytes=directory_size(directory),
    )
    ended_ns = max([manifest.ended_ns or manifest.started_ns for manifest in manifests], default=time.time_ns())
    stays_because = reasons[0] if reasons else None
    return StepOnDisk(directory=directory, pruned=pruned, ended_ns=ended_ns, stays_because=stays_because)
