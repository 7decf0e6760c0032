"""Builds the backend of a role from the config, and checks that it can record in this process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from traceback import walk_tb
from typing import Any

import attrs

from profdeck.backends.api import Backend, EngineBackend
from profdeck.backends.plugins import (
    BACKENDS,
    load_backend,
)
from profdeck.base.identity import Identity, parallel_from_environment
from profdeck.base.launchers import launcher_identity
from profdeck.config.batch_kinds import BatchKind
from profdeck.config.model import Config, Mode, RoleConfig
from profdeck.config.options import COMMON_OPTIONS, CommonOptions
from profdeck.config.structuring import structure
from profdeck_traces.base.entry_points import installed
from profdeck_traces.base.errors import ConfigError, PluginError, ProfdeckError, describe_error

# What to say of backends whose import has failed in this process. They are not asked again: torch (2.13) is half there
# after that, fails with another error at the second attempt and ends the process after the third.
_unusable: dict[str, tuple[type[ProfdeckError], str]] = {}


def build_backend(config: Config, role: str) -> Backend:
    """Import a role's backend class and create an instance with validated options.

    The backend's library does not need to be installed.

    Raises:
        ConfigError: an option is invalid.
        PluginError: the backend cannot be loaded.
    """
    chosen = config.roles[role]
    cls = load_backend(chosen.backend)
    options = structure_options(cls, chosen.options, where=f"roles.{role}.options")
    _check_keys(config, role, engine=issubclass(cls, EngineBackend))
    backend = cls(options)
    try:
        backend.check_role(chosen)
    except ConfigError as error:
        raise ConfigError(f"roles.{role}.{error}") from None
    return backend


def supported_options(cls: type[Backend]) -> set[str]:
    """Return the names of a backend's options, without the common options that it does not support."""
    return set(attrs.fields_dict(cls.Options)) - (COMMON_OPTIONS - {"max_capture_s", *cls.common_options})


def structure_options(cls: type[Backend], options: Mapping[str, Any], *, where: str) -> CommonOptions:
    """Return the options of a backend, checked.

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
    """Check the keys of a role that depend on whether its backend is one of an engine."""
    role, path = config.roles[name], f"roles.{name}"
    if not engine:
        if role.iterations:
            raise ConfigError(f"{path}.iterations: '{role.backend}' is not the backend of an engine; use window.")
        if role.batch_kinds:
            raise ConfigError(f"{path}.batch_kinds: '{role.backend}' is not the backend of an engine; remove the key.")
        if role.targets:
            raise ConfigError(f"{path}.targets: '{role.backend}' records its own process and controls no targets.")
        if config.mode is Mode.CONTINUOUS and role.stages:
            raise ConfigError(
                f"{path}.stages: continuous mode records whole steps; use mode: discrete, or remove stages."
            )
        return
    for key in ("window", "warmup_steps"):
        if getattr(role, key):
            raise ConfigError(f"{path}.{key}: '{role.backend}' is the backend of an engine; use iterations.")
    if role.stages:
        raise ConfigError(
            f"{path}.stages: '{role.backend}' is the backend of an engine. Use batch_kinds instead, with values from "
            f"{', '.join(BatchKind)}."
        )


def warmup_steps(role: RoleConfig, backend: Backend, mode: Mode) -> int:
    """Return the number of global steps for which a role's recorder warms up before a capture."""
    if role.warmup_steps is not None:
        return role.warmup_steps
    # Stages have no preceding step, and windows configure their own warm-up.
    return int(backend.cold_first_step and mode is Mode.CONTINUOUS and role.window is None)


def resolve_identity(role: str, backend: Backend) -> Identity:
    """Find rank and world size: the launcher's environment, then the backend's library, then a single process.

    Raises:
        ConfigError: the environment contradicts itself.
    """
    try:
        found = launcher_identity(role) or attrs.evolve(_identify(backend) or Identity(), role=role)
        parallel = parallel_from_environment()
        return attrs.evolve(found, parallel=parallel) if parallel else found
    except ValueError as error:
        raise ConfigError(f"The identity of this process is wrong: {error.args[0]}.") from None


def _identify(backend: Backend) -> Identity | None:
    with _usable(backend):
        return backend.identify()


def run_preflight(backend: Backend) -> None:
    """Check that a backend can record in this process, and import its library.

    Raises:
        ConfigError: the backend cannot record with the given options.
        PluginError: the backend cannot record in this process, or its library failed to load.
    """
    with _usable(backend):
        backend.preflight()


@contextlib.contextmanager
def _usable(backend: Backend) -> Iterator[None]:
    """Turn what fails in a backend or its library into an error that says whose it is and what stands behind it."""
    if backend.name in _unusable:
        kind, text = _unusable[backend.name]
        raise kind(text)
    try:
        yield
    except Exception as error:
        told = error if isinstance(error, ProfdeckError) else _told(backend, error)
        importing = any(
            frame.f_code.co_name == "<module>" for link in _chain(error) for frame, _ in walk_tb(link.__traceback__)
        )
        if importing:
            for _, first in [*_unusable.values()][:1]:  # what it left half imported may be all that is wrong now
                told = type(told)(f"{told} Before that failed in this process: {first}")
            _unusable[backend.name] = type(told), str(told)
        if told is error:
            raise
        raise told from error


def _told(backend: Backend, error: Exception) -> PluginError:
    why = _diagnose(error) or ", from ".join(describe_error(link).rstrip(".") for link in _chain(error)) + "."
    return PluginError(f"The backend '{backend.name}' cannot be used in this process: {why}")


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and those that it was raised from."""
    link: BaseException | None = error
    while link is not None:
        yield link
        link = link.__cause__


def _diagnose(error: BaseException) -> str | None:
    """Ask all installed backends what stands behind an error."""
    for name in installed(BACKENDS):
        with contextlib.suppress(Exception):  # a broken plugin must not hide the error that is told
            if found := load_backend(name).diagnose(error):
                return found
    return None
