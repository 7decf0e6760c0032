"""The config of engine processes that load profdeck as a plugin."""

from __future__ import annotations

import os

import attrs

from profdeck.backends.backend_setup import build_backend
from profdeck.backends.plugins import load_backend
from profdeck.config.model import Config, RoleConfig
from profdeck.config.sources import load_config
from profdeck.engine.options import EngineOptions
from profdeck.records.request import CaptureRequest
from profdeck.records.run_directory import RUN_VARIABLE, run_name
from profdeck_traces.base.errors import ConfigError

ROLE_VARIABLE = "PROFDECK_ROLE"
REPLICA_VARIABLE = "PROFDECK_REPLICA"


@attrs.frozen
class EngineConfig:
    """The config of an engine process: its role and the options of the role's backend."""

    config: Config
    role: str
    role_config: RoleConfig
    options: EngineOptions

    @classmethod
    def load(cls, backend: str) -> EngineConfig:
        """Load the config from the environment (``PROFDECK_CONFIG`` etc.) and select the engine's role.

        If no role uses the backend, the role is ``server`` with default options.

        Args:
            backend: the name of the engine's backend.

        Raises:
            ConfigError: the config is invalid, or ``PROFDECK_ROLE`` must select one of several roles.
        """
        config = load_config().config
        roles = [name for name, role in config.roles.items() if role.backend == backend]
        name = os.environ.get(ROLE_VARIABLE) or (roles[0] if len(roles) == 1 else None)
        if name is None and not roles:
            return cls(config, "server", RoleConfig(backend=backend), _checked(load_backend(backend).Options()))
        if name not in roles:
            raise ConfigError(
                f"The config has {len(roles)} role(s) with the backend {backend}: {', '.join(roles) or 'none'}. "
                f"{ROLE_VARIABLE}={name or ''} does not select one of them."
            )
        return cls(config, name, config.roles[name], _checked(build_backend(config, name).options))

    @property
    def is_armed(self) -> bool:
        """True if the config arms a capture at engine startup, because the role sets ``iterations.first``."""
        return self.role_config.iterations is not None and self.role_config.iterations.first is not None

    def export_run_name(self) -> None:
        """Store the run name in this process's environment, so that child processes use the same name."""
        os.environ.setdefault(RUN_VARIABLE, run_name(self.config.run))

    def armed_request(self) -> CaptureRequest:
        """Return the request for the capture that the config arms; see `is_armed`."""
        iterations = self.role_config.iterations
        assert iterations is not None and iterations.first is not None  # noqa: PT018, S101  # see is_armed
        replica = os.environ.get(REPLICA_VARIABLE)
        request = CaptureRequest(
            id=f"iteration{iterations.first}",
            output=self.config.output.absolute(),
            run=run_name(self.config.run),
            role=self.role,
            replica=int(replica) if replica else None,
            ranks=self.role_config.ranks,
            batch_kinds=self.role_config.batch_kinds,
            iterations=iterations,
        )
        return self.options.complete(request)


def _checked(options: object) -> EngineOptions:
    assert isinstance(options, EngineOptions)  # noqa: S101  # the backends of engines have these options
    return options
