"""Functions that run in a Ray actor's process, find the engine there and call it.

``__ray_call__`` runs these functions with the actor instance as the first argument, on the thread that runs the actor's
own methods. In an async actor, that thread dispatches calls to the event loop, so these functions must not block.
Awaitables are scheduled on the event loop, and the caller polls for their results with `fetch_result`. Arguments and
results are plain data, because the caller may have a different version of profdeck.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import socket
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import attrs

from profdeck import __version__
from profdeck.engines import Connects, Engine, NoEngineError, Outcome, part_of, run_without_loop
from profdeck.plugin import (
    ConfigError,
    MissingLibraryError,
    TargetError,
    load_backend,
    structure,
    target_error,
    unstructure,
)

_PLAIN = str | bytes | int | float | bool | None


@attrs.frozen
class _Connected:
    """A connected engine. It stays valid as long as the actor holds the same engine object."""

    target: object
    engine: Engine


_connected: dict[str, _Connected] = {}
"""Connected engines, keyed by backend, options and configured attribute."""
_pending: dict[str, Future[Any]] = {}
"""Calls on the actor's event loop whose results have not been fetched yet, keyed by ticket."""


def ask(instance: object, ticket: str, call: Mapping[str, Any]) -> dict[str, Any]:
    """Call a coroutine method of the actor's engine. Never raises.

    Args:
        instance: The actor instance.
        ticket: Key for fetching the result with `fetch_result`.
        call: A mapping with the keys ``version`` (the caller's profdeck version), ``backend`` (its name),
            ``options``, ``attribute`` (the dotted path to the engine, or None), ``method``, ``arguments`` and
            ``keywords``.

    Returns:
        A mapping with ``host`` and ``times``, the start and end of this function in Unix nanoseconds. If the call has
        succeeded, the mapping also has ``value``. If it has failed, it has ``error``, ``outcome``, ``fix`` and
        ``no_engine``. If the call is still running, it has ``waiting``.
    """
    called_ns = time.time_ns()
    try:
        # Not on the event loop: the first call imports the engine's plugin, which would block serving.
        engine = _engine(instance, call)
        loop = _event_loop()
        coroutine = _call_engine(engine, call)
        if loop is None:
            return _reply(called_ns, value=run_without_loop(coroutine))
        _pending[ticket] = asyncio.run_coroutine_threadsafe(coroutine, loop)
    except BaseException as error:  # noqa: BLE001  # an exception would kill the actor, or Ray would wrap it
        return _failure(called_ns, error)
    return _reply(called_ns, waiting=True)


def fetch_result(_: object, ticket: str) -> dict[str, Any]:
    """Return the result of a call in the format of `ask`. Each result can be fetched only once."""
    called_ns = time.time_ns()
    pending = _pending.get(ticket)
    if pending is None:
        text = "The actor restarted during the call."
        return _failure(called_ns, TargetError(text, Outcome.UNREACHABLE, "Check the actor's log for the reason."))
    if not pending.done():
        return _reply(called_ns, waiting=True)
    del _pending[ticket]
    try:
        return _reply(called_ns, value=pending.result())
    except BaseException as error:  # noqa: BLE001  # as above
        return _failure(called_ns, error)


def forget(_: object, ticket: str) -> None:
    """Discard the result of a call. The call itself continues, because engines do not expect cancellation."""
    _pending.pop(ticket, None)


def read_part(_: object, output: str, place: str, offset: int) -> dict[str, Any]:
    """Read a chunk of a capture file, or list a directory, in an output directory on this node."""
    called_ns = time.time_ns()
    return _reply(called_ns, part=attrs.asdict(part_of(Path(output), place, offset)))


async def _call_engine(engine: Engine, call: Mapping[str, Any]) -> Any:
    if not engine.blocking and _running_loop() is None:
        raise TargetError(
            f"{engine.name} must be called on its own event loop, but the actor has no event loop.",
            Outcome.REFUSED,
            "Add async methods to the actor's class, so that Ray runs an event loop, and create the engine there.",
        )
    method = call["method"]
    if method.startswith("_") or not inspect.iscoroutinefunction(getattr(type(engine), method, None)):
        raise TargetError(f"{engine.name} has no method '{method}' that can be called remotely.", Outcome.REFUSED)
    return unstructure(await getattr(engine, method)(*call["arguments"], **call["keywords"]))


def _engine(instance: object, call: Mapping[str, Any]) -> Engine:
    """Return the actor's engine. Each capture searches again, because the actor may have replaced its engine."""
    if call["version"] != __version__:
        text = f"The actor's process has profdeck {__version__}, but the caller has profdeck {call['version']}."
        raise TargetError(text, Outcome.REFUSED, "Install the same version of profdeck on both sides.")
    key = json.dumps([call["backend"], call["options"], call["attribute"]], sort_keys=True)
    connected = _connected.get(key)
    if connected is not None and call["method"] != "has_profdeck":
        return connected.engine
    cls = load_backend(call["backend"])
    # Only engine backends send calls.
    backend = cast("Connects", cls(structure(call["options"], cls.Options, where="options")))
    candidate = find_engine(instance, backend, call["attribute"])
    if connected is None or connected.target is not candidate.target:  # reuse the Engine: it has capture state
        _connected[key] = connected = candidate
    return connected.engine


def find_engine(instance: object, backend: Connects, path: str | None) -> _Connected:
    """Find the engine in an actor that the backend can control.

    With `path`, return the object at that path. Without it, return the only attribute that is such an engine, or the
    actor itself.

    Raises:
        NoEngineError: The actor holds no such engine.
        TargetError: Several attributes are such engines.
        ConfigError: The object at the path is not such an engine.
        PluginError: The engine's library is missing in this process, or not supported.
    """
    if path is not None:
        return _connect_at(instance, backend, path)
    engines: dict[str, _Connected] = {}
    for name, value in _candidates(instance):
        if any(value is connected.target for connected in engines.values()):
            continue
        if (engine := _try_connect(backend, value)) is not None:
            engines[name] = _Connected(value, engine)
    class_name = type(instance).__qualname__
    if len(engines) > 1:
        listed = ", ".join(f"{name} ({type(connected.target).__qualname__})" for name, connected in engines.items())
        raise TargetError(
            f"{len(engines)} attributes of {class_name} are engines of the backend '{backend.name}': {listed}.",
            Outcome.REFUSED,
            f"Select one in the role's targets, such as actor_attribute: {next(iter(engines))}.",
        )
    if engines:
        return next(iter(engines.values()))
    if (engine := _try_connect(backend, instance)) is not None:
        return _Connected(instance, engine)
    listed = ", ".join(f"{name} ({type(value).__qualname__})" for name, value in vars(instance).items())
    raise NoEngineError(
        f"{class_name} does not hold an engine for the backend '{backend.name}'. Its attributes: {listed or 'none'}.",
        Outcome.REFUSED,
        "Create the engine before the capture, or set targets.actor_attribute to the engine's dotted path, such as "
        "worker.engine.",
    )


def _connect_at(instance: object, backend: Connects, path: str) -> _Connected:
    target, target_path = instance, type(instance).__qualname__
    for name in path.split("."):
        try:
            target = getattr(target, name)
        except AttributeError:
            raise NoEngineError(
                f"{target_path} has no attribute '{name}'.",
                Outcome.REFUSED,
                f"Create the engine before the capture, or correct actor_attribute: {path}.",
            ) from None
        target_path = f"{target_path}.{name}"
    if isinstance(target, str):
        raise ConfigError(f"{target_path} is a string: {target!r}. If it is a server URL, use it as the target.")
    return _Connected(target, backend.connect(target))


def _candidates(instance: object) -> Iterator[tuple[str, object]]:
    for name, value in vars(instance).items():
        # A backend would treat text as the URL of a server. The handle of another actor appears to have any method.
        if not isinstance(value, _PLAIN) and type(value).__module__.partition(".")[0] != "ray":
            yield name, value


def _try_connect(backend: Connects, target: object) -> Engine | None:
    try:
        return backend.connect(target)
    except (ConfigError, MissingLibraryError):  # an engine cannot exist without its library
        return None


def _event_loop() -> asyncio.AbstractEventLoop | None:
    """Return the event loop of an async actor, which runs ``__init__`` and most methods; ``None`` for other actors."""
    import ray

    core = ray._private.worker.global_worker.core_worker  # noqa: SLF001  # no public API returns it (Ray 2.40 to 2.60)
    if not core.current_actor_is_asyncio():
        return None
    loop: asyncio.AbstractEventLoop = core.get_event_loop(SimpleNamespace(function_name="__init__"), None)[0]
    return loop


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


def _reply(called_ns: int, **fields: Any) -> dict[str, Any]:
    return {"host": socket.gethostname(), "times": [called_ns, time.time_ns()], **fields}


def _failure(called_ns: int, error: BaseException) -> dict[str, Any]:
    failure = target_error(error)
    outcome, no_engine = failure.outcome.value, isinstance(failure, NoEngineError)
    return _reply(called_ns, error=str(failure), outcome=outcome, fix=failure.fix, no_engine=no_engine)
