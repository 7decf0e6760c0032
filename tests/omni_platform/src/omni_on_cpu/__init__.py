"""What vLLM-Omni loads in each of its processes."""

from __future__ import annotations

from typing import Any

TWO_STAGES = "two_stages"
"""A pipeline that draws two pictures, one after the other."""


def platform() -> str:
    """Name the platform's class."""
    return "omni_on_cpu.platform.CpuOmniPlatform"


def register_two_stages() -> None:
    """Register the pipeline; each of its stages has the model of the whole."""
    from vllm_omni.config.pipeline_registry import OMNI_PIPELINES, register_pipeline
    from vllm_omni.config.stage_config import PipelineConfig, StageExecutionType, StagePipelineConfig

    if TWO_STAGES in OMNI_PIPELINES:
        return
    stages = [
        StagePipelineConfig(
            stage_id=number,
            model_stage=f"draw{number}",
            execution_type=StageExecutionType.DIFFUSION,
            input_sources=(number - 1,) if number else (),
            final_output=bool(number),
            final_output_type="image" if number else None,
        )
        for number in range(2)
    ]
    register_pipeline(PipelineConfig(model_type=TWO_STAGES, stages=tuple(stages)))


def send_without_streams() -> None:
    """Let stages of several ranks send their pictures; vLLM-Omni (0.30) does that on a stream, which a CPU has not."""
    from vllm_omni.diffusion.worker import diffusion_worker as module

    def send(self: Any) -> None:
        while (item := self._async_output_queue.get()) is not None:
            output, number, _ = item
            module.pack_diffusion_output_shm(output)
            kind = module.AsyncOutputKind.OUTPUT_READY
            self._enqueue_result(module.AsyncDiffusionOutput(kind=kind, async_output_id=number, output=output))
            with self._async_output_done:
                self._async_output_pending -= 1
                self._async_output_done.notify_all()

    module.WorkerProc._async_output_loop = send
