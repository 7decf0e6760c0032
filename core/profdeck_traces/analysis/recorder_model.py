"""What a recorder's own analysis says of a trace, beside its events, as Ascend's does.

Times are microseconds, as in `profdeck_traces.analysis.model`.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs


@attrs.frozen(kw_only=True)
class CoreSummary:
    """All that ran on one kind of a device's processing units, where the recorder tells them apart."""

    core: str
    """Such as CANN's ``AI_CORE``, ``AI_VECTOR_CORE``, ``MIX_AIC``, ``AI_CPU`` or ``HCCL``."""
    count: int
    total_us: float
    share: float
    """Of the total of all cores; they work at the same time, so this is no share of the busy time."""


@attrs.frozen(kw_only=True)
class DeviceStepSummary:
    """One step on one device, with the times that the recorder's analysis reports."""

    device: int | None
    step: int | None
    """Its number; ``None`` for a recording without steps."""
    compute_us: float | None
    communication_us: float | None
    overlap_us: float | None
    """Communication beside compute."""
    exposed_communication_us: float | None
    """Communication with no compute beside it."""
    exposed_without_receives_us: float | None
    """The same without the time of ``pipeline_bubble_us``."""
    idle_us: float | None
    """Neither compute nor communication."""
    pipeline_bubble_us: float | None
    """Sum of the times in which it received what another rank sends: in a pipeline, from the stage before."""
    pipeline_stage_us: float | None
    """From the start of the first to the end of the last of these times, without ``pipeline_bubble_us``."""
    preparation_us: float | None
    """From the start of the step on the host to its first work on the device."""


@attrs.frozen(kw_only=True)
class LinkSummary:
    """Data sent over one type of link, such as PCIe, by the calls of one communication operation."""

    link: str
    """Such as ``HCCS``, ``PCIE``, ``SIO`` or ``RDMA``. ``SDMA`` is the sum of the first three."""
    size_bytes: int
    transit_us: float
    """Sum of the times in which something was sent; several may send at once."""
    bytes_per_s: float | None
    """``size_bytes`` over ``transit_us``; ``None`` without a time."""
    packets: int | None
    """``None`` where they were not counted."""
    large_packet_share: float | None
    """Of the packets, those above the size from which the recorder counts them as large for this link."""


@attrs.frozen(kw_only=True)
class CommunicationSummary:
    """The calls of one communication operation in one process group, with times from the recorder's analysis."""

    name: str
    """Such as ``allReduce``."""
    kind: str
    """``collective`` or ``p2p``."""
    group: str | None
    """The number by which the recorder knows the process group; names of kernels have its last digits."""
    count: int
    total_us: float
    """From start to end, summed."""
    max_us: float
    transit_us: float
    """Data were sent."""
    wait_us: float
    """It waited for other ranks."""
    synchronisation_us: float
    """The part of ``wait_us`` before it sent anything: other ranks had not arrived."""
    idle_us: float
    """``total_us`` without ``transit_us`` and ``wait_us``."""
    links: tuple[LinkSummary, ...]
    """Those over which something was sent, by size, largest first."""


@attrs.frozen(kw_only=True)
class RecorderTables:
    """Tables that a recorder's own analysis produced."""

    device_steps: tuple[DeviceStepSummary, ...] = ()
    communication: tuple[CommunicationSummary, ...] = ()
    groups: Mapping[str, str] = attrs.field(factory=dict)
    """The numbers of process groups, by their last digits."""
    problems: tuple[str, ...] = ()
