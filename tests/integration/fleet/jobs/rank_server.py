"""FastAPI server with the routes of profdeck. Its ranks record with the backend `tally` instead of an engine."""

from __future__ import annotations

import argparse
import socket
from collections.abc import Mapping
from typing import Any

import uvicorn
from fastapi import FastAPI

from profdeck.config.structuring import structure
from profdeck.engine.engine import Engine
from profdeck.engine.server.routes import Routes
from profdeck.records.request import Answer, Reply
from simulated_servers import ABOUT, RecordingEngine


class Ranks(Engine):
    """Engine with two ranks that record."""

    name = "ranks"

    def __init__(self) -> None:
        self.recording = RecordingEngine("tally-device", ranks=2)

    async def has_profdeck(self) -> bool:
        return True

    async def command(self, command: str, payload: Mapping[str, Any]) -> Answer:
        replies = await self.recording.command(command, payload)
        return Answer(ranks=tuple(structure(reply, Reply, where="reply") for reply in replies))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--uds")
    arguments = parser.parse_args()
    app, routes, engine = FastAPI(), Routes("simulated"), Ranks()
    routes.engine = engine
    routes.attach(app)

    @app.get("/health")
    async def health() -> None:
        pass

    @app.get(ABOUT)
    async def about() -> dict[str, str]:
        return {"backend": "simulated"}

    @app.post("/iterate")
    async def iterate() -> None:
        engine.recording.iterate(1)

    listening = [socket.create_server((arguments.host, arguments.port))]
    if arguments.uds:
        listening.append(socket.create_server(arguments.uds, family=socket.AF_UNIX))
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(listening)


if __name__ == "__main__":
    main()
