"""What the events of a trace add up to by name, and the tables of a summary that follow from that alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from profdeck_traces.analysis.detail_model import DurationBin, PerStep, RuntimeCalls
from profdeck_traces.analysis.host_states import state_of_call
from profdeck_traces.analysis.model import CategorySummary, CopySummary, KernelSummary, OperatorSummary
from profdeck_traces.reading.columns import COPIES, DEVICE_WORK, Columns
from profdeck_traces.reading.intervals import Int
from profdeck_traces.reading.trace import Trace

_NS_PER_US = 1000
# What launches a captured graph of kernels, by the beginning of its name: CUDA's runtime and driver, HIP's runtime.
_GRAPH_LAUNCHES = ("cudaGraphLaunch", "cuGraphLaunch", "hipGraphLaunch")
# No kernel runs for two hours.
_BINS = 43


class NameSums:
    """Counts and times by name, in nanoseconds."""

    def __init__(self, events: Columns, self_ns: Int) -> None:
        """Sum up events.

        Args:
            events: All events of the trace.
            self_ns: Self time of each event; 0 unless the event is an operator or annotation.
        """
        self._tables = events.tables
        names = len(self._tables.names)
        duration = events.duration_ns
        self._counts = np.bincount(events.name, minlength=names)
        self._total_ns = _summed(events.name, duration, names)
        self._self_ns = _summed(events.name, self_ns, names)
        self._max_ns = np.zeros(names, dtype=np.int64)
        np.maximum.at(self._max_ns, events.name, duration)
        self._on_device = self._tables.names_of_categories(DEVICE_WORK)
        is_kernel = self._on_device & ~self._tables.names_of_categories(COPIES)
        of_kernels = duration[is_kernel[events.name]]
        # The bins are powers of two, so a duration's bin is its floating-point exponent.
        exponent = np.minimum(np.maximum(np.frexp(of_kernels)[1] - 1, 0), _BINS - 1)
        self._durations = np.stack([np.bincount(exponent, minlength=_BINS), _summed(exponent, of_kernels, _BINS)])

    def kernels(
        self,
        classes: Sequence[str],
        types: Mapping[str, str],
        per_step: Mapping[int, PerStep],
        cold_ns: Mapping[int, int],
        mean_blocks: Mapping[int, float],
    ) -> tuple[KernelSummary, ...]:
        """Return the kernels, copies and fills that ran on devices.

        Args:
            classes: Of each name.
            types: Operator type of each kernel, if known.
            per_step: Variation from step to step, by name code.
            cold_ns: Time in excluded steps, in nanoseconds, by name code.
            mean_blocks: Mean number of thread blocks, by name code.
        """
        used = self._on_device & (self._counts > 0)
        all_ns = int(self._total_ns[used].sum())
        return tuple(
            KernelSummary(
                name=self._tables.names[code],
                category=classes[code],
                kind=self._category(code),
                count=int(self._counts[code]),
                total_us=_us(self._total_ns[code]),
                mean_us=_us(self._total_ns[code]) / int(self._counts[code]),
                max_us=_us(self._max_ns[code]),
                share=_share(self._total_ns[code], all_ns),
                per_step=per_step.get(code),
                type=types.get(self._tables.names[code]),
                cold_us=_us(cold_ns.get(code, 0)),
                mean_blocks=mean_blocks.get(code),
            )
            for code in self._largest(self._total_ns, used)
        )

    def classes(
        self, found: Sequence[str], number_of_name: Int, cold_ns: Mapping[int, int]
    ) -> tuple[CategorySummary, ...]:
        """Return the sums of classes.

        Args:
            found: The names of the classes.
            number_of_name: Of each name, which of them it is of; ``len(found)`` for no kernel.
            cold_ns: Time in excluded steps, in nanoseconds, by name code.
        """
        used = self._on_device & (self._counts > 0)
        of_class = number_of_name[used]
        counts = np.bincount(of_class, weights=self._counts[used], minlength=len(found))
        totals = np.bincount(of_class, weights=self._total_ns[used], minlength=len(found))
        all_ns = int(self._total_ns[used].sum())
        cold = Counter[int]()
        for code, time_ns in cold_ns.items():
            cold[int(number_of_name[code])] += time_ns
        return tuple(
            CategorySummary(
                category=found[number],
                count=int(counts[number]),
                total_us=_us(totals[number]),
                share=_share(totals[number], all_ns),
                cold_us=_us(cold[number]),
            )
            for number in np.argsort(-totals[: len(found)], kind="stable").tolist()
        )

    def ran_on_device(self) -> list[int]:
        """Return the codes of the names of what ran on devices."""
        codes: list[int] = np.flatnonzero(self._on_device & (self._counts > 0)).tolist()
        return codes

    def operators(
        self,
        of_kind: NDArray[np.bool_],
        per_step: Mapping[int, PerStep],
        cold_ns: Mapping[int, int],
        *,
        on_host: bool,
    ) -> tuple[OperatorSummary, ...]:
        """Return operators or annotations.

        Args:
            of_kind: Which names are theirs.
            per_step: Variation from step to step, by name code.
            cold_ns: Time in excluded steps, in nanoseconds, by name code.
            on_host: Whether the host was read.
        """
        return tuple(
            OperatorSummary(
                name=self._tables.names[code],
                count=int(self._counts[code]),
                self_us=_us(self._self_ns[code]) if on_host else None,
                total_us=_us(self._total_ns[code]),
                max_us=_us(self._max_ns[code]),
                per_step=per_step.get(code),
                cold_us=_us(cold_ns.get(code, 0)),
            )
            for code in self._largest(self._self_ns if on_host else self._total_ns, of_kind & (self._counts > 0))
        )

    def copies(self, trace: Trace) -> tuple[CopySummary, ...]:
        """Return copies and fills, with the sizes recorded in their events."""
        is_copy = self._tables.names_of_categories(COPIES)
        events = trace.events[np.flatnonzero(is_copy[trace.events.name])]
        size = trace.arg("bytes", events.row)
        names = len(self._tables.names)
        stated = np.bincount(events.name, weights=size >= 0, minlength=names)
        size_bytes = _summed(events.name, np.maximum(size, 0), names)
        return tuple(
            CopySummary(
                name=self._tables.names[code],
                count=int(self._counts[code]),
                total_us=_us(self._total_ns[code]),
                size_bytes=int(size_bytes[code]) if stated[code] == self._counts[code] else None,
            )
            for code in self._largest(self._total_ns, is_copy & (self._counts > 0))
        )

    def runtime_calls(self) -> tuple[RuntimeCalls, ...]:
        """Return the calls into the devices' runtimes and drivers."""
        states = {code: self._call(code) for code in np.flatnonzero(self._counts).tolist()}
        used = np.zeros(len(self._counts), dtype=bool)
        used[[code for code, state in states.items() if state is not None]] = True
        return tuple(
            RuntimeCalls(
                name=self._tables.names[code],
                state=states[code] or "",
                count=int(self._counts[code]),
                total_us=_us(self._total_ns[code]),
                max_us=_us(self._max_ns[code]),
            )
            for code in self._largest(self._total_ns, used)
        )

    def graph_launches(self) -> int:
        """Return how many captured graphs of kernels were launched."""
        return sum(call.count for call in self.runtime_calls() if call.name.startswith(_GRAPH_LAUNCHES))

    def kernel_durations(self) -> tuple[DurationBin, ...]:
        """Return how long kernels took, without copies and fills."""
        return tuple(
            DurationBin(
                from_us=(2**exponent if exponent else 0) / _NS_PER_US,
                to_us=2 ** (exponent + 1) / _NS_PER_US,
                count=count,
                total_us=total_ns / _NS_PER_US,
            )
            for exponent, (count, total_ns) in enumerate(self._durations.T.tolist())
            if count
        )

    def _call(self, code: int) -> str | None:
        return state_of_call(self._tables.names[code], self._category(code))

    def _category(self, code: int) -> str:
        return self._tables.categories[self._tables.name_category[code]]

    def _largest(self, time_ns: Int, used: NDArray[np.bool_]) -> list[int]:
        """Return the codes of names by time, the largest first, of equal ones by name and category."""
        codes = np.flatnonzero(used)
        times = dict(zip(codes.tolist(), time_ns[codes].tolist(), strict=True))
        return sorted(times, key=lambda code: (-times[code], self._tables.names[code], self._category(code)))


def _summed(name: NDArray[np.integer], time_ns: Int, names: int) -> Int:
    # A float of 64 bits holds 104 days of nanoseconds exactly.
    return np.bincount(name, weights=time_ns, minlength=names).astype(np.int64)


def _share(part: float | np.number, whole: int) -> float:
    return float(part) / whole if whole else 0.0


def _us(time_ns: float | np.number) -> float:
    return int(time_ns) / _NS_PER_US
