"""Test profdeck on a GPU and measure its overhead.

Run ``make gpu``. Without nox, run ``python tests/gpu/run.py`` in an environment with profdeck and torch. If a part's
requirements are missing, the part is skipped. If there is no CUDA device, the other parts run on the CPU with small
sizes. Results from a CPU only show that the parts themselves work.
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

from gpu.parts import PARTS  # requires the sys.path entry above
from gpu.runner import RESULTS, Runner, Status

HOST_LIMIT_S = 60


def describe_host() -> dict[str, Any]:
    """Run `gpu.host` in a child process with a time limit, because a broken driver can block."""
    path = os.pathsep.join(filter(None, [sys.path[0], os.environ.get("PYTHONPATH")]))
    command, environment = [sys.executable, "-m", "gpu.host"], os.environ | {"PYTHONPATH": path}
    try:
        result = subprocess.run(
            command, env=environment, check=True, capture_output=True, text=True, timeout=HOST_LIMIT_S
        )
        host: dict[str, Any] = json.loads(result.stdout)
    except (subprocess.SubprocessError, ValueError) as error:
        return {"gpu": None, "problem": f"gpu.host failed: {error}"}
    return host


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="parts to run; default: all")
    parser.add_argument(
        "--budget", type=float, default=900, metavar="SECONDS", help="time limit for all parts; default: 900"
    )
    parser.add_argument("--out", type=Path, default=Path("gpu-out"), help="directory for results; default: gpu-out")
    parser.add_argument(
        "--vllm", type=Path, metavar="DIR", help="directory that contains vLLM, if vLLM is not installed"
    )
    parser.add_argument("--list", action="store_true", help="list the parts and exit")
    arguments = parser.parse_args()
    deadline_s = time.monotonic() + arguments.budget
    # Raise SystemExit on SIGTERM, because the runner terminates its parts on an exception.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parts = {part.name: part for part in PARTS}
    if unknown := [name for name in arguments.parts if name not in parts]:
        parser.error(f"unknown part: {', '.join(unknown)}. Choose from: {', '.join(parts)}")
    if arguments.list:
        print(*(f"{part.name:16} {part.limit_s:4g} s  {part.feature}" for part in PARTS), sep="\n")
        return
    arguments.out.mkdir(parents=True, exist_ok=True)
    host = describe_host()
    print(json.dumps(host), flush=True)
    runner = Runner(arguments.out, host, deadline_s=deadline_s, vllm=arguments.vllm)
    try:
        runner.run([part for part in PARTS if not arguments.parts or part.name in arguments.parts])
    finally:
        print(f"\n{runner.table()}\n\n{arguments.out / RESULTS}")
    failures = {Status.FAILED, Status.KILLED, Status.TIMED_OUT}
    sys.exit(any(result["status"] in failures for result in runner.results["parts"].values()))


if __name__ == "__main__":
    main()
