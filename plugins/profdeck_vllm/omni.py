"""Pipelines of vLLM-Omni: stages of language models, of generation and of diffusion, behind one object."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from profdeck.engines import Outcome
from profdeck.plugin import CaptureError, TargetError
from profdeck_vllm.engines import REMEDY, VllmObject
from profdeck_vllm.worker import METHOD, SEAT


def engine_of(target: Any) -> VllmObject:
    """Return the engine that an object of vLLM or vLLM-Omni stands for.

    Raises:
        ConfigError: it is none.
    """
    return OmniObject(target) if hasattr(target, "num_stages") else VllmObject(target)


class OmniObject(VllmObject):
    """An `Omni` or `AsyncOmni` in this process. Ranks count over the stages that record, in their order."""

    def __init__(self, engine: Any) -> None:
        """Raises:
        ConfigError: it is no pipeline of vLLM-Omni.
        """
        super().__init__(engine)
        self._pipeline = engine
        self._stages: Sequence[int] = self._all
        self._recording: tuple[int, ...] | None = None

    async def is_pipeline(self) -> bool:
        """Say so; of one stage nothing need be chosen."""
        return len(self._all) > 1

    async def names_traces(self) -> bool:
        """Deny it: with a prefix, traces of all stages would have one name."""
        return False

    @property
    def _all(self) -> range:
        return range(int(self._pipeline.num_stages))

    @property
    def recording(self) -> tuple[int, ...] | None:
        """The ranks that the last start chose: `ranks` of a request are those of each stage."""
        return self._recording

    async def prepared(self, payload: Mapping[str, Any]) -> dict[str, Any]:
        """Number the workers of the stages that are to record."""
        engine = dict(payload.get("engine", {}))
        stages = engine.pop("stages", None)
        if stages is not None and not set(stages) <= set(self._all):
            raise TargetError(
                f"options.stages: {list(stages)}: this pipeline has the stages 0 to {len(self._all) - 1}.",
                Outcome.REFUSED,
            )
        stages = sorted(set(stages)) if stages is not None else self._all
        seats: dict[str, dict[str, int]] = {}
        chosen: list[int] = []
        for stage in stages:
            for seat in await self._seats(stage):
                self._check_frontend(engine, stage, seat)
                if payload["ranks"] == "all" or seat["rank"] in payload["ranks"]:
                    chosen.append(len(seats))
                seats[seat["key"]] = {"rank": len(seats), "stage": stage}
        if not chosen:
            raise TargetError(f"The ranks {list(payload['ranks'])} are in no stage of this pipeline.", Outcome.REFUSED)
        self._stages, self._recording = stages, tuple(chosen)
        return {**payload, "engine": {**engine, "seats": seats}, "ranks": chosen}

    async def _seats(self, stage: int) -> list[dict[str, Any]]:
        self._stages = (stage,)
        found = await self.ask(SEAT, {})
        if failed := [seat for seat in found if "key" not in seat]:
            raise TargetError(
                f"Stage {stage} of the pipeline cannot record: {failed[0].get('error', failed[0])}. {REMEDY}",
                Outcome.NOT_ENABLED,
            )
        return found

    def _check_frontend(self, engine: Mapping[str, Any], stage: int, seat: Mapping[str, Any]) -> None:
        if engine.get("frontend") and seat["pid"] == os.getpid():
            raise CaptureError(
                f"ignore_frontend: false: stage {stage} runs in the frontend's process, where torch records once. "
                "Remove it."
            )

    async def ask(self, *arguments: Any) -> list[Any]:
        """Call our method in all workers of the stages that record; a stage that fails says so in an answer."""
        answers = await super().ask(*arguments)
        failed = [
            answer["error"] for answer in answers if isinstance(answer, dict) and answer.get("supported") is False
        ]
        if failed and arguments[0] != SEAT:
            raise CaptureError(f"The engine does not answer: {failed[0]}")
        return answers

    def call_workers(self, *arguments: Any) -> Any:
        """Call our method in the stages that record."""
        return self.rpc(METHOD, args=arguments, stage_ids=list(self._stages))
