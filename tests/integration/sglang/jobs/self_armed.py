"""Job whose engine is captured because of its config, without a request."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import sglang
from _job import ENGINE, PROMPTS, finish, sampling


def is_written(profiles: Path, ranks: int) -> bool:
    """Return whether all ranks have written their captures."""
    # os.walk ignores temporary directories that are deleted meanwhile. Path.rglob raises FileNotFoundError.
    files = (Path(directory, name) for directory, _, names in os.walk(profiles) for name in names)
    manifests = [file for file in files if file.match("rank_*[!e].json")]
    return len(manifests) == ranks and all(json.loads(path.read_text())["status"] != "recording" for path in manifests)


if __name__ == "__main__":
    tp_size, profiles = int(sys.argv[4]), Path(sys.argv[5])
    engine = sglang.Engine(**ENGINE, tp_size=tp_size)
    token_counts = [len(engine.generate(PROMPTS[0], sampling(6))["output_ids"]) for _ in range(4)]
    # Shutdown does not wait for the files, so wait until they are complete.
    deadline = time.monotonic() + 30
    while profiles.exists() and not is_written(profiles, tp_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    engine.shutdown()
    finish({"tokens": token_counts})
