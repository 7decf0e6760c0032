"""Tests of the Lightning Trainer: accumulation, resuming and stages."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of Lightning


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., None]:
    """Return a function that trains a single layer. Each optimizer step has two batches."""
    import torch  # lazy: other nox sessions also collect this module
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import ModelCheckpoint

    from profdeck_trainers.lightning import LightningCallback

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(8, 8)

        def training_step(self, batch: Any, _: int) -> Any:
            return self.layer(batch[0]).square().sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    callbacks: list[object] = []

    def run(steps: int, settings: dict[str, Any], *, resume: bool = False) -> None:
        base = {"output": str(tmp_path), "run": "pl", "trainer.backend": "torch"}
        callback = LightningCallback(settings=base | settings)
        callbacks.append(callback)  # a callback that still exists must not affect the next training
        saved = ModelCheckpoint(dirpath=tmp_path / "checkpoints", save_last=True, every_n_train_steps=1)
        data = torch.utils.data.TensorDataset(torch.randn(64, 8))
        Trainer(
            max_steps=steps, accumulate_grad_batches=2, accelerator="cpu", devices=1, logger=False,
            enable_progress_bar=False, enable_model_summary=False, callbacks=[callback, saved],
            profiler=callback.profiler,
        ).fit(
            Module(), torch.utils.data.DataLoader(data, batch_size=4),
            ckpt_path=tmp_path / "checkpoints" / "last.ckpt" if resume else None,
        )  # fmt: skip

    return run


def annotation_counts(path: Path) -> Counter[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return Counter(event["name"] for event in events if event.get("cat") == "user_annotation")


def test_steps_are_optimizer_steps_with_stages(train: Callable[..., None], tmp_path: Path) -> None:
    train(6, {"steps": ["2..3", 6]})
    report = read_run(tmp_path / "pl")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert [(capture.first_step, capture.last_step) for capture in report.captures] == [(2, 3), (6, 6)]
    (artifact,) = report.captures[0].ranks[0].artifacts
    counts = annotation_counts(artifact.path)
    assert {name: counts[name] for name in ("ProfilerStep#2", "ProfilerStep#3", "forward", "backward")} == {
        "ProfilerStep#2": 1,
        "ProfilerStep#3": 1,
        "forward": 4,
        "backward": 4,
    }


def test_resumed_lightning_trainer_continues_the_step_numbers(train: Callable[..., None], tmp_path: Path) -> None:
    train(3, {"steps": [2]})
    train(5, {"steps": [2, 5], "final_step": 5}, resume=True)
    report = read_run(tmp_path / "pl")
    assert report.status is Status.COMPLETE
    assert [(capture.first_step, capture.last_step) for capture in report.captures] == [(2, 2), (5, 5)]


def test_mini_batch_window_counts_batches(train: Callable[..., None], tmp_path: Path) -> None:
    train(3, {"steps": [2], "trainer.window": {"wait": 1, "active": 1}})
    report = read_run(tmp_path / "pl")
    assert report.status is Status.COMPLETE
    (artifact,) = report.captures[0].ranks[0].artifacts
    assert annotation_counts(artifact.path)["backward"] == 1


def test_stages_are_captures_in_discrete_mode(train: Callable[..., None], tmp_path: Path) -> None:
    train(3, {"steps": [2], "mode": "discrete"})
    report = read_run(tmp_path / "pl")
    assert report.status is Status.COMPLETE
    stages = Counter(capture.stage for capture in report.captures)
    assert (stages["forward"], stages["backward"]) == (2, 2)
