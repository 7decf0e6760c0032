"""vLLM-Omni pipelines: language model, generation and diffusion stages in one engine object."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from profdeck.engines import Answer, Outcome
from profdeck.plugin import CaptureError, TargetError
from profdeck_vllm.engines import REMEDY, VllmObject
from profdeck_vllm.worker import DESCRIBE_WORKER, METHOD

_MAX_REQUESTS = 64


def wrap_engine(target: Any) -> VllmObject:
    """Return the target for an engine object of vLLM or vLLM-Omni.

    Raises:
        ConfigError: the object is not an engine.
    """
    return OmniObject(target) if hasattr(target, "num_stages") else VllmObject(target)


class OmniObject(VllmObject):
    """An `Omni` or `AsyncOmni` in this process. Ranks are numbered across the recording stages, in stage order."""

    def __init__(self, engine: Any) -> None:
        """Raises:
        ConfigError: the object is not a vLLM-Omni pipeline.
        """
        super().__init__(engine)
        self._pipeline = engine
        self._stages: Sequence[int] = self._all_stages
        self._recording_ranks: tuple[int, ...] | None = None
        self._selections: deque[tuple[str, Sequence[int], tuple[int, ...]]] = deque(maxlen=_MAX_REQUESTS)
        """Token, recording stages and recording ranks of the most recent requests."""

    async def is_pipeline(self) -> bool:
        """Return whether there are several stages. With one stage, captures do not need to select a stage."""
        return len(self._all_stages) > 1

    async def supports_trace_prefix(self) -> bool:
        """Return False: with a prefix, the traces of all stages would have the same name."""
        return False

    @property
    def _all_stages(self) -> range:
        return range(int(self._pipeline.num_stages))

    @property
    def recording_ranks(self) -> tuple[int, ...] | None:
        """The ranks that the last start request selected. The ``ranks`` of a request select ranks in each stage."""
        return self._recording_ranks

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        """Send a command to the stages that are recording the given request (by default, the most recent one)."""
        for token, stages, ranks in self._selections:
            if token == payload.get("token"):
                self._stages, self._recording_ranks = stages, ranks
        return await super().command(command, payload)

    async def complete_request(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Number the workers across the selected stages and replace ``ranks`` by these numbers.

        Raises:
            CaptureError: the pipeline lacks a selected stage or rank, or cannot record it.
        """
        engine = dict(payload.get("engine", {}))
        stages = engine.pop("stages", None)
        if stages is not None and not set(stages) <= set(self._all_stages):
            raise TargetError(
                f"options.stages: {list(stages)}: this pipeline has stages 0 to {len(self._all_stages) - 1}.",
                Outcome.REFUSED,
            )
        stages = sorted(set(stages)) if stages is not None else self._all_stages
        workers: dict[str, dict[str, int]] = {}
        selected_ranks: list[int] = []
        for stage in stages:
            for worker in await self._describe_workers(stage):
                self._check_frontend(engine, stage, worker)
                if payload["ranks"] == "all" or worker["rank"] in payload["ranks"]:
                    selected_ranks.append(len(workers))
                workers[worker["key"]] = {"rank": len(workers), "stage": stage}
        if not selected_ranks:
            raise TargetError(f"No stage of this pipeline has the ranks {list(payload['ranks'])}.", Outcome.REFUSED)
        self._stages, self._recording_ranks = stages, tuple(selected_ranks)
        self._selections.append((payload["token"], stages, self._recording_ranks))
        return {**payload, "engine": {**engine, "workers": workers}, "ranks": selected_ranks}

    async def _describe_workers(self, stage: int) -> list[dict[str, Any]]:
        self._stages = (stage,)
        workers = await self.call_workers(DESCRIBE_WORKER, {})
        if errors := [worker for worker in workers if "key" not in worker]:
            raise TargetError(
                f"Stage {stage} of the pipeline cannot record: {errors[0].get('error', errors[0])}. {REMEDY}",
                Outcome.NOT_ENABLED,
            )
        return workers

    def _check_frontend(self, engine: Mapping[str, Any], stage: int, worker: Mapping[str, Any]) -> None:
        if engine.get("frontend") and worker["pid"] == os.getpid():
            raise CaptureError(
                f"options.ignore_frontend: stage {stage} runs in the frontend's process, and torch supports one "
                "recording per process. Set ignore_frontend to true."
            )

    async def call_workers(self, *arguments: Any) -> list[Any]:
        """Call the RPC method in all workers of the recording stages.

        Raises:
            CaptureError: the engine does not reply, or a stage does not support the method.
        """
        replies = await super().call_workers(*arguments)
        errors = [reply["error"] for reply in replies if isinstance(reply, dict) and reply.get("supported") is False]
        if errors and arguments[0] != DESCRIBE_WORKER:
            raise CaptureError(f"The engine is not responding: {errors[0]}")
        return replies

    def send_rpc(self, *arguments: Any) -> Any:
        """Call the RPC method in the recording stages; may return an awaitable."""
        return self.rpc(METHOD, args=arguments, stage_ids=list(self._stages))
