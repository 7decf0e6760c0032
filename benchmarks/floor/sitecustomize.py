"""Log how long torch needs to stop and save each recording, which is the minimum duration of any stop.

Python imports this module at the start of every process with this directory in ``PYTHONPATH``. torch holds the GIL
during both calls, so no other code of the process runs.
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
    for owner, name in ((profiler, "_disable_profiler"), (profiler.profile, "export_chrome_trace")):
        setattr(owner, name, _timed(getattr(owner, name), file))


if "BENCHMARK_TORCH_TIMES" in os.environ:
    after_import("torch.autograd.profiler", _time_torch)
