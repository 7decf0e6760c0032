"""Writes down how long torch itself takes to end and to save each recording: the least that any stop can take.

Python imports this by its name at the start of every process that has its directory on the ``PYTHONPATH``. torch holds
the interpreter's lock in both calls, so nothing else of the process runs meanwhile.
"""

from __future__ import annotations

import functools
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from profdeck.base.imports import after_import


def _timed(function: Callable[..., Any], file: Path) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*arguments: Any, **options: Any) -> Any:
        began_s = time.perf_counter()
        try:
            return function(*arguments, **options)
        finally:
            line = json.dumps({"began_s": began_s, "took_s": time.perf_counter() - began_s})
            with file.open("a", encoding="utf-8") as out:
                out.write(line + "\n")

    return run


def _time_torch(profiler: ModuleType) -> None:
    file = Path(os.environ["BENCHMARK_TORCH_TIMES"])
    for place, name in ((profiler, "_disable_profiler"), (profiler.profile, "export_chrome_trace")):
        setattr(place, name, _timed(getattr(place, name), file))


if "BENCHMARK_TORCH_TIMES" in os.environ:
    after_import("torch.autograd.profiler", _time_torch)
