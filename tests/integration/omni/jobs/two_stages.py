"""Job that captures a pipeline with two stages. The first stage has two ranks, the second has one."""

from __future__ import annotations

import json
from typing import Any

from _job import MODEL, OUTPUT, about, finish, picture, settings
from omni_on_cpu import TWO_STAGES, register_two_stages
from vllm_omni.entrypoints.omni import Omni

from profdeck import Profiler


def main() -> None:
    """Run all captures."""
    register_two_stages()
    stage = {"devices": "0", "diffusion_load_format": "diffusers", "dtype": "float32"}
    stages = [{"stage_id": number, **stage} for number in range(2)]
    stages[0] |= {"devices": "0,0", "parallel_config": {"data_parallel_size": 2}}
    deploy = OUTPUT.parent / "deploy.json"  # JSON is valid YAML
    deploy.write_text(json.dumps({"pipeline": TWO_STAGES, "async_chunk": False, "stages": stages}))
    omni = Omni(model=str(MODEL), deploy_config=str(deploy))

    def draw() -> None:
        list(omni.generate(["hello"], [picture(), picture()]))

    def captured(step: int, draws: int, **role: Any) -> dict[str, Any]:
        profiler = Profiler.from_config(settings=settings(step, **role), role="rollout", target=omni)
        with profiler.capture(step) as capture:
            for _ in range(draws):
                draw()
        return about(capture)

    finish({
        "all": captured(1, 2, ranks="all", options={"merge_profiles": True}),
        "first ranks": captured(2, 1),
        "second stage": captured(3, 3, ranks="all", iterations={"skip": 1, "count": 1}, options={"stages": [1]}),
        "no such stage": captured(4, 1, options={"stages": [2]}),
        "frontend": captured(5, 1, options={"ignore_frontend": False}),
    })  # fmt: skip
    omni.close()


if __name__ == "__main__":
    main()
