"""One recording, from its first manifest to its last: claim, lease, plugins, judgement."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import ExitStack

from profdeck import lease, run
from profdeck.capture import Artifact, Capture, Output, State
from profdeck.errors import CaptureError, describe
from profdeck.plugins import Plugins, Settle

logger = logging.getLogger("profdeck")


def claim(capture: Capture, directory: run.RunDirectory, recorder: run.Recorder) -> None:
    """Write the capture's first manifest, so that it is known whatever happens to this process.

    Raises:
        CaptureError: nothing can be written there.
    """
    try:
        directory.prepare()
        directory.claim(capture, recorder)
    except (OSError, CaptureError) as error:
        where = capture.directory
        raise CaptureError(
            f"Step {capture.current_step}: nothing can be written to {where}: {describe(error)}"
        ) from error
    capture.move_to(State.STARTING)


class Recording:
    """A capture that is running, with all that must be given back when it ends."""

    def __init__(self, capture: Capture, plugins: Plugins, recorder: run.Recorder, resources: ExitStack) -> None:
        """Use `begin`."""
        self.capture = capture
        capture.move_to(State.RECORDING)
        self._plugins = plugins
        self._recorder = recorder
        self._resources = resources
        self.passed = plugins.step(capture)
        """Reports a boundary to all plugins; what fails becomes a problem of the capture."""

    @classmethod
    async def begin(
        cls,
        capture: Capture,
        plugins: Plugins,
        recorder: run.Recorder,
        devices: Callable[[], Iterable[str]],
        settle: Settle,
    ) -> Recording:
        """Start a claimed capture, with the devices leased.

        Raises:
            CaptureError: it could not start; the reason is in the manifest, if that could be written.
        """
        try:
            with ExitStack() as undo:
                held = lease.acquire(devices(), holder=f"{capture.identity.role}, {capture.id}")
                undo.callback(held.release)
                await plugins.start(capture, settle)
                return cls(capture, plugins, recorder, undo.pop_all())
        except BaseException as error:
            give_up(capture, recorder, describe(error))
            if isinstance(error, Exception):
                raise CaptureError(f"Capture {capture.id} did not start: {describe(error)}") from error
            raise

    async def end(self, reason: str | None, settle: Settle) -> None:
        """Stop every plugin, judge what came out and write the manifest. Never raises for a plugin's failure.

        Args:
            reason: why the capture ends before its time; None if it does not.
            settle: how the façade awaits.
        """
        await self.halt(reason, settle)
        await self.finish(settle)

    async def halt(self, reason: str | None, settle: Settle) -> None:
        """Do the part of the end that must be done now, by the thread that started; `finish` must follow."""
        capture = self.capture
        capture.move_to(State.STOPPING)
        if reason:
            capture.problems.append(sentence(reason))
        self._outputs: tuple[Output, ...] = ()
        try:
            self._outputs = await self._plugins.stop(capture, settle)
        except BaseException as error:
            capture.problems.append(f"The stop was interrupted: {describe(error)}")
            capture.finish(())
            self._write()
            raise
        finally:
            self._resources.close()

    async def finish(self, settle: Settle) -> None:
        """Write the files, judge them, write the manifest and tell the listeners; any thread may do this."""
        capture = self.capture
        outputs, self._outputs = self._outputs, ()
        capture.finish(tuple(artifact for output in outputs if (artifact := self._artifact(output))))
        self._write()
        noted = len(capture.notes)
        await self._plugins.announce(capture, settle)
        if len(capture.notes) > noted:
            self._write()

    def _artifact(self, output: Output) -> Artifact | None:
        try:
            artifact = output if isinstance(output, Artifact) else output()
            if not artifact.path.is_relative_to(self.capture.directory):
                raise CaptureError(f"{artifact.path} is outside of {self.capture.directory}.")  # noqa: TRY301  # as others
        except Exception as error:  # noqa: BLE001  # the manifest must be written whatever happens
            self.capture.problems.append(f"A file could not be written: {describe(error)}")
            return None
        return artifact

    def _write(self) -> None:
        try:
            run.write_manifest(self.capture, self._recorder)
        except OSError as error:
            self.capture.problems.append(f"The manifest cannot be written: {error}")


def give_up(capture: Capture, recorder: run.Recorder, reason: str) -> None:
    """End a claimed capture that does not start."""
    capture.problems.append(sentence(reason))
    capture.finish(capture.artifacts)
    try:
        run.write_manifest(capture, recorder)
    except OSError as error:
        logger.warning("The manifest %s cannot be written: %s", capture.manifest_path, error)


def adopt(capture: Capture, recorder: run.Recorder, artifacts: tuple[Artifact, ...]) -> None:
    """End a claimed capture that something else has recorded.

    Raises:
        OSError: the manifest cannot be written.
    """
    capture.move_to(State.RECORDING)
    capture.move_to(State.STOPPING)
    capture.finish(artifacts)
    run.write_manifest(capture, recorder)


def expired(limit_s: float) -> str:
    """Say why a capture that nobody stopped has ended."""
    return f"it was not stopped within max_capture_s={limit_s:g} seconds"


def sentence(text: str) -> str:
    """Begin with a capital and end with a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith(".") else ".")
