"""Job that captures a pipeline with vLLM-Omni's own profiler."""

from __future__ import annotations

import sys

from _job import ENGINE, OUTPUT, about, finish, picture, settings
from vllm_omni.entrypoints.omni import Omni

from profdeck import Profiler


def main() -> None:
    """Capture two steps."""
    traces = OUTPUT.parent / "traces"
    compressed = sys.argv[4] == "gzip"
    profiler_config = {"profiler": "torch", "torch_profiler_dir": str(traces), "torch_profiler_use_gzip": compressed}
    omni = Omni(**ENGINE, profiler_config=profiler_config)
    traces.mkdir(exist_ok=True)
    list(
        omni.generate(["hello"], picture())
    )  # otherwise, vLLM-Omni 0.30 stops its profiler in another thread and crashes
    role = settings(1, 2, options={"native_directory": str(traces)})
    profiler = Profiler.from_config(settings=role | {"join_steps": False}, role="rollout", target=omni)
    results = {}
    for step in (1, 2):
        with profiler.capture(step) as capture:
            list(omni.generate(["hello"], picture()))
        results[str(step)] = about(capture)
    finish(results)
    omni.close()


if __name__ == "__main__":
    main()
