"""What the config says to a vLLM that loads profdeck by itself."""

from __future__ import annotations

import os

import attrs

from profdeck.config import Config, RoleConfig
from profdeck.engine.request import Batch, CaptureRequest
from profdeck.errors import ConfigError
from profdeck.layers import load
from profdeck.run import run_name
from profdeck.session import build_backend
from profdeck_vllm.options import VllmOptions, complete

ROLE_VARIABLE = "PROFDECK_ROLE"
REPLICA_VARIABLE = "PROFDECK_REPLICA"


@attrs.frozen
class ServerConfig:
    """The config of one engine: of the role whose backend is `vllm`."""

    config: Config
    role: str
    chosen: RoleConfig
    options: VllmOptions

    @classmethod
    def load(cls) -> ServerConfig:
        """Read what ``PROFDECK_CONFIG`` and its like say; without a role for vLLM, defaults hold.

        Raises:
            ConfigError: the config is wrong, or several roles are vLLM's and ``PROFDECK_ROLE`` does not choose one.
        """
        config = load().config
        roles = [name for name, role in config.roles.items() if role.backend == "vllm"]
        name = os.environ.get(ROLE_VARIABLE) or (roles[0] if len(roles) == 1 else None)
        if name is None and not roles:
            return cls(config, "server", RoleConfig(backend="vllm"), VllmOptions())
        if name not in roles:
            raise ConfigError(
                f"The config has {len(roles)} role(s) of the backend vllm: {', '.join(roles) or 'none'}. "
                f"{ROLE_VARIABLE}={name or ''} does not say which one this engine has."
            )
        backend = build_backend(config, name)
        assert isinstance(backend.options, VllmOptions)  # noqa: S101  # by the backend's name
        return cls(config, name, config.roles[name], backend.options)

    @property
    def captures_by_itself(self) -> bool:
        """Whether the engine captures without being asked: the role's iterations have an absolute first one."""
        return self.chosen.iterations is not None and self.chosen.iterations.first is not None

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
            stages=tuple(map(Batch, self.chosen.stages)),
            iterations=iterations,
        )
        return complete(request, self.options)
