"""Tests of the Hugging Face Trainer with a tiny model: accumulation, resuming, and captures of several steps."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_servers import vllm_environment
from pages import ROOT, Shell, blocks

from profdeck.records.status import Status
from profdeck.verification.run_report import read_run


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., None]:
    """Return a function that trains a tiny Llama."""
    import torch  # lazy: other nox sessions also collect this module
    import transformers

    from profdeck_trainers.huggingface import ProfdeckCallback

    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
            num_key_value_heads=2, head_dim=16, max_position_embeddings=32,
        )
    )  # fmt: skip
    callbacks: list[object] = []
    ids = torch.randint(0, 64, (64, 8))
    data = [{"input_ids": row, "labels": row} for row in ids]

    def run(steps: int, settings: dict[str, Any], *, resume: bool = False, **arguments: Any) -> None:
        training_arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path / "checkpoints"), max_steps=steps, per_device_train_batch_size=2,
            gradient_accumulation_steps=2, save_steps=3, report_to=[], use_cpu=True, disable_tqdm=True, **arguments,
        )  # fmt: skip
        base = {"output": str(tmp_path), "run": "hf", "trainer.backend": "torch", "trainer.options.activities": ["cpu"]}
        callback = ProfdeckCallback(settings=base | settings)
        callbacks.append(callback)  # a callback that still exists must not affect the next training
        trainer = transformers.Trainer(model=model, args=training_arguments, train_dataset=data, callbacks=[callback])
        trainer.train(resume_from_checkpoint=resume)

    return run


def step_names(path: Path) -> list[str]:
    events = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    return sorted(event["name"] for event in events if event["name"].startswith("ProfilerStep#"))


def test_steps_are_optimizer_steps(train: Callable[..., None], tmp_path: Path) -> None:
    train(6, {"steps": ["2..3", 6]})
    report = read_run(tmp_path / "hf")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    captures = {capture.first_step: capture for capture in report.captures}
    assert {first: capture.last_step for first, capture in captures.items()} == {2: 3, 6: 6}
    (artifact,) = captures[2].ranks[0].artifacts
    assert step_names(artifact.path) == ["ProfilerStep#2", "ProfilerStep#3"]


def test_window_counts_micro_batches(train: Callable[..., None], tmp_path: Path) -> None:
    train(2, {"steps": [2], "trainer.window": {"skip_first": 1, "active": 1}})
    report = read_run(tmp_path / "hf")
    assert report.status is Status.COMPLETE
    (artifact,) = report.captures[0].ranks[0].artifacts
    assert artifact.iterations == (1, 1)


def test_resumed_trainer_continues_the_step_numbers(train: Callable[..., None], tmp_path: Path) -> None:
    train(3, {"steps": [5]})
    train(5, {"steps": [5]}, resume=True)
    report = read_run(tmp_path / "hf")
    assert report.status is Status.COMPLETE
    assert [capture.first_step for capture in report.captures] == [5]


def test_training_that_ends_during_a_capture_is_partial(train: Callable[..., None], tmp_path: Path) -> None:
    train(2, {"steps": ["2..9"]})
    report = read_run(tmp_path / "hf")
    assert report.status is Status.PARTIAL
    assert "ended after step 2" in report.captures[0].ranks[0].problems[0]


GENERATES = """
import sys
import torch
import transformers
from engine_servers import write_tiny_model
from pathlib import Path
from vllm import LLM, SamplingParams
from profdeck_trainers.huggingface import ProfdeckCallback

class Trainer(transformers.Trainer):
    def training_step(self, *arguments, **keywords):
        llm.generate(["hello"], SamplingParams(max_tokens=4, ignore_eos=True), use_tqdm=False)
        return super().training_step(*arguments, **keywords)

if __name__ == "__main__":
    here = Path(sys.argv[1])
    (here / "engine").mkdir()
    llm = LLM(model=str(write_tiny_model(here / "engine")), load_format="dummy", enforce_eager=True, max_model_len=64,
              dtype="float32")
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2))
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 64, (16, 8))]
    settings = {"output": str(here), "run": "hf", "steps": [2], "trainer.backend": "torch", "rollout.backend": "vllm"}
    Trainer(
        model=model, train_dataset=rows, callbacks=[ProfdeckCallback(settings=settings, engine=llm)],
        args=transformers.TrainingArguments(str(here / "out"), max_steps=3, report_to=[], use_cpu=True,
                                            save_strategy="no", disable_tqdm=True),
    ).train()
"""


@pytest.mark.long
def test_engine_in_the_trainer_process_is_captured(tmp_path: Path) -> None:
    """Engine with the interface of ``trainer.vllm_generation.llm`` in TRL."""
    script = tmp_path / "job.py"
    script.write_text(GENERATES)
    environ = vllm_environment(tmp_path) | {"VLLM_PLUGINS": "profdeck", "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, script, tmp_path], env=environ, check=False, capture_output=True, text=True, timeout=400
    )
    assert result.returncode == 0, result.stderr[-4000:]
    report = read_run(tmp_path / "hf")
    assert (report.status, report.problems) == (Status.COMPLETE, ())
    assert sorted((capture.role, capture.first_step) for capture in report.captures) == [("rollout", 2), ("trainer", 2)]


def test_documented_example_works(tmp_path: Path) -> None:
    shell = Shell(tmp_path)
    # The remaining blocks cover other frameworks.
    script, console, *_ = blocks(ROOT / "docs" / "how-to" / "frameworks.md")
    (shell.directory / "finetune.py").write_text(script.text)
    shell.environment |= {"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"}
    for command, _ in console.commands():
        shell.run(console, command, [], 0)
    report = read_run(shell.directory / "profiles" / "hf")
    assert (report.status, [capture.last_step for capture in report.captures]) == (Status.COMPLETE, [4])
