"""Job whose engine is captured because of its config, without a request."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from _job import ENGINE, PROMPTS, finish
from vllm import LLM, SamplingParams


def is_written(profiles: Path, ranks: int) -> bool:
    """Return whether all ranks have written their captures."""
    # os.walk ignores temporary directories that are deleted meanwhile. Path.rglob raises FileNotFoundError.
    files = (Path(directory, name) for directory, _, names in os.walk(profiles) for name in names)
    manifests = [file for file in files if file.match("rank_*[!e].json")]
    return len(manifests) == ranks and all(json.loads(path.read_text())["status"] != "recording" for path in manifests)


if __name__ == "__main__":
    tp_size, profiles = int(sys.argv[4]), Path(sys.argv[5])
    llm = LLM(**ENGINE, tensor_parallel_size=tp_size)
    sampling = SamplingParams(max_tokens=6, ignore_eos=True, temperature=0)
    token_counts = [len(llm.generate(PROMPTS[0], sampling, use_tqdm=False)[0].outputs[0].token_ids) for _ in range(4)]
    # vLLM kills its workers when this process exits, so wait until the files are complete.
    deadline = time.monotonic() + 120
    while profiles.exists() and not is_written(profiles, tp_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    finish({"tokens": token_counts})
