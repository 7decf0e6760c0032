"""Job that captures an engine with pipeline stages, or with data-parallel replicas and one frontend."""

from __future__ import annotations

import sys

import sglang
from _job import ENGINE, Host, about, finish

if __name__ == "__main__":
    host = Host(sglang.Engine(**ENGINE, **{sys.argv[4]: 2}))
    options = {"merge_profiles": True, "ignore_frontend": False}
    profiler = host.profiler(0, ranks="all", iterations={"count": 4}, options=options)
    running = profiler.start(0)
    host.generate(*(f"prompt {number}" for number in range(8)))  # enough for both replicas
    profiler.stop()
    host.results["window"] = about(running)
    host.capture("one", 1, ranks=[1], iterations={"count": 2})
    host.capture("no_rank", 2, ranks=[2])
    host.results["after_all"] = host.generate() == host.expected
    host.engine.shutdown()
    finish(host.results)
