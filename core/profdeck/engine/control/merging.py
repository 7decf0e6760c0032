"""Merges the traces of an engine's ranks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from profdeck.records.artifact import Artifact
from profdeck.records.capture import EngineCapture
from profdeck.records.manifest import read_manifest
from profdeck_traces import TraceCheck
from profdeck_traces.base.errors import ProfdeckError, describe_error


def merge_ranks(capture: EngineCapture, manifests: Sequence[Path]) -> Sequence[Artifact]:
    """Merge the traces listed in manifests into one artifact. If this fails, the artifact contains the error."""
    destination = capture.artifact_path(".merged.json.gz")
    try:
        check = _merge(manifests, destination)
    except (OSError, ProfdeckError) as error:
        problem = f"The traces of the ranks were not merged: {describe_error(error)}"
        return [Artifact(path=destination, kind="merged_trace", whole=False, problem=problem)]
    return [
        Artifact(
            path=destination,
            kind="merged_trace",
            size_bytes=check.size_bytes,
            events=check.events,
            whole=check.whole,
            problem=check.problem,
        )
    ]


def _merge(manifests: Sequence[Path], destination: Path) -> TraceCheck:
    # Imported here because an engine's environment may lack the dependencies of the `traces` extra.
    from profdeck_traces import MergeSource, merge_traces

    sources: list[MergeSource] = []
    for path in manifests:
        manifest = read_manifest(path)
        parallel = "-".join(f"{name}{index}" for name, index in manifest.parallel.items())
        label = " ".join(filter(None, [manifest.role_and_replica, f"rank {manifest.rank}", parallel, manifest.stage]))
        for record in manifest.artifacts:
            if record.kind == "trace" and record.size_bytes and (path.parent / record.name).exists():
                sources.append(MergeSource(path.parent / record.name, label, len(sources)))
    return merge_traces(sources, destination)
