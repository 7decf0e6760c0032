"""Annotates the phases of a diffusion pipeline in the trace: encode, denoise, decode."""

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
"""Methods that belong to each phase, as attribute paths from the pipeline. The names come from diffusers and from
vLLM-Omni's pipelines (``_PROFILER_TARGETS`` in vllm_omni/diffusion/profiler/, 0.30.0)."""


class PhaseAnnotations:
    """Context manager that annotates the phases of a pipeline during one iteration.

    The outermost call of a phase is named after the phase, such as ``denoise``. Nested calls of the same phase are
    named after their component, such as ``transformer``.
    """

    def __init__(self, pipeline: Any) -> None:
        """Args:
        pipeline: the pipeline of vLLM-Omni, or None if the worker has none.
        """
        self._pipeline = pipeline
        self._undo_functions: list[Callable[[], None]] = []
        self._active_phases: list[str] = []

    def __enter__(self) -> Self:
        for owner, method, phase, name in _find_methods(self._pipeline):
            self._annotate(owner, method, phase, name)
        return self

    def __exit__(self, *_: object) -> None:
        for undo in reversed(self._undo_functions):
            undo()
        self._undo_functions.clear()

    def _annotate(self, owner: Any, method: str, phase: str, name: str) -> None:
        from torch.profiler import record_function

        original = getattr(owner, method)

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            label = name if phase in self._active_phases else phase
            self._active_phases.append(phase)
            try:
                with record_function(label):
                    return original(*args, **kwargs)
            finally:
                self._active_phases.pop()

        instance_attribute = vars(owner).get(method)
        vars(owner)[method] = call

        def undo() -> None:
            if instance_attribute is None:
                vars(owner).pop(method, None)
            else:
                vars(owner)[method] = instance_attribute

        self._undo_functions.append(undo)


def _find_methods(pipeline: Any) -> Iterator[tuple[Any, str, str, str]]:
    """Yield the owner and name of each method to annotate, its phase, and its label in nested calls."""
    # The adapter for diffusers wraps the pipeline that runs the model.
    pipelines = [candidate for candidate in (pipeline, getattr(pipeline, "_pipeline", None)) if candidate is not None]
    for candidate in pipelines:
        for phase, paths in PHASES.items():
            for path in paths:
                component, _, method = path.rpartition(".")
                owner = getattr(candidate, component, None) if component else candidate
                if owner is not None and callable(getattr(owner, method, None)) and not _is_compiled(owner):
                    yield owner, method, phase, component or method


def _is_compiled(module: Any) -> bool:
    """Return whether torch has compiled a module. Replacing its ``forward`` could trigger a recompilation."""
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")
