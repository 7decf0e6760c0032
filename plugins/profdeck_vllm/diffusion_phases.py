"""Marks the phases of a diffusion pipeline in the trace: encode, denoise, decode."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Self

_TEXT_ENCODERS = tuple(f"text_encoder{number}.forward" for number in ("", "_2", "_3", "_4"))
PHASES = {
    "encode": ("prepare_encode", "encode_prompt", "image_encoder.forward", "vae.encode", *_TEXT_ENCODERS),
    "denoise": ("diffuse", "denoise_step", "transformer.forward", "transformer_2.forward", "unet.forward"),
    "decode": ("post_decode", "vae.decode"),
}
"""What of a pipeline belongs to a phase: methods, and those of its parts. The names are those of diffusers, and of
vLLM-Omni's own pipelines (``_PROFILER_TARGETS`` in vllm_omni/diffusion/profiler/, 0.30.0)."""


class Phases:
    """Marks what a pipeline calls; a context manager around one iteration.

    Outermost calls are named after their phase, what they call of the same phase after itself: ``transformer``.
    """

    def __init__(self, pipeline: Any) -> None:
        """Args:
        pipeline: vLLM-Omni's; None if there is none.
        """
        self._pipeline = pipeline
        self._undo: list[Callable[[], None]] = []
        self._within: list[str] = []

    def __enter__(self) -> Self:
        for owner, phase, path in _targets(self._pipeline):
            part, _, method = path.rpartition(".")
            self._mark(getattr(owner, part) if part else owner, method, phase, part or method)
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self._undo):
            undo()
        self._undo.clear()

    def _mark(self, owner: Any, method: str, phase: str, name: str) -> None:
        from torch.profiler import record_function

        own = getattr(owner, method)

        @functools.wraps(own)
        def call(*args: Any, **kwargs: Any) -> Any:
            label = name if phase in self._within else phase
            self._within.append(phase)
            try:
                with record_function(label):
                    return own(*args, **kwargs)
            finally:
                self._within.pop()

        before = vars(owner).get(method)
        vars(owner)[method] = call

        def undo() -> None:
            if before is None:
                vars(owner).pop(method, None)
            else:
                vars(owner)[method] = before

        self._undo.append(undo)


def _targets(pipeline: Any) -> Iterator[tuple[Any, str, str]]:
    """Yield what there is to mark: whose it is, its phase, and its path from there."""
    # The adapter for pipelines of diffusers holds the one that does the work.
    owners = [one for one in (pipeline, getattr(pipeline, "_pipeline", None)) if one is not None]
    for owner in owners:
        for phase, paths in PHASES.items():
            for path in paths:
                part, _, method = path.rpartition(".")
                whose = getattr(owner, part, None) if part else owner
                if whose is not None and callable(getattr(whose, method, None)) and not _is_compiled(whose):
                    yield owner, phase, path


def _is_compiled(module: Any) -> bool:
    """Tell whether torch has compiled a module as a whole: another ``forward`` could make it do that again."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
