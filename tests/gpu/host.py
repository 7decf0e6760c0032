"""Print the GPU, the driver and the library versions of this machine as JSON."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from importlib import metadata
from typing import Any

DISTRIBUTIONS = ("profdeck", "vllm", "triton", "numpy")


def describe() -> dict[str, Any]:
    """Return hardware and software versions. If there is no CUDA device, ``gpu`` is None."""
    versions = {}
    for name in DISTRIBUTIONS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    host: dict[str, Any] = {
        "gpu": None,
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "versions": versions,
    }
    try:
        import torch
    except ImportError:
        return host
    versions["torch"] = torch.__version__  # includes the build, such as +cu130
    if torch.cuda.is_available():
        host |= {"gpu": torch.cuda.get_device_name(), "driver": driver(), "cuda": torch.version.cuda}
        host["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return host


def driver() -> str | None:
    """Return the driver version from nvidia-smi, or None if nvidia-smi fails."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=20).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


if __name__ == "__main__":
    print(json.dumps(describe()))
