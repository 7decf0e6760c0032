"""Run parts, each in its own process group with a time limit, within a budget."""

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
"""Exit code of a part that cannot run here, as in Automake."""
PARALLEL = 4
GRACE_S = 5.0
LEAST_S = 10.0
"""A part is not started with less time than this."""
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
    """Runs parts and keeps their results in a file, which is complete after every part."""

    def __init__(self, out: Path, host: dict[str, Any], *, deadline_s: float, vllm: Path | None = None) -> None:
        """Args:
        out: directory for results, logs and traces.
        host: description of the machine, as `gpu.host` returns it.
        deadline_s: end of the budget, by `time.monotonic`.
        vllm: directory with vLLM and its requirements, for the PYTHONPATH of parts that need vLLM.
        """
        self._out = out.absolute()
        self._vllm = vllm
        self._deadline_s = deadline_s
        self._mutex = threading.Lock()
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self.results: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "host": host, "parts": {}}

    def run(self, parts: Sequence[Part]) -> None:
        """Run parts in order. Those that need not run alone run several at a time."""
        for part in parts:  # keep this order, whichever part ends first
            self.results["parts"][part.name] = {"status": Status.SKIPPED, "reason": "it was not reached"}
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
            except BaseException:  # SIGTERM or Ctrl-C: no part may outlive the runner
                pool.shutdown(wait=False, cancel_futures=True)
                for token, process in [*self._running.items()]:
                    end(process, token)
                raise

    def table(self) -> str:
        """Return the outcomes as a table in Markdown."""
        lines = ["| Part | Outcome | Seconds | Result |", "| --- | --- | --- | --- |"]
        for name, result in self.results["parts"].items():
            text = result.get("reason") or "; ".join(f"{key}: {value}" for key, value in result["figures"].items())
            lines.append(f"| {name} | {result['status']} | {result.get('seconds', '')} | {text} |")
        return "\n".join(lines)

    def _run(self, part: Part) -> None:
        try:
            result = self._result(part)
        except Exception as error:  # noqa: BLE001  # the other parts run whatever happens
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
            return {"status": Status.SKIPPED, "reason": f"{max(0.0, remaining_s):.0f} s of the budget are left"}
        directory = self._out / part.name
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "result.json").unlink(missing_ok=True)  # of an earlier run
        log = directory / "log.txt"
        began_s = time.monotonic()
        code = self._execute(part, directory, log, min(part.limit_s, remaining_s))
        seconds = round(time.monotonic() - began_s, 1)
        reported = read_result(directory) or read_tests(log)
        status, reason = outcome(part, code, reported, log)
        found = {"figures": reported.get("figures", {}), "checks": reported.get("checks", {})}
        return {"status": status, "seconds": seconds, **({"reason": reason} if reason else {}), **found}

    def _missing(self, part: Part) -> str | None:
        for need in part.needs:
            if need == "cuda":
                if not self.results["host"].get("gpu"):
                    return "there is no CUDA device"
            elif importlib.util.find_spec(need) is None and not (self._vllm and (self._vllm / need).is_dir()):
                return f"{need} is not installed"
        return None

    def _execute(self, part: Part, directory: Path, log: Path, limit_s: float) -> int | None:
        """Return the exit code; None if the limit was reached."""
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
        with log.open("wb") as file:
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
            end(process, token)
            del self._running[token]


def outcome(part: Part, code: int | None, reported: dict[str, Any], log: Path) -> tuple[Status, str]:
    """Return the status of a part and its reason."""
    if code == SKIPPED:
        return Status.SKIPPED, reported.get("skipped", "the part gave no reason")
    if code == 0:
        return Status.PASSED, ""
    if code is None:
        return Status.TIMED_OUT, f"it did not end within its limit of {part.limit_s:g} s"
    if code < 0:
        return Status.KILLED, f"ended by {signal.Signals(-code).name}"
    checks = {name: check["detail"] for name, check in reported.get("checks", {}).items() if not check["passed"]}
    failed = [f"{name}: {detail}" if detail else name for name, detail in checks.items()]
    lines = log.read_bytes()[-_TAIL:].decode(errors="replace").strip().splitlines()
    return Status.FAILED, "; ".join(failed) or (lines[-1] if lines else f"exit code {code}")


def read_result(directory: Path) -> dict[str, Any]:
    """Read what a part reported until it ended; empty if there is nothing."""
    try:
        result: dict[str, Any] = json.loads((directory / "result.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result


def read_tests(log: Path) -> dict[str, Any]:
    """Read the summary of pytest from its log; empty if there is none."""
    text = log.read_text(encoding="utf-8", errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)(?: - (.*))?$", text, re.MULTILINE)
    counts = re.findall(r"^(?:=+ )?(\d+ (?:passed|failed|skipped|error).*?)(?: =+)?$", text, re.MULTILINE)
    return {
        "checks": {name: {"passed": False, "detail": detail} for name, detail in failed},
        "figures": {"tests": counts[-1]} if counts else {},
    }


def end(process: subprocess.Popen[bytes], token: str) -> None:
    """End the processes of a part that still run: with SIGTERM, for launchers that have workers, and then SIGKILL."""
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
            time.sleep(0.05)  # no event is available for processes that are not children


def processes(session: int, token: str) -> list[int]:
    """Return the processes of a session, and those that left it: a launcher gives each worker a session of its own."""
    found = []
    for directory in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            pid = int(directory.name)
            state, _, _, sid = (directory / "stat").read_bytes().rpartition(b")")[2].split()[:4]
            is_member = int(sid) == session or f"{_PART}={token}".encode() in (directory / "environ").read_bytes()
            if is_member and state != b"Z":
                found.append(pid)
    return found
