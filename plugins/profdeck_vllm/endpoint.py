"""Our routes in vLLM's HTTP server, through its entry-point group ``vllm.endpoint_plugins``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from profdeck.engines import Routes
from profdeck_vllm.autoload import NAME, armed
from profdeck_vllm.omni import engine_of

if TYPE_CHECKING:
    from argparse import Namespace

    from fastapi import FastAPI
    from starlette.datastructures import State as AppState
    from vllm.engine.protocol import EngineClient


class ProfdeckEndpoints:
    """The endpoint plugin; see vllm/plugins/endpoint_plugins/interface.py."""

    name = NAME
    required_tasks = None

    def __init__(self) -> None:
        self._routes = Routes("vllm")

    def attach_router(self, app: FastAPI) -> None:
        """Add the routes."""
        self._routes.attach(app)

    async def init_state(self, engine_client: EngineClient | None, state: AppState, args: Namespace) -> None:  # noqa: ARG002  # vLLM's signature
        """Take the engine; there is none in a server that only renders."""
        if engine_client is not None and armed():
            self._routes.engine = engine_of(engine_client)
