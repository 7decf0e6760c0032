"""Checks and measurements of profdeck on a GPU: ``make gpu``, or ``python tests/gpu/run.py`` without nox.

The environment needs profdeck and torch. Parts whose software is missing are skipped by name. Without a CUDA device
the remaining parts run on the CPU with small sizes, which tests only the parts themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from gpu.parts import PARTS  # found by the line above
from gpu.runner import RESULTS, Runner, Status

HOST_LIMIT_S = 60


def describe_host() -> dict[str, Any]:
    """Describe the machine, in a child process: a driver that does not answer must not stop the runner."""
    path = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
    command, environment = [sys.executable, "-m", "gpu.host"], os.environ | {"PYTHONPATH": path}
    try:
        done = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=HOST_LIMIT_S
        )
        host: dict[str, Any] = json.loads(done.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        return {"gpu": None, "problem": f"the machine could not be described: {error}"}
    return host


def main() -> None:
    """Run the selected parts and print their outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to run; default: all")
    parser.add_argument("--budget", type=float, default=900, metavar="SECONDS", help="time for all parts; default: 900")
    parser.add_argument("--out", type=Path, default=Path("gpu-out"), help="directory for results; default: gpu-out")
    parser.add_argument("--vllm", type=Path, metavar="DIR", help="directory with vLLM, if it is not installed")
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    chosen = parser.parse_args()
    deadline_s = time.monotonic() + chosen.budget
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # so that parts are ended
    parts = {part.name: part for part in PARTS}
    if unknown := [name for name in chosen.parts if name not in parts]:
        parser.error(f"no such part: {', '.join(unknown)}; parts are {', '.join(parts)}")
    if chosen.list:
        print(*(f"{part.name:16} {part.limit_s:4g} s  {part.feature}" for part in PARTS), sep="\n")
        return
    chosen.out.mkdir(parents=True, exist_ok=True)
    host = describe_host()
    print(json.dumps(host), flush=True)
    runner = Runner(chosen.out, host, deadline_s=deadline_s, vllm=chosen.vllm)
    try:
        runner.run([part for part in PARTS if not chosen.parts or part.name in chosen.parts])
    finally:
        print(f"\n{runner.table()}\n\n{chosen.out / RESULTS}")
    bad = {Status.FAILED, Status.KILLED, Status.TIMED_OUT}
    sys.exit(any(result["status"] in bad for result in runner.results["parts"].values()))


if __name__ == "__main__":
    main()
