"""Tests of artifact kinds from plugins of other distributions."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from distributions import install
from profdeck import Profiler
from profdeck.records.status import Status
from profdeck.verification.run_report import read_run
from profdeck_traces.inputs import artifact_kinds

OFFERED = """
from profdeck_traces.inputs.artifact_kinds import FileCheck, ArtifactKind


class Notes(ArtifactKind):
    name = "notes"
    suffix = "_notes"

    def matches(self, path):
        return path.name.endswith("_notes") and path.is_dir()

    def check(self, path, on_progress=None):
        if (path / "odd").exists():
            raise ZeroDivisionError("odd")
        whole = (path / "end").exists()
        return FileCheck(whole=whole, problem=None if whole else "its end is missing", events=7)

    def size_to_read(self, path):
        return 0

    def read(self, path, **how):
        raise NotImplementedError
"""


@pytest.fixture
def offer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    def make(points: str) -> None:
        site = tmp_path / "site"
        install(site, "offered", f"[{artifact_kinds.ARTIFACT_KINDS}]\n{points}\n")
        (site / "offered_kinds.py").write_text(OFFERED)
        monkeypatch.syspath_prepend(str(site))
        artifact_kinds.kinds.cache_clear()

    yield make
    sys.modules.pop("offered_kinds", None)
    artifact_kinds.kinds.cache_clear()


@pytest.mark.usefixtures("tally")
def test_third_party_artifact_kind_is_verified(offer: Callable[[str], None], tmp_path: Path) -> None:
    offer("notes = offered_kinds:Notes")
    settings = {"output": str(tmp_path), "run": "run", "steps": [1], "trainer.backend": "tally"}
    with Profiler.from_config(settings=settings).capture(1):
        pass
    (manifest,) = (tmp_path / "run").glob("step_*/trainer/rank_0000.step1.json")
    notes = manifest.with_name("rank_0000.step1_notes")
    notes.mkdir()
    (notes / "end").write_text("end")
    document = json.loads(manifest.read_text())
    document["artifacts"].append({"name": notes.name, "kind": "notes", "size_bytes": 3, "whole": True, "events": 7})
    manifest.write_text(json.dumps(document))
    assert read_run(tmp_path / "run").status is Status.COMPLETE
    (notes / "end").rename(notes / "other")
    report = read_run(tmp_path / "run")
    assert report.status is Status.PARTIAL
    assert "its end is missing" in str(report.captures[0].ranks[0].problems)
    (notes / "odd").write_text("")
    assert "cannot be read: ZeroDivisionError: odd" in str(read_run(tmp_path / "run").captures[0].ranks[0].problems)
    assert {path.name for path in artifact_kinds.files_below(notes.parent)} >= {notes.name}


def test_artifact_kind_that_cannot_be_loaded_is_skipped(
    offer: Callable[[str], None], caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    offer("broken = offered_kinds:Missing")
    with caplog.at_level(logging.WARNING, logger="profdeck"):
        assert artifact_kinds.kind_named("broken") is None
    assert "The artifact kind 'broken' is skipped" in caplog.text
    assert artifact_kinds.kind_named("ascend_pt") is not None
    assert artifact_kinds.kind_of(tmp_path) is None
