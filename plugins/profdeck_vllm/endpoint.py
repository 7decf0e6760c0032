"""profdeck's routes in vLLM's HTTP server, loaded through the entry-point group ``vllm.endpoint_plugins``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profdeck.engines import Routes
from profdeck_vllm.autoload import NAME, is_enabled
from profdeck_vllm.omni import wrap_engine

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.datastructures import State as AppState
    from vllm.engine.protocol import EngineClient


class ProfdeckEndpoints:
    """Endpoint plugin of vLLM. The interface is in vllm/plugins/endpoint_plugins/interface.py."""

    name = NAME
    required_tasks = None

    def __init__(self) -> None:
        self._routes = Routes("vllm")

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        self._routes.attach(app)

    async def init_state(self, engine_client: EngineClient | None, state: AppState, args: Namespace) -> None:  # noqa: ARG002  # vLLM's signature
        """Pass the engine to the routes. Render-only servers have no engine."""
        if engine_client is not None and is_enabled():
            self._routes.engine = wrap_engine(engine_client)
