"""What `profdeck check` says that standing captures will cost, by manifests of an earlier run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from typer.testing import Result

from profdeck.base.identity import Identity
from profdeck.records.capture import CaptureRecord, CaptureState
from profdeck.records.manifest import ManifestWriter, write_manifest

Cli = Callable[..., Result]
STEP_NS = 100_000_000
CONFIG = """
output: {output}
steps: [{steps}]
roles:
  trainer: {{backend: paper, warmup_steps: 1}}
  rollout: {{backend: paper}}
"""


def leave(run: Path, capture: CaptureRecord, ended_ns: int, **changed: Any) -> None:
    """Write the manifest of a capture that has ended."""
    capture.directory.mkdir(parents=True, exist_ok=True)
    for state in (CaptureState.STARTING, CaptureState.RECORDING, CaptureState.STOPPING):
        capture.move_to(state)
    capture.conclude(())
    capture.ended_ns = ended_ns
    recorder = ManifestWriter(backend="paper", versions={}, options={"sheets": 3}, expected_ranks=(0, 1))
    write_manifest(capture, attrs.evolve(recorder, write=lambda path, content: path.write_bytes(content) and None))
    about = json.loads(capture.manifest_path.read_text())
    capture.manifest_path.write_text(json.dumps(about | changed))


def job(run: Path, captures: int, *, costs_ns: tuple[int, int] = (100_000_000, 250_000_000), **changed: Any) -> None:
    """Leave what a job of two ranks leaves: steps of 0.1 s, three of every ten captured after one of warm-up."""
    run.mkdir(parents=True)
    about = {"created_ns": 1, "config": {"roles": {"trainer": {"warmup_steps": 1}, "rollout": {}}}}
    (run / "run.json").write_text(json.dumps(about))
    now_ns = 10**18
    for number in range(captures):
        first = 10 * (number + 1)
        began_ns = now_ns + 6 * STEP_NS
        loading_ns = 0 if number else 1_000_000_000  # in the first capture
        for rank, cost_ns in enumerate(costs_ns):
            capture = CaptureRecord(
                id=f"step{first}", directory=run / f"step_{first:06d}" / "trainer", first_step=first,
                identity=Identity(role="trainer", rank=rank, world_size=2), current_step=first + 2, started_ns=began_ns,
            )  # fmt: skip
            leave(run, capture, began_ns + 4 * STEP_NS + cost_ns + loading_ns, **changed)
        engine = CaptureRecord(
            id=f"step{first}", directory=run / f"step_{first:06d}" / "rollout", first_step=first, current_step=first,
            identity=Identity(role="rollout", rank=0, world_size=1), started_ns=began_ns,
        )  # fmt: skip
        leave(run, engine, began_ns + STEP_NS, stall_s=0.02, request=f"step{first}")
        now_ns = began_ns + 4 * STEP_NS + max(costs_ns) + loading_ns


def told(cli: Cli, tmp_path: Path, steps: str) -> dict[str, str]:
    config = tmp_path / "a.yaml"
    config.write_text(CONFIG.format(output=tmp_path / "out", steps=steps), encoding="utf-8")
    result = cli("check", config, "--json")
    assert result.exit_code == 0, result.stdout
    checks = json.loads(result.stdout)["checks"]
    return {one["what"].partition(".")[2]: one["detail"] for one in checks if one["what"].endswith(".cost")}


def test_the_share_of_the_job_is_what_an_earlier_run_paid(cli: Cli, tmp_path: Path) -> None:
    job(tmp_path / "out" / "before", 5)
    found = told(cli, tmp_path, "every 50 for 3, every 10 s")
    # The slower rank pays 0.25 s, for which the other waits after its own capture.
    assert found["trainer.cost"].startswith("every 50 for 3 from 50: 4.76% of the job; every 10 s: 2.44% of the job. ")
    each = "Each of 4 captures of 3 steps in out/before cost 250 ms (250 ms to 250 ms); a step takes 100 ms."
    assert found["trainer.cost"].replace(f"{tmp_path}/", "").endswith(each)
    assert found["rollout.cost"].startswith("every 50 for 3 from 50: 0.40% of the job; every 10 s: 0.20% of the job. ")


def test_a_change_of_options_is_named(cli: Cli, tmp_path: Path) -> None:
    job(tmp_path / "out" / "before", 5, options={"sheets": 1})
    assert "Other options then: sheets." in told(cli, tmp_path, "every 50 for 3")["trainer.cost"]


@pytest.mark.parametrize(
    ("captures", "changed"), [(0, {}), (1, {}), (5, {"stage": "update"}), (5, {"window": {"active": 3}})]
)
def test_what_no_run_tells_is_not_known(cli: Cli, tmp_path: Path, captures: int, changed: dict[str, Any]) -> None:
    job(tmp_path / "out" / "before", captures, **changed)
    assert told(cli, tmp_path, "every 50 for 3")["trainer.cost"].startswith("not known before a run in ")


def test_captures_of_chosen_steps_have_no_share(cli: Cli, tmp_path: Path) -> None:
    job(tmp_path / "out" / "before", 5)
    assert told(cli, tmp_path, "10, 20..22") == {}


def test_a_restarted_process_is_not_waited_for(cli: Cli, tmp_path: Path) -> None:
    """What lies between the captures of two processes is no time of steps."""
    job(tmp_path / "out" / "before", 5)
    for number, file in enumerate(sorted((tmp_path / "out").rglob("trainer/*.json"))):
        file.write_text(json.dumps(json.loads(file.read_text()) | {"pid": 100 + number}))
    assert told(cli, tmp_path, "every 50 for 3")["trainer.cost"].startswith("not known")
