"""Hook specifications of profdeck.

A backend (see `profdeck.Backend`) records. A listener is any object with hook implementations; its entry-point group is
``profdeck.listeners``. Both mark their hooks with `hookimpl`, and pluggy calls them: ``wrapper``, ``tryfirst``,
``trylast``, ``specname`` and ``optionalhook`` have pluggy's meaning. An implementation omits the arguments that it does
not need.

The order within one capture is ``profile_start``, any number of ``profile_step``, ``profile_stop``. Each plugin is
called separately, with the wrappers of all participating plugins around its call. Therefore, a failing plugin does not
prevent the calls of the other plugins. ``plugin_name`` is the name of the plugin that is called. The order of plugins
is pluggy's, except that the backend is called before listeners that are not ``tryfirst``.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import pluggy

if TYPE_CHECKING:
    from profdeck.base.identity import Identity
    from profdeck.records.artifact import Output
    from profdeck.records.capture import Capture, Step

NAMESPACE = "profdeck"
HOOKSPEC_VERSION = 1
"""Version of the hook specifications. It increases when a hook or an argument is removed or changes its meaning."""
SUPPORTED_VERSIONS = (1,)

hookspec = pluggy.HookspecMarker(NAMESPACE)
hookimpl = pluggy.HookimplMarker(NAMESPACE)


class Hooks:
    """The hook specifications. Each hook except ``profiler_opened`` may return an awaitable, which core awaits."""

    @hookspec(historic=True)
    def profiler_opened(self, role: str, identity: Identity, backend_name: str) -> None:
        """A profiler that can record was created in this process; for listeners.

        The hook is historic: a plugin that is registered later receives the earlier calls. Historic hooks have no
        wrappers.
        """

    @hookspec
    def profile_start(self, capture: Capture, plugin_name: str) -> Awaitable[None] | None:
        """Start recording into ``capture.directory``.

        A backend names its files with ``capture.artifact_path(suffix)`` and may set ``capture.annotate`` to a
        function that returns a context manager for a name: stages then appear in the recording. If the backend cannot
        record, it raises an exception and must not leave a recording running. If another capture, for example of
        another role in the same process, is using the recorder, the backend raises ``profdeck.plugin.LeaseError``.
        The hook is then called again at each boundary until it returns.
        """

    @hookspec
    def profile_step(self, capture: Capture, step: Step, plugin_name: str) -> Awaitable[None] | None:
        """A boundary inside the running capture was passed: ``step`` has the unit that ended and its index.

        Global steps are reported between two steps of one capture. After the last step of a capture,
        ``profile_stop`` is called instead.
        """

    @hookspec
    def profile_stop(self, capture: Capture, plugin_name: str) -> Awaitable[Sequence[Output]] | Sequence[Output] | None:
        """Stop recording and return the artifacts, or functions that write them.

        Put slow work into such a function: in an engine it runs on another thread, while the engine continues.

        The hook is called for each plugin whose ``profile_start`` returned, even if another plugin fails. A plugin
        without ``profile_start`` starts with the others. Listeners that are not ``tryfirst`` are called after the
        backend, when ``capture.artifacts`` and ``capture.status`` are final and the manifest is written. The return
        values of listeners are ignored.
        """

    @hookspec
    def capture_finished(self, manifest: Mapping[str, Any], plugin_name: str) -> Awaitable[None] | None:
        """A capture has ended in all participating processes, and its files have been read back; for listeners.

        Called once per capture of the run, whatever its status, by a separate process that creates the listener again
        from its entry point. The hook must return within ``finish.timeout_s``; otherwise its process is terminated.
        ``manifest`` is the document that the command of ``finish`` receives as its input. Output and exceptions of the
        hook are stored in the record of the finish. If the hook raises, the finish is ``failed``.
        """
