"""The side of the backend that runs in the detokenizer of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from profdeck.engines import FrontendRecorder
from profdeck_sglang import protocol

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import ProfileReq

logger = logging.getLogger("profdeck")


def handler() -> Callable[[ProfileReq], None]:
    """Return what takes the commands that the first scheduler passes on; it never raises."""
    recorder = FrontendRecorder(protocol.DETOKENIZER)

    def take(request: ProfileReq) -> None:
        try:
            ours = protocol.unpack(request)
            if ours is None:
                return
            command, payload, replies = ours
            reply = recorder.command(command, payload)
            if reply is not None and replies is not None:
                protocol.leave_reply(replies, protocol.DETOKENIZER, reply)
        except Exception:  # the detokenizer must go on
            logger.exception("profdeck could not handle a command in the detokenizer")

    return take
