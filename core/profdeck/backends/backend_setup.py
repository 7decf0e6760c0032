"""Creation of a role's backend from the config, and checks that the backend can record in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from traceback import walk_tb
from typing import Any

import attrs

from profdeck.backends.api import Backend, EngineBackend
from profdeck.backends.plugins import BACKENDS, load_backend
from profdeck.base.identity import Identity, parallel_from_environment
from profdeck.base.launchers import launcher_identity
from profdeck.config.batch_kinds import BatchKind
from profdeck.config.model import Config, Mode, RoleConfig
from profdeck.config.options import COMMON_OPTIONS, LIMITS, CommonOptions
from profdeck.config.structuring import structure
from profdeck_traces.base.entry_points import installed
from profdeck_traces.base.errors import ConfigError, PluginError, ProfdeckError, describe_error

_failed_imports: dict[str, tuple[type[ProfdeckError], str]] = {}
"""Type and message of the import error, by name of the backend.

Failed imports are not repeated. After a failed import, torch 2.13 is partially initialized: the second attempt raises a
different error, and the third crashes the process.
"""


def build_backend(config: Config, role: str) -> Backend:
    """Import a role's backend class and create an instance with validated options.

    The backend's library does not need to be installed.

    Raises:
        ConfigError: an option is invalid.
        PluginError: the backend cannot be loaded.
    """
    role_config = config.roles[role]
    cls = load_backend(role_config.backend)
    options = structure_options(cls, role_config.options, where=f"roles.{role}.options")
    _check_keys(config, role, engine=issubclass(cls, EngineBackend))
    backend = cls(options)
    try:
        backend.check_role(role_config)
    except ConfigError as error:
        raise ConfigError(f"roles.{role}.{error}") from None
    return backend


def supported_options(cls: type[Backend]) -> set[str]:
    """Return the names of a backend's options, without the common options that it does not support."""
    return set(attrs.fields_dict(cls.Options)) - (COMMON_OPTIONS - LIMITS.union(cls.common_options))


def structure_options(cls: type[Backend], options: Mapping[str, Any], *, where: str) -> CommonOptions:
    """Validate a backend's options and return them as an instance of its options class.

    Raises:
        ConfigError: an option is unknown, has a wrong value, or is a common option that the backend does not support.
    """
    supported = supported_options(cls)
    unsupported = COMMON_OPTIONS - supported
    structured: CommonOptions = structure(dict(options), cls.Options, where=where, unsupported=unsupported)
    for field in attrs.fields(CommonOptions):
        if field.name in unsupported and getattr(structured, field.name) != field.default:
            raise ConfigError(
                f"{where}.{field.name}: the backend '{cls.name}' does not support this common option. It supports "
                f"{', '.join(sorted(COMMON_OPTIONS & supported))}."
            )
    return structured


def _check_keys(config: Config, name: str, *, engine: bool) -> None:
    """Reject role keys that only engine backends, or only device backends, support."""
    role, path = config.roles[name], f"roles.{name}"
    if not engine:
        if role.iterations:
            raise ConfigError(f"{path}.iterations: '{role.backend}' is not an engine backend; use window.")
        if role.batch_kinds:
            raise ConfigError(f"{path}.batch_kinds: '{role.backend}' is not an engine backend; remove the key.")
        if role.targets:
            raise ConfigError(f"{path}.targets: '{role.backend}' records its own process and controls no targets.")
        if config.mode is Mode.CONTINUOUS and role.stages:
            raise ConfigError(
                f"{path}.stages: continuous mode records whole steps; use mode: discrete, or remove stages."
            )
        return
    for key in ("window", "warmup_steps"):
        if getattr(role, key):
            raise ConfigError(f"{path}.{key}: '{role.backend}' is an engine backend; use iterations.")
    if role.stages:
        raise ConfigError(
            f"{path}.stages: '{role.backend}' is an engine backend. Use batch_kinds instead, with values from "
            f"{', '.join(BatchKind)}."
        )


def warmup_steps(role: RoleConfig, backend: Backend, mode: Mode) -> int:
    """Return the number of global steps for which a role's recorder warms up before a capture."""
    if role.warmup_steps is not None:
        return role.warmup_steps
    # Stages have no preceding step, and windows configure their own warm-up.
    return int(backend.cold_first_step and mode is Mode.CONTINUOUS and role.window is None)


def resolve_identity(role: str, backend: Backend) -> Identity:
    """Return the identity of this process.

    Rank and world size come from the launcher's environment, otherwise from the backend's library. If neither has
    them, the identity is that of a single process.

    Raises:
        ConfigError: the environment variables are invalid or contradictory.
    """
    try:
        identity = launcher_identity(role) or attrs.evolve(_identify(backend) or Identity(), role=role)
        parallel = parallel_from_environment()
        return attrs.evolve(identity, parallel=parallel) if parallel else identity
    except ValueError as error:
        raise ConfigError(f"Cannot determine the identity of this process: {error.args[0]}.") from None


def _identify(backend: Backend) -> Identity | None:
    with _explain_failure(backend):
        return backend.identify()


def run_preflight(backend: Backend) -> None:
    """Check that a backend can record in this process, and import its library.

    Raises:
        ConfigError: the backend cannot record with the given options.
        PluginError: the backend cannot record in this process, or its library failed to load.
    """
    with _explain_failure(backend):
        backend.preflight()


@contextlib.contextmanager
def _explain_failure(backend: Backend) -> Iterator[None]:
    """Convert exceptions of a backend or its library to a `ProfdeckError` with the backend's name and the cause.

    If an import of the backend fails, later blocks for the backend raise the same error immediately.
    """
    if backend.name in _failed_imports:
        error_type, message = _failed_imports[backend.name]
        raise error_type(message)
    try:
        yield
    except Exception as error:
        explained = error if isinstance(error, ProfdeckError) else _explain(backend, error)
        failed_in_import = any(
            frame.f_code.co_name == "<module>" for link in _causes(error) for frame, _ in walk_tb(link.__traceback__)
        )
        if failed_in_import:
            # The first failed import can cause later ones, because it leaves partially initialized modules.
            for _, first in [*_failed_imports.values()][:1]:
                explained = type(explained)(f"{explained} An earlier import in this process also failed: {first}")
            _failed_imports[backend.name] = type(explained), str(explained)
        if explained is error:
            raise
        raise explained from error


def _explain(backend: Backend, error: Exception) -> PluginError:
    reason = _diagnose(error) or ", from ".join(describe_error(link).rstrip(".") for link in _causes(error)) + "."
    return PluginError(f"The backend '{backend.name}' cannot be used in this process: {reason}")


def _causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its chain of ``__cause__`` exceptions."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _diagnose(error: BaseException) -> str | None:
    """Return the first diagnosis of an error by any installed backend, or None."""
    for name in installed(BACKENDS):
        with contextlib.suppress(Exception):  # a broken plugin must not hide the original error
            if diagnosis := load_backend(name).diagnose(error):
                return diagnosis
    return None
