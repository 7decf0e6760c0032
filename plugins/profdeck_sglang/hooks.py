"""profdeck's hooks in engine processes, registered in SGLang's hook registry.

The hooks run when a scheduler handles a profiling request, and after three constructors. Iterations are patched only
while a scheduler records (see `profdeck_sglang.scheduler`), so idle engines have no overhead.
"""

from __future__ import annotations

import logging
import pkgutil
import sys
from collections.abc import Callable
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from profdeck.engines import EngineConfig
from profdeck.plugin import describe_error
from profdeck_sglang import guard, protocol
from profdeck_sglang.applied_hooks import (
    DETOKENIZER_INIT,
    MANAGERS,
    PROFILE_METHODS,
    SCHEDULER_INIT,
    TOKENIZER_INIT,
    are_scheduler_hooks_applied,
)

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import ProfileReq, ProfileReqOutput

logger = logging.getLogger("profdeck")

_agent: Any = None
"""The `profdeck_sglang.scheduler.SchedulerAgent` of this process; None before its scheduler is initialized."""
_is_single_host = False
"""True if all ranks of the engine are on this host, and therefore have loaded profdeck."""


def register() -> None:
    """Register the hooks that this process needs. SGLang applies them after the call."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    profile = next((target for target in PROFILE_METHODS if _exists(target)), PROFILE_METHODS[0])
    hooks: dict[str, tuple[Callable[..., Any], HookType]] = {}
    # SGLang imports the modules of hook targets. Child processes must not import modules that they do not run.
    scheduler, detokenizer = f"{MANAGERS}.scheduler" in sys.modules, f"{MANAGERS}.detokenizer_manager" in sys.modules
    is_launcher = "sglang.srt.entrypoints.engine" in sys.modules or not (scheduler or detokenizer)
    if is_launcher or scheduler:
        hooks |= {SCHEDULER_INIT: (_after_scheduler_init, HookType.AFTER), profile: (_around_profile, HookType.AROUND)}
    if is_launcher or detokenizer:
        hooks[DETOKENIZER_INIT] = (_after_detokenizer_init, HookType.AFTER)
    if is_launcher:
        hooks[TOKENIZER_INIT] = (_after_tokenizer_init, HookType.AFTER)
    if missing := [target for target in hooks if not _exists(target)]:
        logger.error(
            "profdeck cannot record in this engine: SGLang %s has no %s. Update profdeck. "
            "`profdeck plugins sglang` prints the supported SGLang versions.",
            version("sglang"),
            ", ".join(missing),
        )
        return
    for target, (hook, kind) in hooks.items():
        HookRegistry.register(target, hook, kind)
    if is_launcher and (config := EngineConfig.load("sglang")).captures_by_itself:
        config.name_run()


def _exists(target: str) -> bool:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True


def _after_scheduler_init(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001  # SGLang's signature
    global _agent, _is_single_host  # noqa: PLW0603  # one scheduler per process; its requests arrive at other objects
    try:
        from profdeck_sglang.scheduler import SchedulerAgent

        if not are_scheduler_hooks_applied():
            logger.error("profdeck cannot record in this scheduler: SGLang did not apply its hooks. See the log above.")
            return
        server_args = kwargs.get("server_args") or args[0]
        _is_single_host = int(server_args.nnodes) == 1
        _agent = SchedulerAgent(scheduler, server_args)
        config = EngineConfig.load("sglang")
        if config.captures_by_itself:
            _agent.start(config.own_request())
    except Exception:  # An error must not prevent the engine from starting.
        logger.exception("profdeck is not available in this scheduler")


def _around_profile(original: Callable[..., Any], owner: Any, request: ProfileReq) -> ProfileReqOutput:
    from sglang.srt.managers.io_struct import ProfileReqOutput

    try:
        if (command := protocol.unpack(request)) is not None:
            if _agent is None:
                return ProfileReqOutput(success=False, message="profdeck is not available in this scheduler.")
            return ProfileReqOutput(success=True, message=protocol.pack_reply(_agent.handle(request, *command)))
        rejection = _check_native_request(owner, request)
    except Exception as error:  # An error must not terminate the server.
        logger.exception("profdeck could not handle a request to the profiler")
        return ProfileReqOutput(success=False, message=f"profdeck: {describe_error(error)}")
    if rejection is not None:
        logger.error("profdeck rejected a request to SGLang's own profiler: %s", rejection)
        return ProfileReqOutput(success=False, message=rejection)
    output: ProfileReqOutput = original(owner, request)
    try:
        if output.success and not protocol.is_start(request):
            guard.cancel_pending(owner)
    except Exception:  # An error must not terminate the server.
        logger.exception("profdeck could not cancel the remaining captures of SGLang's own profiler")
    return output


def _check_native_request(owner: Any, request: ProfileReq) -> str | None:
    """Return the reason to reject a request to SGLang's own profiler, or None."""
    try:
        rejection = guard.check_request(owner, request, capturing=_agent is not None and _agent.recorder.active)
    except Exception as error:  # The other ranks wait for the result of this rank.
        logger.exception("profdeck could not check a request to the profiler")
        rejection = describe_error(error)
    return guard.share_rejection(owner, rejection) if _is_single_host else rejection


def _after_tokenizer_init(result: None, manager: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001  # SGLang's signature
    try:
        server = sys.modules.get("sglang.srt.entrypoints.http_server")
        if server is None:  # This process has an Engine object instead of a server.
            return
        from profdeck.engines import Routes
        from profdeck_sglang.engines import SglangObject

        routes = Routes("sglang")
        routes.engine = SglangObject(manager, timeout_s=routes.options.rpc_timeout_s)
        routes.attach(server.app)
    except Exception:  # An error must not prevent the engine from starting.
        logger.exception("profdeck is not available in this server")


def _after_detokenizer_init(result: None, manager: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001  # SGLang's signature
    try:
        from sglang.srt.managers.io_struct import ProfileReq

        from profdeck_sglang.detokenizer import create_handler

        manager._request_dispatcher._mapping[ProfileReq] = create_handler()  # noqa: SLF001  # SGLang has no public API
    except Exception:  # An error must not prevent the engine from starting.
        logger.exception("profdeck is not available in this detokenizer")
