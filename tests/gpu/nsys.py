"""Check that Nsight Systems records the cudaProfilerApi range of each capture."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from gpu.report import OUT, Report, status

CONFIG = """
run: ranges
steps: [2, '4..5']
final_step: 7
roles:
  trainer: {backend: torch, options: {cuda_profiler_range: true}}
"""
SCRIPT = """
import torch
from profdeck import Profiler
profiler = Profiler.from_config("profdeck.yaml")
x = torch.randn(512, 512, device="cuda")
for step in range(8):
    with profiler.capture(step):
        (x @ x).sum().item()
"""


def main() -> None:
    report = Report()
    # Nsight Compute also installs nsys.
    installed = sorted(Path("/opt/nvidia").glob("nsight-*/*/host/target-linux-x64/nsys"))
    nsys = shutil.which("nsys") or next(map(str, installed), None)
    if nsys is None:
        report.skip("nsys is not installed")
    (OUT / "profdeck.yaml").write_text(f"output: {OUT}\n{CONFIG}")
    (OUT / "train.py").write_text(SCRIPT)
    command = [sys.executable, "-m", "profdeck", "nsys-args", "profdeck.yaml"]
    flags = subprocess.run(command, cwd=OUT, check=True, capture_output=True, text=True).stdout.split()
    report.figure(
        "nsys", subprocess.run([nsys, "--version"], check=False, capture_output=True, text=True).stdout.strip()
    )
    subprocess.run([nsys, "profile", *flags, sys.executable, "train.py"], cwd=OUT, check=False, timeout=45)
    reports = sorted(path.name for path in OUT.rglob("*") if path.suffix in {".nsys-rep", ".qdstrm", ".qdrep"})
    report.check("ranges recorded", len(reports) >= 2, reports)
    report.check("captures complete", status("ranges") == "complete", status("ranges"))
    report.finish()


if __name__ == "__main__":
    main()
