"""Run parts in child processes. Each part has a time limit, and all parts share a time budget."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import UTC, datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

from gpu.parts import Part

ROOT = Path(__file__).parents[2]
RESULTS = "gpu-results.json"
SKIPPED = 77
"""Exit code of a part that skips itself. Automake uses the same code."""
PARALLEL = 4
GRACE_S = 5.0
LEAST_S = 10.0
"""Minimum remaining budget to start a part."""
_PART = "PROFDECK_GPU_PART"
_TAIL = 3000


class Status(StrEnum):
    """Outcome of a part."""

    PASSED = "passed"
    FAILED = "failed"
    KILLED = "killed"
    TIMED_OUT = "timed out"
    SKIPPED = "skipped"


class Runner:
    """Runs parts and writes all results to ``gpu-results.json`` after each part."""

    def __init__(self, out: Path, host: dict[str, Any], *, deadline_s: float, vllm: Path | None = None) -> None:
        """Args:
        out: directory for results, logs and traces.
        host: hardware and software versions from `gpu.host`.
        deadline_s: end of the budget on the clock of `time.monotonic`.
        vllm: directory with vLLM and its dependencies. Parts that need vLLM have it on PYTHONPATH.
        """
        self._out = out.absolute()
        self._vllm = vllm
        self._deadline_s = deadline_s
        self._mutex = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._is_interrupted = False
        self.results: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "host": host, "parts": {}}

    def run(self, parts: Sequence[Part]) -> None:
        """Run parts in order. Parts with ``alone=False`` can run at the same time."""
        for part in parts:  # keeps the results in the order of the parts
            self.results["parts"][part.name] = {"status": Status.SKIPPED, "reason": "not started"}
        started: list[Future[None]] = []
        with ThreadPoolExecutor(PARALLEL) as pool:
            try:
                for part in parts:
                    if part.alone:
                        wait(started)
                        self._run(part)
                    else:
                        started.append(pool.submit(self._run, part))
                wait(started)
            except BaseException:  # SIGTERM or Ctrl-C
                pool.shutdown(wait=False, cancel_futures=True)
                with self._mutex:  # an interruption either prevents the start of a part or terminates it
                    self._is_interrupted = True
                for token, process in [*self._running.items()]:
                    terminate(process, token)
                raise

    def table(self) -> str:
        """Return the results as a Markdown table."""
        lines = ["| Part | Outcome | Seconds | Result |", "| --- | --- | --- | --- |"]
        for name, result in self.results["parts"].items():
            text = result.get("reason") or "; ".join(f"{key}: {value}" for key, value in result["figures"].items())
            lines.append(f"| {name} | {result['status']} | {result.get('seconds', '')} | {text} |")
        return "\n".join(lines)

    def _run(self, part: Part) -> None:
        try:
            result = self._result(part)
        except Exception as error:  # noqa: BLE001  # the other parts must still run
            result = {"status": Status.FAILED, "reason": f"{type(error).__name__}: {error}"}
        with self._mutex:
            self.results["parts"][part.name] = result
            file = self._out / RESULTS
            temporary = file.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.results, indent=1) + "\n", encoding="utf-8")
            temporary.replace(file)
            print(f"{part.name}: {result['status']} {result.get('reason', '')}", flush=True)

    def _result(self, part: Part) -> dict[str, Any]:
        remaining_s = self._deadline_s - time.monotonic()
        if missing := self._missing(part):
            return {"status": Status.SKIPPED, "reason": missing}
        if remaining_s < LEAST_S:
            return {"status": Status.SKIPPED, "reason": f"only {max(0.0, remaining_s):.0f} s of the budget remain"}
        directory = self._out / part.name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "result.json").unlink(missing_ok=True)  # from an earlier run
        log = directory / "log.txt"
        began_s = time.monotonic()
        code = self._execute(part, directory, log, min(part.limit_s, remaining_s))
        seconds = round(time.monotonic() - began_s, 1)
        reported = read_result(directory) or read_tests(log)
        status, reason = outcome(part, code, reported, log)
        report = {"figures": reported.get("figures", {}), "checks": reported.get("checks", {})}
        return {"status": status, "seconds": seconds, **({"reason": reason} if reason else {}), **report}

    def _missing(self, part: Part) -> str | None:
        for need in part.needs:
            if need == "cuda":
                if not self.results["host"].get("gpu"):
                    return "there is no CUDA device"
            elif importlib.util.find_spec(need) is None and not (self._vllm and (self._vllm / need).is_dir()):
                return f"{need} is not installed"
        return None

    def _execute(self, part: Part, directory: Path, log: Path, limit_s: float) -> int | None:
        """Return the exit code, or None if the part exceeded its time limit."""
        token = f"{part.name}-{os.getpid()}"
        layers = [self._vllm] if self._vllm and "vllm" in part.needs else []
        inherited = filter(None, [os.environ.get("PYTHONPATH")])
        environment = os.environ | {
            "PYTHONPATH": os.pathsep.join(map(str, [*layers, ROOT / "tests", ROOT, *inherited])),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "2",
            "PROFDECK_LEASE_DIR": str(directory / "leases"),
            "PROFDECK_GPU_OUT": str(directory),
            _PART: token,
            **part.environment,
        }
        command = [sys.executable, *(word.replace("{out}", str(directory)) for word in part.command)]
        with log.open("wb") as file, self._mutex:
            if self._is_interrupted:
                return None
            process = subprocess.Popen(
                command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
            self._running[token] = process
        try:
            return process.wait(limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            terminate(process, token)
            del self._running[token]


def outcome(part: Part, code: int | None, reported: dict[str, Any], log: Path) -> tuple[Status, str]:
    """Return the status of a part and, if it did not pass, the reason."""
    if code == SKIPPED:
        return Status.SKIPPED, reported.get("skipped", "no reason reported")
    if code == 0:
        return Status.PASSED, ""
    if code is None:
        return Status.TIMED_OUT, f"exceeded its time limit of {part.limit_s:g} s"
    if code < 0:
        return Status.KILLED, f"killed by {signal.Signals(-code).name}"
    checks = {name: check["detail"] for name, check in reported.get("checks", {}).items() if not check["passed"]}
    failed = [f"{name}: {detail}" if detail else name for name, detail in checks.items()]
    lines = log.read_bytes()[-_TAIL:].decode(errors="replace").strip().splitlines()
    return Status.FAILED, "; ".join(failed) or (lines[-1] if lines else f"exit code {code}")


def read_result(directory: Path) -> dict[str, Any]:
    """Read ``result.json``. Return an empty dict if the file is missing or invalid."""
    try:
        result: dict[str, Any] = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result


def read_tests(log: Path) -> dict[str, Any]:
    """Parse the failed tests and the test counts from a pytest log."""
    text = log.read_text(encoding="utf-8", errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", text, re.MULTILINE)
    counts = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error).*?)(?: =+)?$", text, re.MULTILINE)
    return {
        "checks": {name: {"passed": False, "detail": detail} for name, detail in failed},
        "figures": {"tests": counts[-1]} if counts else {},
    }


def terminate(process: subprocess.Popen[bytes], token: str) -> None:
    """Terminate all processes of a part. Kill processes that are still running after `GRACE_S`."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        if not (members := processes(process.pid, token)):
            break
        for pid in members:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        deadline_s = time.monotonic() + GRACE_S
        while processes(process.pid, token) and time.monotonic() < deadline_s:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            time.sleep(0.05)  # poll, because only the child process can be waited for


def processes(session: int, token: str) -> list[int]:
    """Return the process IDs of a session and of processes whose environment contains the token.

    Launchers start workers in new sessions. The workers inherit the token.
    """
    pids = []
    for directory in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(directory.name)
            state, _, _, sid = (directory / "stat").read_bytes().rpartition(b")")[2].split()[:4]
            is_member = int(sid) == session or f"{_PART}={token}".encode() in (directory / "environ").read_bytes()
            if is_member and state != b"Z":
                pids.append(pid)
    return pids
