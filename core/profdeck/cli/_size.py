"""How much a capture of targets will write, in words, by what an earlier one wrote or by one that measures it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from profdeck.backends.building import build_backend
from profdeck.base.errors import CaptureError
from profdeck.base.words import plural
from profdeck.cli import _capture_servers, kit
from profdeck.config.model import Config
from profdeck.replicas.expected_size import expected_size

_MEASURE_S = 60.0


def words(config: Config, name: str, targets: int) -> str:
    """Say how much a capture of so many targets of a role will write."""
    role, options = config.roles[name], build_backend(config, name).options
    assert role.targets is not None  # noqa: S101  # the caller has looked
    window, budget_gb = role.iterations, role.targets.budget_gb
    size = expected_size(config.output.absolute(), name, iterations=window, options=options)
    if size is None:
        return "not known before a capture with these options; --measure records one iteration"
    within = ""
    if budget_gb is not None:
        within = f"; {size.fitting(budget_gb, targets)} of {targets} fit into budget_gb: {budget_gb:g}"
    each = (
        f"{kit.size(round(size.target_bytes))} each, by {plural(size.targets, 'target')} in {kit.short_path(size.run)}"
    )
    iterations = "" if window is None else f" of {plural(window.count, 'iteration')}"
    return f"{kit.size(round(targets * size.target_bytes))} for {plural(targets, 'target')}{iterations}: {each}{within}"


def measure(name: str, file: Path, settings: Mapping[str, Any]) -> str:
    """Record the next iteration of one target of each kind of a role, in a run of its own.

    Args:
        name: The role.
        file: The config's file.
        settings: What it was loaded with.

    Raises:
        CaptureError: Nothing was recorded.
    """
    run = time.strftime("measured-%Y%m%d-%H%M%S")
    given = _capture_servers.ServerOptions(
        urls=(),
        router=None,
        file=None,
        actors=(),
        namespace=None,
        role=name,
        replica=None,
        own={"iterations": {"count": 1}},
        of_targets={"sample": 1},
        settings={**settings, "run": run},
        config=file,
        warmup_requests=None,
        iterations=1,
        timeout_s=_MEASURE_S,
    )
    captured = asyncio.run(_capture_servers.capture(given))
    if captured.error is not None:
        raise captured.error
    if problems := [problem for capture in captured.captures for problem in capture.problems]:
        idle = f"It waited {_MEASURE_S:g} s at most, and an idle engine has no iterations."
        raise CaptureError(" ".join(["Nothing was measured.", *problems, idle]))
    return f"one iteration of a target, in {kit.short_path(captured.run)}"
