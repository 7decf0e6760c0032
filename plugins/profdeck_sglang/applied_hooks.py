"""Hook targets in SGLang, and checks whether SGLang has applied profdeck's hooks in this process."""

from __future__ import annotations

import sys

MANAGERS = "sglang.srt.managers"
SCHEDULER_INIT = f"{MANAGERS}.scheduler.Scheduler.__init__"
PROFILE_METHODS = (
    f"{MANAGERS}.scheduler_components.profiler_manager.SchedulerProfilerManager._profile",
    f"{MANAGERS}.scheduler_profiler_mixin.SchedulerProfilerMixin.profile",
)
"""Scheduler methods that handle profiling requests: since SGLang 0.5.13, and in 0.5.11 and 0.5.12."""
TOKENIZER_INIT = f"{MANAGERS}.tokenizer_manager.TokenizerManager.__init__"
DETOKENIZER_INIT = f"{MANAGERS}.detokenizer_manager.DetokenizerManager.__init__"


def are_scheduler_hooks_applied() -> bool:
    """Return whether SGLang has applied the scheduler hooks in this process.

    If so, its child processes have them too, because they have the same environment and code.
    """
    targets = _applied_targets()
    return SCHEDULER_INIT in targets and not targets.isdisjoint(PROFILE_METHODS)


def is_detokenizer_hook_applied() -> bool:
    """Return whether the detokenizer process has the hook. Without the hook, unknown requests terminate it."""
    # Detokenizer processes load plugins since SGLang 0.5.22. Before, only this process has the hook.
    loads_plugins = hasattr(sys.modules.get(f"{MANAGERS}.detokenizer_manager"), "load_plugins")
    return loads_plugins and DETOKENIZER_INIT in _applied_targets()


def _applied_targets() -> set[str]:
    registry = sys.modules.get("sglang.srt.plugins.hook_registry")
    return registry.HookRegistry._patched if registry else set()  # noqa: SLF001  # SGLang has no public API
