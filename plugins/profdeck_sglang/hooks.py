"""Our hooks in the processes of an engine, by SGLang's own registry.

Only two places of a running engine are touched: where a scheduler takes a request for its profiler, and the ends of
three constructors. Iterations are hooked on the scheduler that records, while it records (see
`profdeck_sglang.scheduler`), so an idle engine runs its own code.
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
from profdeck_sglang.installed import DETOKENIZER, MANAGERS, PROFILES, SCHEDULER, TOKENIZER, applied

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import ProfileReq, ProfileReqOutput

logger = logging.getLogger("profdeck")

_agent: Any = None
"""The `profdeck_sglang.scheduler.SchedulerAgent` of this process, once its scheduler is there."""
_one_host = False
"""Whether all ranks of the engine are on this host, and so have loaded profdeck as this one has."""


def register() -> None:
    """Register the hooks that this process needs, once; SGLang applies them."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    profile = next((target for target in PROFILES if _exists(target)), PROFILES[0])
    hooks: dict[str, tuple[Callable[..., Any], HookType]] = {}
    # SGLang imports what it hooks, and nothing shall be imported for us: a child has what it runs, and no more.
    scheduler, detokenizer = f"{MANAGERS}.scheduler" in sys.modules, f"{MANAGERS}.detokenizer_manager" in sys.modules
    launches = "sglang.srt.entrypoints.engine" in sys.modules or not (scheduler or detokenizer)
    if launches or scheduler:
        hooks |= {SCHEDULER: (_scheduler_is_up, HookType.AFTER), profile: (_profile, HookType.AROUND)}
    if launches or detokenizer:
        hooks[DETOKENIZER] = (_detokenizer_is_up, HookType.AFTER)
    if launches:
        hooks[TOKENIZER] = (_tokenizer_is_up, HookType.AFTER)
    if missing := [target for target in hooks if not _exists(target)]:
        logger.error(
            "profdeck cannot record in this engine: SGLang %s has no %s. Update profdeck; "
            "`profdeck plugins sglang` prints which releases of SGLang this version knows.",
            version("sglang"),
            ", ".join(missing),
        )
        return
    for target, (hook, kind) in hooks.items():
        HookRegistry.register(target, hook, kind)
    if launches and (armed := EngineConfig.load("sglang")).is_armed:
        armed.export_run_name()


def _exists(target: str) -> bool:
    try:
        pkgutil.resolve_name(target)
    except (ImportError, AttributeError):
        return False
    return True


def _scheduler_is_up(result: None, scheduler: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001  # SGLang's signature
    global _agent, _one_host  # noqa: PLW0603  # one scheduler per process, and other objects take its requests
    try:
        from profdeck_sglang.scheduler import SchedulerAgent

        if not applied():
            logger.error("profdeck cannot record in this scheduler: SGLang did not apply its hooks; see the log above.")
            return
        server_args = kwargs.get("server_args") or args[0]
        _one_host = int(server_args.nnodes) == 1
        _agent = SchedulerAgent(scheduler, server_args)
        armed = EngineConfig.load("sglang")
        if armed.is_armed:
            _agent.start(armed.armed_request())
    except Exception:  # the engine must start whatever is wrong here
        logger.exception("profdeck is not available in this scheduler")


def _profile(original: Callable[..., Any], owner: Any, request: ProfileReq) -> ProfileReqOutput:
    from sglang.srt.managers.io_struct import ProfileReqOutput

    try:
        if (ours := protocol.unpack(request)) is not None:
            if _agent is None:
                return ProfileReqOutput(success=False, message="profdeck is not available in this scheduler.")
            return ProfileReqOutput(success=True, message=protocol.pack_reply(_agent.handle(request, *ours)))
        objection = _objection(owner, request)
    except Exception as error:  # whatever is wrong here must not end the server
        logger.exception("profdeck could not handle a request to the profiler")
        return ProfileReqOutput(success=False, message=f"profdeck: {describe_error(error)}")
    if objection is not None:
        logger.error("profdeck refused a request to SGLang's own profiler: %s", objection)
        return ProfileReqOutput(success=False, message=objection)
    output: ProfileReqOutput = original(owner, request)
    try:
        if output.success and not protocol.starts(request):
            guard.cancel(owner)
    except Exception:  # as above
        logger.exception("profdeck could not end a capture by SGLang's own profiler")
    return output


def _objection(owner: Any, request: ProfileReq) -> str | None:
    try:
        own = guard.objection(owner, request, capturing=_agent is not None and _agent.recorder.active)
    except Exception as error:  # the other ranks wait for the answer of this one
        logger.exception("profdeck could not check a request to the profiler")
        own = describe_error(error)
    return guard.agreed(owner, own) if _one_host else own


def _tokenizer_is_up(result: None, manager: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001  # SGLang's signature
    try:
        server = sys.modules.get("sglang.srt.entrypoints.http_server")
        if server is None:  # an engine object
            return
        from profdeck.engines import Routes
        from profdeck_sglang.engines import SglangObject

        routes = Routes("sglang")
        routes.engine = SglangObject(manager, timeout_s=routes.options.rpc_timeout_s)
        routes.attach(server.app)
    except Exception:  # as above
        logger.exception("profdeck is not available in this server")


def _detokenizer_is_up(result: None, manager: Any, *args: Any, **kwargs: Any) -> None:  # noqa: ARG001  # SGLang's signature
    try:
        from sglang.srt.managers.io_struct import ProfileReq

        from profdeck_sglang.detokenizer import handler

        manager._request_dispatcher._mapping[ProfileReq] = handler()  # noqa: SLF001  # it has no other way
    except Exception:  # as above
        logger.exception("profdeck is not available in this detokenizer")
