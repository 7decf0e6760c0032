"""What the config says to an engine that loads profdeck by itself."""

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
    chosen: RoleConfig
    options: EngineOptions

    @classmethod
    def load(cls, backend: str) -> EngineConfig:
        """Read what ``PROFDECK_CONFIG`` and its like say; without a role for the engine, defaults hold.

        Args:
            backend: the name of the engine's backend.

        Raises:
            ConfigError: the config is wrong, or several roles are the engine's and ``PROFDECK_ROLE`` chooses none.
        """
        config = load_config().config
        roles = [name for name, role in config.roles.items() if role.backend == backend]
        name = os.environ.get(ROLE_VARIABLE) or (roles[0] if len(roles) == 1 else None)
        if name is None and not roles:
            return cls(config, "server", RoleConfig(backend=backend), _checked(load_backend(backend).Options()))
        if name not in roles:
            raise ConfigError(
                f"The config has {len(roles)} role(s) of the backend {backend}: {', '.join(roles) or 'none'}. "
                f"{ROLE_VARIABLE}={name or ''} does not say which one this engine has."
            )
        return cls(config, name, config.roles[name], _checked(build_backend(config, name).options))

    @property
    def captures_by_itself(self) -> bool:
        """Whether the engine captures without being asked: the role's iterations have an absolute first one."""
        return self.chosen.iterations is not None and self.chosen.iterations.first is not None

    def name_run(self) -> None:
        """Name the run for the children of this process, so that all processes of the engine name it alike."""
        os.environ.setdefault(RUN_VARIABLE, run_name(self.config.run))

    def own_request(self) -> CaptureRequest:
        """Return the capture that the config arms."""
        iterations = self.chosen.iterations
        assert iterations is not None and iterations.first is not None  # noqa: PT018, S101  # see captures_by_itself
        replica = os.environ.get(REPLICA_VARIABLE)
        request = CaptureRequest(
            id=f"iteration{iterations.first}",
            output=self.config.output.absolute(),
            run=run_name(self.config.run),
            role=self.role,
            replica=int(replica) if replica else None,
            ranks=self.chosen.ranks,
            batch_kinds=self.chosen.batch_kinds,
            iterations=iterations,
        )
        return self.options.complete(request)


def _checked(options: object) -> EngineOptions:
    assert isinstance(options, EngineOptions)  # noqa: S101  # engines ask for their own backends
    return options
