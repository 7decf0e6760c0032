"""Global steps for an unmodified script, derived from the steps of an optimizer."""

from __future__ import annotations

import functools
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from profdeck import Profiler
from profdeck_torch.child_steps import ChildSteps

if TYPE_CHECKING:
    from profdeck import Capture


class StepSource:
    """Drives a profiler from the steps of one optimizer, called the clock. Each step of the clock ends a global step.

    The first optimizer that steps becomes the clock. Alternating optimizers, such as those of a generator and a
    discriminator, each step once between two steps of the clock. If another optimizer steps twice in that time, the
    clock has stopped training or steps less often, so the other optimizer becomes the clock.

    The profiler is created when the first optimizer is created, so processes without an optimizer, such as job drivers,
    record nothing. If the optimizer steps inside a backward pass or a compiled function, the global step ends when that
    pass or function returns.
    """

    def __init__(self, create_profiler: Callable[[], Profiler]) -> None:
        self.profiler = Profiler()
        self.step = 1
        self.children = ChildSteps()
        self.other_steps = Counter[str]()
        """Number of steps of other optimizers, by class name."""
        self.clock_names: list[str] = []
        """Class names of the clocks so far, in order, without consecutive duplicates."""
        self._create_profiler = create_profiler
        self._process: int | None = None
        """ID of the process that created the profiler."""
        self._clock: weakref.ref[Optimizer] | None = None
        self._others: list[weakref.ref[Optimizer]] = []
        """Other optimizers that have stepped since the clock last stepped."""
        self._stepped: list[Optimizer] = []
        """Optimizers that have stepped since the last call of `_end_steps`."""
        self._backward_passes = 0
        self._captures: dict[str, Capture] = {}
        self._thread = threading.current_thread()
        """Thread that started the current step."""

    @property
    def captures(self) -> list[Capture]:
        """The captures that have started, in order."""
        return list(self._captures.values())

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Patch torch in this process. The first optimizer starts global step 1."""
        with ExitStack() as stack:
            stack.enter_context(self.children.attached())
            stack.callback(register_optimizer_step_post_hook(self._on_optimizer_step).remove)
            original_init, original_backward, original_compile = (
                Optimizer.__init__,
                torch.autograd.backward,
                torch.compile,
            )

            @functools.wraps(original_init)
            def init(optimizer: Optimizer, *arguments: Any, **keywords: Any) -> None:
                original_init(optimizer, *arguments, **keywords)
                if self._process is None:
                    self._process = os.getpid()
                    self.profiler = stack.enter_context(self._create_profiler())
                    self._start_step()

            @functools.wraps(original_backward)
            def backward(*arguments: Any, **keywords: Any) -> None:
                self._backward_passes += 1
                try:
                    original_backward(*arguments, **keywords)
                finally:
                    self._backward_passes -= 1
                self._end_steps()

            @functools.wraps(original_compile)
            def compile_function(*arguments: Any, **keywords: Any) -> Any:
                compiled = original_compile(*arguments, **keywords)
                return compiled if isinstance(compiled, torch.nn.Module) else self._end_steps_after(compiled)

            # These functions are patched because torch provides hooks only for optimizer steps.
            for owner, name, patched in (
                (Optimizer, "__init__", init),
                (torch.autograd, "backward", backward),
                (torch, "compile", compile_function),
            ):
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, patched)
            yield

    def _on_optimizer_step(self, optimizer: Optimizer, *_: Any) -> None:
        # When the optimizer is compiled, the compiler traces this function. The compiler supports appending to a list.
        self._stepped.append(optimizer)
        if not torch.compiler.is_dynamo_compiling():
            self._end_steps()

    def _end_steps_after(self, compiled: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(compiled)
        def run(*arguments: Any, **keywords: Any) -> Any:
            result = compiled(*arguments, **keywords)
            if not torch.compiler.is_dynamo_compiling():
                self._end_steps()
            return result

        return run

    def _end_steps(self) -> None:
        """End the global step if the clock (the optimizer that ends global steps) has stepped.

        During a backward pass, do nothing, because the profiler cannot be stopped.
        """
        if self._backward_passes or not self._stepped:
            return
        stepped = self._stepped.copy()
        self._stepped.clear()
        if self._process not in (None, os.getpid()):  # a forked process
            self.children.report()
            return
        for optimizer in stepped:
            self._end_step_of(optimizer)

    def _end_step_of(self, optimizer: Optimizer) -> None:
        clock, name = self._clock and self._clock(), type(optimizer).__name__
        is_repeated = any(other() is optimizer for other in self._others)
        if clock is not None and optimizer is not clock and not is_repeated:
            self._others.append(weakref.ref(optimizer))
            self.other_steps[name] += 1
            return
        if optimizer is not clock:
            self._clock = weakref.ref(optimizer)
            if self.clock_names[-1:] != [name]:
                self.clock_names.append(name)
        self._others.clear()
        if capture := self.profiler.active:
            capture.end_step()  # before any other work of the profiler
        if is_repeated:
            self.other_steps[name] -= 1
            self.profiler.close(
                f"{name} stepped twice in step {self.step}, but the optimizer whose steps were counted did not step; "
                f"from now on, the steps of {name} are counted"
            )
            self.step += 1
        elif threading.current_thread() is self._thread:
            self.profiler.stop()
        else:
            self.profiler.close(
                f"step {self.step} ran in another thread than the start of its recording; run all steps in one thread"
            )
        self.step += 1
        self._start_step()

    def _start_step(self) -> None:
        self._thread = threading.current_thread()
        self.profiler.start(self.step)
        if capture := self.profiler.active:
            self._captures[capture.id] = capture
