"""Which of our hooks SGLang has applied in this process."""

from __future__ import annotations

import sys

MANAGERS = "sglang.srt.managers"
SCHEDULER = f"{MANAGERS}.scheduler.Scheduler.__init__"
# Where a scheduler takes a request for its profiler: since 0.5.13, and in 0.5.11 and 0.5.12.
PROFILES = (
    f"{MANAGERS}.scheduler_components.profiler_manager.SchedulerProfilerManager._profile",
    f"{MANAGERS}.scheduler_profiler_mixin.SchedulerProfilerMixin.profile",
)
TOKENIZER = f"{MANAGERS}.tokenizer_manager.TokenizerManager.__init__"
DETOKENIZER = f"{MANAGERS}.detokenizer_manager.DetokenizerManager.__init__"


def applied() -> bool:
    """Tell whether the hooks that reach the schedulers are in place in this process.

    Then they are in the processes that it started, which have its environment and its code.
    """
    patched = _patched()
    return SCHEDULER in patched and not patched.isdisjoint(PROFILES)


def detokenizer_applied() -> bool:
    """Tell the same of the detokenizer, which an object of an unknown kind would end."""
    # It loads plugins since 0.5.22; before, only this process has the hook.
    loads = hasattr(sys.modules.get(f"{MANAGERS}.detokenizer_manager"), "load_plugins")
    return loads and DETOKENIZER in _patched()


def _patched() -> set[str]:
    """Return the targets whose hooks SGLang has applied in this process."""
    registry = sys.modules.get("sglang.srt.plugins.hook_registry")
    return registry.HookRegistry._patched if registry else set()  # noqa: SLF001  # it has no other way
