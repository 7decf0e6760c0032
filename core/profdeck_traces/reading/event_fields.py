"""What a trace says of itself besides its complete events: members, names, and what the args of some events state."""

from __future__ import annotations

from typing import Any

import attrs

from profdeck_traces.reading.collective_fields import StatedCollectives
from profdeck_traces.reading.column_builder import MAX_TRACKS
from profdeck_traces.reading.event_args import AnnotationIds, Copies
from profdeck_traces.reading.identifiers import Id
from profdeck_traces.reading.memory_fields import StatedMemory
from profdeck_traces.reading.shape_fields import StatedShapes


@attrs.define
class Stated:
    """Of a trace, or of a part of it."""

    members: dict[str, Any] = attrs.field(factory=dict)
    """Of the top-level object, as far as they are wanted."""
    process_names: dict[Id, str] = attrs.field(factory=dict)
    thread_names: dict[tuple[Id, Id], str] = attrs.field(factory=dict)
    copies: Copies = attrs.field(factory=Copies)
    collectives: StatedCollectives = attrs.field(factory=StatedCollectives)
    memory: StatedMemory = attrs.field(factory=StatedMemory)
    shapes: StatedShapes = attrs.field(factory=StatedShapes)
    annotations: AnnotationIds = attrs.field(factory=AnnotationIds)
    undecodable: int = 0
    """How many events no decoder takes."""
    searched: bool = False
    """Whether something was searched rather than parsed: nobody knows then whether all of it is JSON."""

    @property
    def has_room_for_names(self) -> bool:
        """Whether more names of processes and threads are taken."""
        return len(self.process_names) + len(self.thread_names) <= MAX_TRACKS

    def add(self, following: Stated) -> bool:
        """Take what the next part of the file states; return whether all of it was within the limits."""
        self.members |= following.members
        self.process_names |= following.process_names
        self.thread_names |= following.thread_names
        self.undecodable += following.undecodable
        self.searched |= following.searched
        fit = [
            self.copies.extend(following.copies),
            self.collectives.extend(following.collectives),
            self.memory.extend(following.memory),
            self.shapes.extend(following.shapes),
            self.annotations.extend(following.annotations),
        ]
        return all(fit) and self.has_room_for_names
