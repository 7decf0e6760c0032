"""One recording, from its first manifest to its last: its names, its devices, its plugins, its verdict."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from profdeck.backends.plugin_host import Plugins, Resolve
from profdeck.base import leases
from profdeck.base.errors import CaptureError, LeaseError, describe
from profdeck.base.interruptions import is_of_signal
from profdeck.base.words import sentence
from profdeck.records import manifest, run_directory
from profdeck.records.artifact import Artifact, Output
from profdeck.records.capture import Capture, CaptureState, Step, Unit

logger = logging.getLogger("profdeck")


def reserve(capture: Capture, directory: run_directory.RunDirectory, recorder: manifest.ManifestWriter) -> None:
    """Write the capture's first manifest, so that it is known whatever happens to this process.

    Raises:
        CaptureError: nothing can be written there.
    """
    try:
        directory.prepare()
        directory.reserve(capture, recorder)
    except (OSError, CaptureError) as error:
        where = capture.directory
        raise CaptureError(
            f"Step {capture.current_step}: nothing can be written to {where}: {describe(error)}"
        ) from error
    capture.move_to(CaptureState.STARTING)


class Recording:
    """A capture whose names are reserved that waits for its turn or is running, with all that must be given back when
    it ends.
    """

    def __init__(
        self, capture: Capture, plugins: Plugins, recorder: manifest.ManifestWriter, turn: leases.Turn
    ) -> None:
        """Args:
        capture: the capture, claimed.
        plugins: what records it.
        recorder: what is the same in all manifests.
        turn: the devices that it needs.
        """
        self.capture = capture
        self._plugins = plugins
        self._recorder = recorder
        self._turn = turn
        # Re-entrant: a signal may come while this thread writes, and its handler notes something as well.
        self._mutex = threading.RLock()
        self._publishing = False
        self.passed: Callable[[Step, Resolve], Coroutine[Any, Any, None]] = self._passed_over
        """Reports a boundary to all plugins; what fails becomes a problem of the capture. While it waits for its turn,
        tries to begin instead, as `start` does."""

    @classmethod
    async def begin(
        cls,
        capture: Capture,
        plugins: Plugins,
        recorder: manifest.ManifestWriter,
        devices: Callable[[], Iterable[str]],
        resolve: Resolve,
    ) -> Recording:
        """Start a capture whose names are reserved, with the devices leased; it waits for its turn if one of them is
        held.

        Raises:
            CaptureError: it could not start; the reason is in the manifest, if that could be written.
        """
        recording = cls(capture, plugins, recorder, leases.Turn(devices, f"{capture.identity.role}, {capture.id}"))
        if not await recording.start(resolve):
            recording.publish()
        return recording

    @property
    def waiting(self) -> bool:
        """Whether it waits for its turn."""
        return self.capture.state is CaptureState.STARTING

    async def start(self, resolve: Resolve) -> bool:
        """Try to begin; tells whether it records from now on, as nobody else holds what it needs.

        Raises:
            CaptureError: it could not start; the reason is in the manifest, if that could be written.
        """
        capture = self.capture
        try:
            begun = self._turn.take()
            if begun and capture.waits_for is not None:
                self.wait()
                self.publish()
            begun = begun and await self._start_plugins(resolve)
        except BaseException as error:
            self.abandon(describe(error))
            if isinstance(error, Exception) and not is_of_signal(error):
                raise CaptureError(f"Capture {capture.id} did not start: {describe(error)}") from error
            raise
        self.wait()
        if begun:
            self._tell_wait()
            capture.move_to(CaptureState.RECORDING)
            self.passed = self._plugins.step(capture)
        return begun

    def wait(self) -> None:
        """Say in the capture for whom it waits, if it does."""
        self.capture.waits_for = self._turn.waits_for

    async def _start_plugins(self, resolve: Resolve) -> bool:
        try:
            await self._plugins.start(self.capture, resolve)
        except LeaseError as error:  # another recording of this process has what the backend records with
            self._turn.wait_for(error)
            return False
        return True

    async def _passed_over(self, step: Step, resolve: Resolve) -> None:
        if step.unit is Unit.GLOBAL_STEP:
            self.capture.current_step = step.index + 1
        elif step.unit is self.capture.unit:
            self.capture.passed_over += 1
        await self.start(resolve)

    def _tell_wait(self) -> None:
        capture, wait = self.capture, self._turn.waited()
        if wait is None:
            return
        capture.waited_s = wait.duration_s
        counted = capture.first_iteration is not None
        where = f"at iteration {capture.first_iteration}" if counted else f"in step {capture.current_step}"
        capture.notes.append(f"It waited {_words(wait)}, and began {where}.")
        if capture.unit is Unit.GLOBAL_STEP and capture.current_step > capture.first_step:
            last = capture.current_step - 1
            steps = f"Step {last} was" if last == capture.first_step else f"Steps {capture.first_step} to {last} were"
            capture.problems.append(f"{steps} not recorded, as its turn came later.")

    def abandon(self, reason: str | None) -> None:
        """End it where nothing records.

        Args:
            reason: why; None if its turn did not come, and nothing else is to be said.
        """
        capture, reasons = self.capture, [reason] if reason else []
        self.wait()
        if (wait := self._turn.waited()) is not None:
            capture.waited_s = wait.duration_s
            if capture.waits_for is None:
                capture.notes.append(f"It waited {_words(wait)}.")
            else:
                reasons.append(in_vain(wait))
        self._turn.release()
        abandon(capture, self._recorder, *reasons)

    def publish(self) -> None:
        """Write the manifest as it stands, if the end has not begun; from any thread, not only the owner's."""
        with self._mutex:
            if self._publishing or self.capture.state not in {CaptureState.STARTING, CaptureState.RECORDING}:
                return
            self._publishing = True
            try:
                self._write()
            finally:
                self._publishing = False

    async def stop(self, reason: str | None, resolve: Resolve) -> None:
        """Stop every plugin, judge what came out and write the manifest. Never raises for a plugin's failure.

        Args:
            reason: why the capture ends before its time; None if it does not.
            resolve: how the façade awaits.
        """
        if self.waiting:
            self.abandon(reason)
            return
        await self.stop_recording(reason, resolve)
        await self.write(resolve)

    async def withdraw(self, reason: str | None, resolve: Resolve) -> bool:
        """End a capture that has recorded nothing yet, and take back its manifest, as if it had never begun.

        Returns:
            Whether it did. A capture that has left a file ends as by `stop`.
        """
        if self.waiting:
            self._turn.release()
        else:
            await self.stop_recording(reason, resolve)
            if self._outputs:
                await self.write(resolve)
                return False
        self.capture.move_to(CaptureState.ENDED)
        try:
            run_directory.withdraw(self.capture)
        except OSError as error:
            logger.warning("The manifest %s cannot be removed: %s", self.capture.manifest_path, error)
        else:
            problems = " ".join(self.capture.problems)
            logger.info("Capture %s only warmed up and was withdrawn. %s", self.capture.id, problems)
        return True

    async def stop_recording(self, reason: str | None, resolve: Resolve) -> None:
        """Do the part of the end that must be done now, by the thread that started; `write` must follow."""
        capture = self.capture
        capture.move_to(CaptureState.STOPPING)
        if reason:
            capture.problems.append(sentence(reason))
        self._outputs: tuple[Output, ...] = ()
        try:
            self._outputs = await self._plugins.stop(capture, resolve)
        except BaseException as error:
            capture.problems.append(f"The stop was interrupted: {describe(error)}")
            capture.conclude(())
            self._write()
            raise
        finally:
            self._turn.release()

    async def write(self, resolve: Resolve) -> None:
        """Write the files, judge them, write the manifest and tell the listeners; any thread may do this."""
        capture = self.capture
        outputs, self._outputs = self._outputs, ()
        artifacts, interruption = [], None
        for output in outputs:
            try:
                artifacts.append(self._artifact(output))
            except Exception as error:  # noqa: BLE001  # the manifest must be written whatever happens
                capture.problems.append(f"A file could not be written: {describe(error)}")
                interruption = error if is_of_signal(error) else interruption
        capture.conclude(tuple(artifacts))
        self._write()
        if interruption is not None:
            raise interruption
        noted = len(capture.notes)
        await self._plugins.announce(capture, resolve)
        if len(capture.notes) > noted:
            self._write()

    def _artifact(self, output: Output) -> Artifact:
        artifact = output if isinstance(output, Artifact) else output()
        if not artifact.path.is_relative_to(self.capture.directory):
            raise CaptureError(f"{artifact.path} is outside of {self.capture.directory}.")
        return artifact

    def _write(self) -> None:
        try:
            with self._mutex:
                manifest.write_manifest(self.capture, self._recorder)
        except OSError as error:
            self.capture.problems.append(f"The manifest cannot be written: {error}")


def abandon(capture: Capture, recorder: manifest.ManifestWriter, *reasons: str) -> None:
    """End a capture whose names are reserved that does not start."""
    capture.problems += map(sentence, reasons)
    capture.conclude(capture.artifacts)
    try:
        manifest.write_manifest(capture, recorder)
    except OSError as error:
        logger.warning("The manifest %s cannot be written: %s", capture.manifest_path, error)


def adopt(capture: Capture, recorder: manifest.ManifestWriter, artifacts: tuple[Artifact, ...]) -> None:
    """End a capture whose names are reserved that something else has recorded.

    Raises:
        OSError: the manifest cannot be written.
    """
    capture.move_to(CaptureState.RECORDING)
    capture.move_to(CaptureState.STOPPING)
    capture.conclude(artifacts)
    manifest.write_manifest(capture, recorder)


def expired(limit_s: float) -> str:
    """Say why a capture that nobody stopped has ended."""
    return f"it was not stopped within max_capture_s={limit_s:g} seconds"


def in_vain(wait: leases.Wait) -> str:
    """Say that a turn never came, and what to do."""
    return (
        f"Its turn never came: it waited {_words(wait)}. Let that recording end sooner (an engine's by a count of "
        "iterations, a trainer's by stages), or capture these roles at different steps."
    )


def _words(wait: leases.Wait) -> str:
    return f"{wait.duration_s:.2f} s for {', then for '.join(wait.held)}"
