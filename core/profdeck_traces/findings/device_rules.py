"""Rules about what the devices of one rank did, and what they waited for.

Thresholds without a source are ours. Sources: HTA (HolisticTraceAnalysis, idle time and overlap), TraceLens (AMD),
torch-tb-profiler's recommendations, msprof's advisor, the recipes of Nsight Systems (``gpu_gaps``,
``cuda_api_sync``, ``cuda_memcpy_async``).
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from profdeck_traces.account import causes
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.step_patterns import MAX_SMALL_KERNEL_US
from profdeck_traces.analysis.classes import COMMUNICATION
from profdeck_traces.analysis.owner_names import function_text
from profdeck_traces.analysis.step_names import DECODE, ITERATION
from profdeck_traces.attribution.frames import parse_frame
from profdeck_traces.findings.account_rules import explained_us, gain_from, main_place, small_kernels_us
from profdeck_traces.findings.cures import engine_cure
from profdeck_traces.findings.rank_finding import NotJudged, RankFinding, draft, ms, percent
from profdeck_traces.findings.rank_view import RankView
from profdeck_traces.reading.event_names import is_pageable_copy

DECODE_LAUNCH_BOUND = "decode-launch-bound"
HOST_CAUSES = ("launching", "operators", "Python and other host code")
_SINGLE = re.compile(r"sgemm|_f32f32|(?<![a-z\d])fp32|float32|scudnn|simt_s\w*(?:prop|grad)")
_PRODUCTS = ("gemm", "convolution")
_TF32 = re.compile(r"tf32|tensorop_s\d+gemm")
_WITHOUT_TF32 = re.compile(r"\b(?:volta|turing)_|_(?:volta|turing)_")
"""Kernels for devices whose tensor cores support FP16, but not TF32."""
_MIN_BYTES = 1_000
_POINTWISE = ("elementwise", "activation", "copy")


def host_bound(view: RankView) -> Iterator[RankFinding | NotJudged]:
    """The device is idle for more than 15 % of the step, and the host is busy for at least 60 % of that time (HTA idle
    time; TraceLens). Host time that another finding explains does not count.

    This is not judged if most launches have no device work, such as while a graph is being captured.
    """
    if 2 * view.rank.launches_without_work > view.rank.launches:
        yield NotJudged("host-bound", "most launches have no device work, as in the capture of a CUDA graph")
        return
    of_host = sum(view.idle.get(cause, 0.0) for cause in HOST_CAUSES)
    is_host = view.idle_us > 0.15 * view.step_us and of_host >= 0.6 * view.idle_us
    explained = min(explained_us(view), of_host)
    if is_host and of_host - explained > 0.15 * view.step_us:
        main = max(HOST_CAUSES, key=lambda cause: view.idle.get(cause, 0.0))
        yield draft(
            view,
            "host-bound",
            f"The device waits for the host {percent(of_host / view.step_us)} of {view.each} ({ms(of_host)} of "
            f"{ms(view.step_us)}), most of it while the host is {_doing(main)}"
            + (f"; other findings explain {ms(explained)}" if explained > 0.01 * of_host else ""),
            "move this Python code out of the step"
            if main == HOST_CAUSES[2]
            else engine_cure(
                view.rank.engine,
                DECODE_LAUNCH_BOUND,
                "launch fewer kernels: torch.compile(mode='reduce-overhead') captures CUDA graphs",
            ),
            gain_us=of_host - explained,
            time_us=of_host,
        )


def _doing(cause: str) -> str:
    doing = {"launching": "launching kernels", "operators": "in operators", HOST_CAUSES[2]: "in Python code"}
    return doing[cause]


def decode_launch_bound(view: RankView) -> Iterator[RankFinding]:
    """Decode iterations whose device works less than 70 % of their time, without graphs (docs of vLLM, SGLang)."""
    steps = [step for step in view.of_kind(ITERATION, DECODE) if step.device_us is not None]
    if len(steps) < 3 or view.rank.graph_launches != 0:
        return
    total_us = sum(step.duration_us for step in steps)
    device_us = sum(step.device_us or 0.0 for step in steps)
    if device_us < 0.7 * total_us:
        yield draft(
            view,
            DECODE_LAUNCH_BOUND,
            f"In decode iterations, the device is busy {percent(device_us / total_us)} of the time, and no CUDA "
            f"graphs are launched",
            engine_cure(view.rank.engine, DECODE_LAUNCH_BOUND, "let the engine capture CUDA graphs"),
            gain_us=(total_us - device_us) / len(steps),
            step_us=total_us / len(steps),
            evidence=view.evidence(steps[len(steps) // 2]),
        )


def exposed_communication(view: RankView) -> Iterator[RankFinding]:
    """Communication without overlap takes over 10 % of the step (torch-tb-profiler), or compute overlaps less than half
    of the communication although there is enough compute (HTA overlap). Waits that were assigned to other ranks do not
    count.
    """
    communication = view.of_devices("communication_us")
    if not communication:
        return
    overlap = 1 - view.of_devices("exposed_communication_us") / communication
    exposed = view.exposed_communication_us
    stage, line = main_place(view, causes.COMMUNICATION)
    if exposed > 0.1 * view.step_us:
        yield draft(
            view,
            "exposed-communication",
            f"Communication without overlap takes {percent(exposed / view.step_us)} of {view.each} ({ms(exposed)})"
            + (f" in {stage}" if stage else ""),
            _overlap_cure(view),
            gain_us=exposed,
            stage=stage,
            line=line,
        )
    elif overlap < 0.5 and view.of_devices("compute_us") >= communication > view.step_us / 20:
        yield draft(
            view,
            "little-overlap",
            f"Communication ({ms(communication)} {view.per}) overlaps with compute for only {percent(overlap)} of its "
            "time, although there is enough compute",
            _overlap_cure(view),
            gain_us=exposed,
        )


def _overlap_cure(view: RankView) -> str:
    """Return advice on overlapping the most time-consuming collective."""
    names = [of.name.lower().replace("_", "") for of in view.rank.kernels if of.category == COMMUNICATION]
    if names and "allgather" in names[0]:
        return "prefetch the parameters of the next layer, such as with forward_prefetch of FSDP"
    if names and "broadcast" in names[0]:
        return "send the tensors in larger buckets, and while other work runs"
    return "start the communication earlier, such as with a smaller bucket_cap_mb of DDP"


def pageable_copies(view: RankView) -> Iterator[RankFinding]:
    """Report pageable memory copies of several values that take over 0.5 % of the step (nsys cuda_memcpy_async)."""
    copies = [
        copy
        for copy in view.rank.copies
        if is_pageable_copy(copy.name) and (not copy.size_bytes or copy.size_bytes >= _MIN_BYTES * copy.count)
    ]
    total_us = sum(copy.total_us for copy in copies)
    share = view.per_step(total_us) / view.step_us
    if share > 0.005:
        count = sum(copy.count for copy in copies)
        longest = max(copies, key=lambda copy: copy.total_us)
        stage, line = main_place(view, causes.PAGEABLE)
        place = function_text(line) if line and parse_frame(line) else stage
        yield draft(
            view,
            "pageable-copies",
            f"{count:,} copies use pageable memory ({percent(share)} of the time"
            f"{f', most of it in {place}' if place else ''}). They block the host and do not "
            "overlap with other work",
            "copy to pinned memory with non_blocking=True, or copy less often"
            if "-> Pageable" in longest.name
            else "pin the memory: pin_memory=True in the loader, with .to(device, non_blocking=True)",
            gain_us=share * view.step_us,
            stage=stage,
            line=line,
        )


def small_kernels(view: RankView) -> Iterator[RankFinding]:
    """More than 500 kernels, over half of them shorter than 10 us (TraceLens; HTA), not launched by a Python loop."""
    bins = view.rank.kernel_durations
    count = sum(one.count for one in bins)
    # Bins are powers of two: of the one that holds the limit, as many as lie evenly below it.
    below = [min(1.0, max(0.0, (MAX_SMALL_KERNEL_US - one.from_us) / (one.to_us - one.from_us))) for one in bins]
    small = sum(one.count * part for one, part in zip(bins, below, strict=True))
    if count > 500 and small > 0.5 * count and not gain_from(view, causes.LOOP):
        gain_us = small_kernels_us(view)
        if gain_us is None:
            gain_us = view.per_step(sum(one.total_us * part for one, part in zip(bins, below, strict=True)))
        yield draft(
            view,
            "small-kernels",
            f"{percent(small / count)} of the {view.kernel_calls(count)} take less than 10 us",
            "fuse them with torch.compile",
            gain_us=gain_us,
        )


def kernel_mix(view: RankView) -> Iterator[RankFinding]:
    """FP32 matrix products and convolutions, or pointwise work and copies over 25 % of all device work
    (torch-tb-profiler).
    """
    total_us = view.kernel_us
    if not total_us or not view.rank.kernels:
        return
    of_class = {of.category: of.total_us for of in view.rank.categories}
    products = [of for of in view.rank.kernels if of.category in _PRODUCTS]
    products_us = sum(of_class.get(name, 0.0) for name in _PRODUCTS)
    single = sum(of.total_us for of in products if _is_single(of.name.lower()))
    if single > 0.2 * products_us and single > 0.05 * total_us:
        yield draft(
            view,
            "fp32-gemm",
            f"{percent(single / products_us)} of the matrix products and convolutions run in FP32, "
            f"{percent(single / total_us)} of all device work",
            "run the model in FP16: torch.autocast('cuda', torch.float16)"
            if any(_WITHOUT_TF32.search(of.name) for of in products)
            else "allow TF32: torch.set_float32_matmul_precision('high')"
            if any(of.category == "gemm" and _is_single(of.name.lower()) for of in products)
            else "allow TF32: torch.backends.cudnn.allow_tf32 = True",
            gain_us=min(view.per_step(single), _device_path_us(view)) / 2,
        )
    pointwise = sum(of_class.get(name, 0.0) for name in _POINTWISE)
    # Layout copies have a finding with different advice.
    pointwise *= 1 - min(1.0, gain_from(view, causes.LAYOUT) / (view.per_step(pointwise) or 1.0))
    # The advice for small kernels is the same, so do not give it twice.
    if pointwise > 0.25 * total_us and not any(small_kernels(view)):
        yield draft(
            view,
            "pointwise",
            f"Elementwise work and copies take {percent(pointwise / total_us)} of all device work",
            "fuse them with torch.compile",
            gain_us=min(view.per_step(pointwise), _device_path_us(view)),
        )
    unknown = of_class.get("unclassified", 0.0)
    if unknown > 0.1 * total_us:
        yield draft(
            view,
            "unclassified",
            f"{percent(unknown / total_us)} of the device work is in kernels that no rule knows",
            "define their classes in a rules file: --rules FILE",
        )


def _device_path_us(view: RankView) -> float:
    """Return the device's time per step on the critical path. Faster kernels can't save more than this.

    Time outside all events counts, because the host may be waiting for the device. If no launches were recorded, the
    path doesn't include the device, so return the entire step.
    """
    account = view.rank.account
    if account is None or not view.rank.launches:
        return view.step_us
    kinds = ((OwnerKind.from_label(owner.kind), owner.time_us) for owner in account.owners)
    path_us = sum(time_us for kind, time_us in kinds if kind.side == "device" or kind in _MAY_WAIT_FOR_DEVICE)
    return path_us / account.steps


_MAY_WAIT_FOR_DEVICE = frozenset({OwnerKind.BETWEEN, OwnerKind.DEVICE_HELD, OwnerKind.NOT_RECORDED})


def _is_single(name: str) -> bool:
    """Return whether a kernel multiplies in FP32. TF32 kernels don't, although their names contain the type f32."""
    return _SINGLE.search(name) is not None and _TF32.search(name) is None


def slow_cores(view: RankView) -> Iterator[RankFinding]:
    """Over 5 % of the work of an Ascend device on its AI_CPU (msprof's advisor)."""
    share = next((core.share for core in view.rank.cores if core.core == "AI_CPU"), 0.0)
    if share > 0.05:
        yield draft(
            view,
            "ai-cpu",
            f"{percent(share)} of the kernel time is on AI_CPU: these operators have no kernel for the device's cores",
            "change their data type to one that the device's cores support",
            gain_us=share * view.of_devices("busy_us"),
        )


RULES = {
    host_bound: ("host-bound",),
    decode_launch_bound: (DECODE_LAUNCH_BOUND,),
    exposed_communication: ("exposed-communication", "little-overlap"),
    pageable_copies: ("pageable-copies",),
    small_kernels: ("small-kernels",),
    kernel_mix: ("fp32-gemm", "pointwise", "unclassified"),
    slow_cores: ("ai-cpu",),
}
"""Rules, each with the causes that it can report."""
