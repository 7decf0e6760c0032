"""The options of the PyTorch backend."""

from __future__ import annotations

import attrs
from attrs import validators
from profdeck import Activity, CommonOptions

SUPPORTED = (Activity.CPU, Activity.CUDA)


@attrs.frozen(kw_only=True)
class TorchOptions(CommonOptions):
    """Options of the backend `torch`."""

    gzip: bool = True
    """Compress traces to ``.trace.json.gz``. Default: on. Off gives ``.trace.json``, about ten times larger."""

    cuda_profiler_range: bool = False
    """Call cudaProfilerStart and cudaProfilerStop around captures, for ``nsys --capture-range=cudaProfilerApi``
    (see ``profdeck nsys-args``). Default: off. CUPTI serves one profiler per process, so the device is then left
    to nsys and the trace has CPU activity only."""

    memory_snapshot: bool = False
    """Record the CUDA allocator's history during captures and dump a snapshot at their end and when memory runs
    out, for pytorch.org/memory_viz. Default: off. Needs CUDA."""

    memory_snapshot_entries: int = attrs.field(default=100_000, validator=validators.ge(1))
    """The most allocator events that a memory snapshot keeps; older ones are dropped. Default: 100000."""

    def __attrs_post_init__(self) -> None:
        """Check the fields against each other."""
        wanted = self.activities or ()
        if self.activities is not None and not wanted:
            raise ValueError("activities: the list is empty, so nothing would be recorded; remove the key")
        if foreign := [str(activity) for activity in wanted if activity not in SUPPORTED]:
            allowed = ", ".join(SUPPORTED)
            raise ValueError(f"activities: the backend torch does not record {', '.join(foreign)}; allowed: {allowed}")
        if self.cuda_profiler_range and Activity.CUDA in wanted:
            raise ValueError(
                "activities: cuda cannot be combined with cuda_profiler_range, since CUPTI serves one profiler per "
                "process; remove cuda (nsys records the device), or turn cuda_profiler_range off"
            )
