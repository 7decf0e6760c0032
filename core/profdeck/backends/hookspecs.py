"""The whole extension surface of profdeck: three hooks, and one more for listeners.

A backend (see `profdeck.Backend`) records; a listener (any object with these hooks, found under the entry-point
group ``profdeck.listeners``) is told what happens, to upload or notify, say. Both implement the same hooks and
mark them with `hookimpl`; a hook may leave out arguments that it does not need.

The order within one capture is always ``profile_start``, any number of ``profile_step``, ``profile_stop``.
Backends are called before listeners. ``profile_stop`` is called for every plugin whose ``profile_start``
returned, whatever happened in between and whatever the other plugins raise. All of these are called in every process
that records. ``capture_finished`` is called once for all of them, after their last.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from profdeck.records.artifact import Output
    from profdeck.records.capture import Capture, Step

NAMESPACE = "profdeck"

hookspec = pluggy.HookspecMarker(NAMESPACE)
hookimpl = pluggy.HookimplMarker(NAMESPACE)


class Hooks:
    """The hook specifications. Each hook may return an awaitable, which the caller's façade awaits."""

    @hookspec
    def profile_start(self, capture: Capture) -> Awaitable[None] | None:
        """Begin recording into ``capture.directory``.

        A backend names its files with ``capture.artifact_path(suffix)`` and may set ``capture.annotate`` to a
        function that makes a context manager from a name: stages then appear in the recording. To refuse, raise;
        nothing of this plugin may then still be recording. A backend whose recorder is in use, such as by another
        role of the same process, raises ``profdeck.base.errors.LeaseError``: the capture then waits for its turn, and
        the hook is called again at each boundary until it starts.
        """

    @hookspec
    def profile_step(self, capture: Capture, step: Step) -> Awaitable[None] | None:
        """A boundary inside the running capture was passed: ``step`` says which unit ended and its index.

        Global steps are reported between two steps of one capture, so never after its last one: there
        ``profile_stop`` follows instead.
        """

    @hookspec
    def profile_stop(self, capture: Capture) -> Awaitable[Sequence[Output]] | Sequence[Output] | None:
        """End the recording and return the artifacts that it left, whole or not, or functions that write them.

        What is slow and need not be done by this thread belongs into such a function: in an engine it is called by
        another thread, while the engine goes on.

        Listeners are called after the backend, when ``capture.artifacts`` and ``capture.status`` are final and
        the manifest is written; what they return is ignored.
        """

    @hookspec
    def capture_finished(self, manifest: Mapping[str, Any]) -> Awaitable[None] | None:
        """A capture has ended in all processes that take part, and its files have been read back; for listeners.

        Called once per capture of the run, whatever came of it, by a process that does nothing else: the listener is
        built again there, from its entry point. It must return within ``finish.timeout_s``, or its process is ended.
        ``manifest`` is the document that the command of ``finish`` gets as its input. What this raises or prints is
        in the record of the finish, and a listener that raises makes that ``failed``.
        """
