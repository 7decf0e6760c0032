"""Encodes profdeck's commands in SGLang's profiling requests.

SGLang sends a ``ProfileReq`` to every scheduler of every data-parallel replica, and returns the reply of the first rank
of each replica. The field ``profile_id`` contains the command. The other ranks and the detokenizer write their replies
to a directory that the command names. The directory is on the file system of the traces.

The request has no effect in processes without profdeck: it requests no activities, at a forward pass that is never
reached.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profdeck.engines import Reply
from profdeck.plugin import describe_error, replace_file, structure, unstructure

if TYPE_CHECKING:
    from sglang.srt.managers.io_struct import ProfileReq

logger = logging.getLogger("profdeck")

_PREFIX = "profdeck:"
_UNREACHABLE_STEP = 1 << 62

DETOKENIZER = "detokenizer"


def pack(command: str, payload: Mapping[str, Any], replies: Path | None) -> ProfileReq:
    """Encode a command in a profiling request of SGLang.

    Args:
        command: the command; see `profdeck.engine.worker.recorder.handle_command`.
        payload: the payload of the command; see the same function.
        replies: the directory for the replies of all processes; None if the replies of the first ranks are sufficient.
    """
    from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType

    content = json.dumps([command, payload, None if replies is None else str(replies)])
    kind = {_kind_field(ProfileReq): ProfileReqType.START_PROFILE}
    return ProfileReq(**kind, profile_id=_PREFIX + content, activities=[], start_step=_UNREACHABLE_STEP)


def is_start(request: ProfileReq) -> bool:
    """Return whether a request starts SGLang's profiler."""
    from sglang.srt.managers.io_struct import ProfileReqType

    return bool(getattr(request, _kind_field(type(request))) == ProfileReqType.START_PROFILE)


def _kind_field(cls: type[ProfileReq]) -> str:
    return "req_type" if hasattr(cls, "__struct_fields__") else "type"  # a msgspec struct since 0.5.15


def unpack(request: ProfileReq) -> tuple[str, dict[str, Any], Path | None] | None:
    """Return the command, payload and reply directory in a request, or None for requests of other clients."""
    text = request.profile_id
    if not isinstance(text, str) or not text.startswith(_PREFIX):
        return None
    command, payload, replies = json.loads(text.removeprefix(_PREFIX))
    return command, payload, None if replies is None else Path(replies)


def pack_reply(reply: Reply) -> str:
    """Encode a reply as the message of SGLang's ``ProfileReqOutput``."""
    return _PREFIX + json.dumps(unstructure(reply))


def unpack_reply(message: object) -> Reply | None:
    """Decode the message of a ``ProfileReqOutput``; None if profdeck did not write it."""
    if not isinstance(message, str) or not message.startswith(_PREFIX):
        return None
    return structure(json.loads(message.removeprefix(_PREFIX)), Reply, where="reply")


def rank_reply_name(rank: int) -> str:
    """Return the name of a rank's reply file."""
    return f"rank_{rank}"


def write_reply(directory: Path, name: str, reply: Reply) -> None:
    """Write a reply file atomically. Logs errors instead of raising them."""
    try:
        replace_file(directory / name, json.dumps(unstructure(reply)).encode(), durable=False)
    except FileNotFoundError:  # The client no longer waits and has removed the directory.
        pass
    except OSError as error:
        logger.warning("Could not write the reply of %s: %s", name, describe_error(error))


def read_reply(directory: Path, name: str) -> Reply | None:
    """Read a reply file, or return None if it does not exist."""
    try:
        text = (directory / name).read_text()
    except FileNotFoundError:
        return None
    return structure(json.loads(text), Reply, where="reply")
