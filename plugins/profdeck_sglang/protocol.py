"""How commands reach the processes of an engine: inside of SGLang's own requests to its profiler.

SGLang carries a ``ProfileReq`` to every scheduler of every data-parallel replica, and brings the answers of the first
rank of each replica back. Our commands are in its ``profile_id``. The other ranks, and the detokenizer, answer by
files in a directory that the command names; it is on the file system that the traces go to.

The request is one that does nothing where our side is missing: it asks for a recording of nothing, at a forward pass
that never comes.
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

_MARK = "profdeck:"
_NEVER = 1 << 62

DETOKENIZER = "detokenizer"


def pack(command: str, payload: Mapping[str, Any], replies: Path | None) -> ProfileReq:
    """Encode a command in a profiling request of SGLang.

    Args:
        command: the command; see `profdeck.engine.worker.recorder.handle_command`.
        payload: the payload of the command; see the same function.
        replies: the directory for the replies of all processes; None if the replies of the first ranks are enough.
    """
    from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType

    content = json.dumps([command, payload, None if replies is None else str(replies)])
    kind = {_kind_field(ProfileReq): ProfileReqType.START_PROFILE}
    return ProfileReq(**kind, profile_id=_MARK + content, activities=[], start_step=_NEVER)


def starts(request: ProfileReq) -> bool:
    """Tell whether a request of SGLang is one to start its profiler."""
    from sglang.srt.managers.io_struct import ProfileReqType

    return bool(getattr(request, _kind_field(type(request))) == ProfileReqType.START_PROFILE)


def _kind_field(cls: type[ProfileReq]) -> str:
    return "req_type" if hasattr(cls, "__struct_fields__") else "type"  # a structure of msgspec since 0.5.15


def unpack(request: ProfileReq) -> tuple[str, dict[str, Any], Path | None] | None:
    """Return the command in a request of SGLang, if it is one of ours."""
    text = request.profile_id
    if not isinstance(text, str) or not text.startswith(_MARK):
        return None
    command, payload, replies = json.loads(text.removeprefix(_MARK))
    return command, payload, None if replies is None else Path(replies)


def pack_reply(reply: Reply) -> str:
    """Turn a reply into the message of an answer of SGLang."""
    return _MARK + json.dumps(unstructure(reply))


def unpack_reply(message: object) -> Reply | None:
    """Return the reply in the message of an answer of SGLang; None if it is not one of ours."""
    if not isinstance(message, str) or not message.startswith(_MARK):
        return None
    return structure(json.loads(message.removeprefix(_MARK)), Reply, where="reply")


def rank_name(rank: int) -> str:
    """Name the reply of a rank in the directory of replies."""
    return f"rank_{rank}"


def leave_reply(directory: Path, name: str, reply: Reply) -> None:
    """Leave a reply in the directory of replies, at once whole; a process that cannot stays silent."""
    try:
        replace_file(directory / name, json.dumps(unstructure(reply)).encode(), durable=False)
    except FileNotFoundError:  # the directory is gone: nobody waits for this reply
        pass
    except OSError as error:
        logger.warning("The reply of %s cannot be written: %s", name, describe_error(error))


def take_reply(directory: Path, name: str) -> Reply | None:
    """Return a reply that has been left, or None."""
    try:
        text = (directory / name).read_text()
    except FileNotFoundError:
        return None
    return structure(json.loads(text), Reply, where="reply")
