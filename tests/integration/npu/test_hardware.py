"""The only test that requires an Ascend NPU with CANN. Run it with `pytest -m npu_hardware`.

Last run on hardware: never. After a run, update this line with the date, device, CANN and torch_npu that the test
prints.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from profdeck import Status
from profdeck.verification.run_report import read_run

pytestmark = pytest.mark.npu_hardware

MATMULS = 4

DETECT_NPU = """
import json
try:
    from profdeck_npu import cann
    torch_npu = cann.load()
    import torch
    if not torch.npu.is_available():
        raise RuntimeError(f"torch_npu {torch_npu.__version__} finds no NPU")
    from torch_npu.utils.collect_env import get_cann_version
    print("found", json.dumps([torch.npu.get_device_name(0), get_cann_version(), torch_npu.__version__]))
except Exception as error:
    print("not found", json.dumps(str(error)))
"""

TRAIN = f"""
import torch
from profdeck import Profiler

a = torch.rand(1024, 1024, dtype=torch.float16).to("npu")
settings = {{
    "output": "profiles", "run": "hardware", "steps": ["1..3"], "on_error": "raise", "trainer.backend": "npu",
    "trainer.warmup_steps": 1, "trainer.options": {{"level": "level1", "analyse": False}},
}}
with Profiler.from_config(settings=settings) as profiler:
    for step in range(5):
        with profiler.capture(step):
            for _ in range({MATMULS}):
                b = a @ a
            torch.npu.synchronize()
print(float(b.float().mean()))
"""


@pytest.fixture(scope="module")
def npu() -> str:
    """Description of the NPU. Without an NPU, the test is skipped."""
    # In a child process, because torch cannot be imported again after a failed import.
    result = subprocess.run(
        [sys.executable, "-c", DETECT_NPU], check=False, capture_output=True, text=True, timeout=120
    )
    line = next((line for line in reversed(result.stdout.splitlines()) if line.startswith(("found", "not found"))), "")
    kind, _, details = line.rpartition("found ")
    if not details or kind:
        pytest.skip(f"needs an Ascend NPU: {json.loads(details) if details else result.stderr.strip()[-300:]}")
    device, cann, torch_npu = json.loads(details)
    return f"{device}, CANN {cann}, torch_npu {torch_npu}"


def test_every_step_has_its_kernels(npu: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def run(*arguments: str) -> str:
        result = subprocess.run(
            [sys.executable, *arguments], check=False, cwd=tmp_path, capture_output=True, text=True, timeout=500
        )
        output = result.stdout + result.stderr
        assert result.returncode == 0, output
        assert "[ERROR]" not in output
        return result.stdout

    run("-c", TRAIN)
    report = read_run(tmp_path / "profiles" / "hardware")
    (artifact,) = report.captures[0].ranks[0].artifacts
    assert (report.status, artifact.kind, artifact.whole) == (Status.COMPLETE, "ascend_pt", True), report
    assert any(artifact.path.glob("PROF_*/device_*"))
    assert any(artifact.path.glob("FRAMEWORK/torch.op_range"))

    run("-m", "profdeck", "npu", "analyse", "profiles/hardware")
    analysed = read_run(tmp_path / "profiles" / "hardware")
    assert (analysed.status, analysed.problems) == (Status.COMPLETE, ()), analysed
    assert not [path for path in artifact.path.glob("logs/*") if "[ERROR]" in path.read_text(errors="replace")]
    with (artifact.path / "ASCEND_PROFILER_OUTPUT" / "kernel_details.csv").open(encoding="utf-8", newline="") as file:
        kernels = Counter(row["Step Id"].strip() for row in csv.DictReader(file) if "MatMul" in row["Type"])
    # The first step shows whether device data at the start of the window is lost, as with CANN 9.2 beta.
    assert kernels == {"1": MATMULS, "2": MATMULS, "3": MATMULS}

    summary = json.loads(run("-m", "profdeck", "summary", "--json", "profiles/hardware"))
    assert "MatMul" in json.dumps(summary)
    with capsys.disabled():
        sys.stdout.write(f"\nran on {npu}\n")
