"""The listener ``tensorboard``, which writes the metrics of each capture, and its report command, to event files."""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from profdeck import hookimpl
from profdeck.plugin import user_path
from profdeck_traces import numbers_of_capture
from profdeck_trackers.common import HEADLINE, headline_of, require_library

if TYPE_CHECKING:
    from tensorboard.compat.proto.summary_pb2 import Summary

DIRECTORY_VARIABLE = "TENSORBOARD_DIR"
"""Directory of the job's event files; verl and slime also read this variable.

The listener writes to the subdirectory ``profdeck/RUN``. Without the variable, it writes to ``tensorboard`` in the run
directory.
"""


class TensorBoardListener:
    """Writes one event file for each capture."""

    def __init__(self) -> None:
        """Raises:
        MissingLibraryError: TensorBoard is not installed.
        """
        require_library("tensorboard")

    @hookimpl
    def capture_finished(self, manifest: Mapping[str, Any]) -> None:
        """Write the metrics of a capture at its global step."""
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        numbers = numbers_of_capture(manifest)
        run = Path(manifest["directory"]).parent
        writer = EventFileWriter(str(_event_directory(run)), filename_suffix=f".{manifest['capture']}")
        try:
            values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.values.items()]
            report = f"{manifest['status']}: `profdeck report {shlex.quote(manifest['directory'])}`"
            values += [_text_value("profdeck/capture", report), _text_value(HEADLINE, headline_of(manifest))]
            event = Event(wall_time=time.time(), step=numbers.step, summary=Summary(value=values))
            writer.add_event(event)
        finally:
            writer.close()


def _event_directory(run: Path) -> Path:
    job_directory = os.environ.get(DIRECTORY_VARIABLE)
    return (
        user_path(job_directory, DIRECTORY_VARIABLE) / "profdeck" / run.name if job_directory else run / "tensorboard"
    )


def _text_value(tag: str, markdown: str) -> Summary.Value:
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.compat.proto.tensor_pb2 import TensorProto
    from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto
    from tensorboard.compat.proto.types_pb2 import DT_STRING
    from tensorboard.plugins.text.metadata import create_summary_metadata

    tensor = TensorProto(dtype=DT_STRING, string_val=[markdown.encode()], tensor_shape=TensorShapeProto())
    return Summary.Value(tag=tag, metadata=create_summary_metadata(tag, ""), tensor=tensor)
