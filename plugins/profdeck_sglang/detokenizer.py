"""Detokenizer side of the SGLang backend."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from profdeck.engines import FrontendRecorder
from profdeck_sglang import protocol

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import ProfileReq

logger = logging.getLogger("profdeck")


def create_handler() -> Callable[[ProfileReq], None]:
    """Return a handler for the commands that the first scheduler forwards. The handler never raises."""
    recorder = FrontendRecorder(protocol.DETOKENIZER)

    def handle(request: ProfileReq) -> None:
        try:
            message = protocol.unpack(request)
            if message is None:
                return
            command, payload, replies = message
            reply = recorder.command(command, payload)
            if reply is not None and replies is not None:
                protocol.write_reply(replies, protocol.DETOKENIZER, reply)
        except Exception:  # An error must not terminate the detokenizer.
            logger.exception("profdeck could not handle a command in the detokenizer")

    return handle
