"""Findings from one rank's account, which attributes critical-path time to causes."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator

import attrs

from profdeck_traces.account import causes
from profdeck_traces.account.borders import RECORDING
from profdeck_traces.account.model import Account, CauseTime
from profdeck_traces.account.owner_kinds import OwnerKind
from profdeck_traces.account.step_patterns import is_compiled_region
from profdeck_traces.analysis.collectives import is_message
from profdeck_traces.analysis.model import StepSummary
from profdeck_traces.analysis.owner_names import function_text
from profdeck_traces.analysis.step_names import ITERATION
from profdeck_traces.attribution.frames import parse_frame
from profdeck_traces.base.text import plural
from profdeck_traces.findings.engine_rules import HOST_BETWEEN
from profdeck_traces.findings.rank_finding import (
    WAITED_FOR_CPU,
    NotJudged,
    RankFinding,
    draft,
    get_function,
    ms,
    percent,
    record_cheaply,
)
from profdeck_traces.findings.rank_view import RankView
from profdeck_traces.reading.event_names import (
    is_checkpoint_load,
    is_event_loop_wait,
    is_external_wait,
    is_safetensors_load,
    is_sleep,
    is_state_load,
)

_FEWEST_STEPS = 3
_MIN_PERIODS = 3
_MIN_CALLS = 1.5
"""With fewer calls per step, there is nothing to overlap."""
_MIN_BURST_IF_BUSY = 20
"""Minimum ratio of a burst to the median, if the recording thread waited for a CPU."""
_WAITS_FOR_BACKWARD = "run_backward"


@attrs.frozen(kw_only=True)
class _Cause:
    """Conditions for a finding, and its text."""

    rule: str
    """Value of `Finding.rule`."""
    condition: str
    """Description for the documentation."""
    min_share: float
    """Minimum gain, as a fraction of the step."""
    min_calls: int = 0
    """Minimum number of calls per step."""
    subject: Callable[[CauseTime, str], str]
    """Returns the start of the text. The second argument is the result of `_calls`."""
    cure: Callable[[CauseTime, float], str]
    """Returns the suggested action. The second argument is the number of calls per step."""
    is_certain: bool = False
    """True if the trace records the cause directly."""
    needs_stacks: bool = False
    """True if the cause is only visible in Python stacks."""
    runs_operators: bool = False
    """True if all of the cause's time can be inside operators, so that a trace without stacks never rules it out."""
    gain_share: float = 1.0
    """Fraction of the gain that the action can save."""
    after_cure: str | None = "without it"
    """Prefix of the sentence about the gain. ``None`` if the gain is too uncertain."""


def _fixed(text: str) -> Callable[..., str]:
    return lambda *_: text


def _name(one: CauseTime) -> str:
    """Return the name of the event with the most time. For a Python frame, return only the function name."""
    frame = parse_frame(one.name or "")
    return frame[2] if frame else (one.name or "").removeprefix("<").removesuffix(">")


def _calls(one: CauseTime, account: Account) -> str:
    """Return the number and the name of the calls per step. If there is less than one per step, count all calls."""
    per_step = one.calls / account.steps
    count = round(per_step) if per_step >= 1 else one.calls
    unit = {RECORDING: "", ITERATION: " per iteration"}.get(account.basis, " per step")
    return f"{plural(count, 'call')} of {_name(one)}{unit if per_step >= 1 else ''}"


def _module(one: CauseTime) -> str:
    return (one.module or "the model").partition(" > ")[0]


def _sleeps(one: CauseTime) -> bool:
    return is_sleep(one.name or "")


def _sleep_cure(calls: float) -> str:
    if calls < _MIN_CALLS:
        return "remove the sleep"
    return "remove the sleeps, or let them overlap: wait concurrently, such as with asyncio.gather"


def _is_load(one: CauseTime) -> bool:
    return is_checkpoint_load(one.name or "")


def _is_event_loop(one: CauseTime) -> bool:
    return is_event_loop_wait(one.name or "")


def _waiting_cure(one: CauseTime, calls: float) -> str:
    if _is_event_loop(one):
        return "await more of these calls concurrently, and start other work before the longest one returns"
    # Calls on other threads may already run concurrently.
    if calls >= _MIN_CALLS and is_external_wait(one.name or ""):
        return "run these calls concurrently, such as in a ThreadPoolExecutor"
    return "run the awaited work in the background, and use its result one step later"


_CAUSES = {
    causes.DATA_LOADING: _Cause(
        rule="data-loading",
        condition="Fetching from a DataLoader, reading files, or a stage named after data, over 5 % "
        "(torch-tb-profiler). With stacks, batches that workers have already loaded do not count.",
        min_share=0.05,
        subject=_fixed("Loading data takes"),
        cure=_fixed("load the next batch in the background, such as with num_workers of DataLoader"),
        is_certain=True,
    ),
    causes.GARBAGE_COLLECTION: _Cause(
        rule="garbage-collection",
        condition="Python's garbage collector, found in torch's records or in stacks, over 1 %.",
        min_share=0.01,
        subject=_fixed("Garbage collection takes"),
        cure=lambda one, _: (
            "remove `gc.collect()` from the loop"
            if "collect>" in (one.name or "")
            else "collect less often: gc.disable() before the loop, and gc.collect() every few hundred steps"
        ),
        is_certain=True,
        needs_stacks=True,
    ),
    causes.CHECKPOINT: _Cause(
        rule="checkpoint",
        condition="Saving checkpoints inside a step, and loading them if a step also does that, over 5 %.",
        min_share=0.05,
        subject=lambda one, _: f"Saving {'and loading ' * _is_load(one)}a checkpoint takes",
        cure=lambda one, _: (
            "pass the weights in memory instead of a file, such as with torch.Tensor.copy_ or a broadcast"
            if _is_load(one)
            else "save in the background: torch.distributed.checkpoint.async_save"
        ),
        is_certain=True,
        needs_stacks=True,
    ),
    causes.CHECKPOINT_LOAD: _Cause(
        rule="checkpoint-load",
        condition="Files that torch.load or safetensors reads inside a step, outside data loaders and data sets, with "
        "the load_state_dict that follows, over 5 %. The steps save no checkpoint.",
        min_share=0.05,
        subject=lambda one, _: (
            "Loading a checkpoint takes"
            if is_state_load(one.name or "")
            else f"Loading files with {'safetensors' if is_safetensors_load(one.name or '') else 'torch.load'} takes"
        ),
        cure=lambda one, _: (
            "load it once, before the loop, and keep it in memory"
            if is_state_load(one.name or "")
            else "load each file once, before the loop, and keep it in memory, or load the next file in the background"
        ),
        is_certain=True,
        needs_stacks=True,
    ),
    causes.ANOMALY_DETECTION: _Cause(
        rule="anomaly-detection",
        condition="Autograd's anomaly detection: the stacks that it formats for each operator, and its NaN checks of "
        "gradients, over 5 %. Without stacks, only the NaN checks.",
        min_share=0.05,
        subject=lambda one, _: (
            "Autograd's anomaly detection takes"
            if one.line
            else "Checking gradients for NaN in autograd's anomaly detection takes"
        ),
        cure=_fixed("turn it off after the NaN is found: torch.autograd.set_detect_anomaly(False)"),
        is_certain=True,
        runs_operators=True,
    ),
    causes.OUTPUT: _Cause(
        rule="output",
        condition="Printing tensors, logging, trackers and writes to files, with the functions around them, over 5 %.",
        min_share=0.05,
        subject=lambda one, _: f"Printing, logging or writing files ({_name(one)}) takes",
        cure=_fixed("log less often, such as every 100 steps"),
        is_certain=True,
        needs_stacks=True,
    ),
    causes.VALIDATION: _Cause(
        rule="validation",
        condition="A stage or function named after validation, inside a step, over 10 %.",
        min_share=0.1,
        subject=_fixed("Validation inside the step takes"),
        cure=_fixed("validate less often"),
        needs_stacks=True,
        runs_operators=True,
    ),
    causes.COMPILATION: _Cause(
        rule="compilation",
        condition="torch.compile or Triton compiles in recorded steps, over 5 %.",
        min_share=0.05,
        subject=_fixed("Compiling takes"),
        cure=_fixed("find the changing input with TORCH_LOGS=recompiles, and mark it with torch._dynamo.mark_dynamic"),
        is_certain=True,
    ),
    causes.ALLOCATION: _Cause(
        rule="allocation",
        condition="Allocating or freeing device memory in the driver, over 2 % (msprof; TraceLens).",
        min_share=0.02,
        subject=lambda _, calls: f"Allocating and freeing device memory ({calls}) takes",
        cure=_fixed("set PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        is_certain=True,
    ),
    causes.INITIALISATION: _Cause(
        rule="initialisation",
        condition="Calls of the driver that take at least 50 ms while the device is idle, such as to create a context "
        "or load kernels, over 5 %.",
        min_share=0.05,
        subject=_fixed("Initialising the device and loading kernels takes"),
        cure=_fixed("run a few steps before the recording, so that it contains no one-time work"),
    ),
    causes.PROFILER: _Cause(
        rule="profiler",
        condition="Overhead that the profiler records, over 5 %.",
        min_share=0.05,
        subject=_fixed("The profiler's own work takes"),
        cure=_fixed("record fewer activities, or compare times only with those of other recordings"),
        is_certain=True,
    ),
    causes.COMMUNICATION: _Cause(
        rule="exposed-communication",
        condition="Collectives without overlap, over 10 % (torch-tb-profiler). Waits assigned to a rank do not count.",
        min_share=0.1,
        subject=lambda one, _: f"Communication without overlap ({_name(one)}) takes",
        cure=lambda one, _: (
            "exchange tensors instead of Python objects, or exchange them less often"
            if _OBJECTS in (one.name or "")
            else "prefetch the parameters of the next layer, such as with forward_prefetch of FSDP"
            if "allgather" in (one.name or "").lower().replace("_", "")
            else "start the communication earlier, such as with a smaller bucket_cap_mb of DDP"
        ),
    ),
    causes.WAITING: _Cause(
        rule="waiting",
        condition="The main thread waits for a thread or process that was not recorded, over 10 %. In an asyncio event "
        "loop, which also waits for short tool calls, over 20 %.",
        min_share=0.1,
        subject=lambda one, _: (
            "Waiting in an event loop takes"
            if _is_event_loop(one)
            else f"Waiting for another thread or process ({_name(one)}) takes"
        ),
        cure=_waiting_cure,
        needs_stacks=True,
    ),
    causes.OTHER_THREAD: _Cause(
        rule="lock",
        condition="The main thread waits while another thread runs Python code, such as to acquire a lock, over 5 %. "
        "Also a function that uses no CPU time without a recorded wait, over 20 %: traces do not contain locks "
        "acquired by a `with` statement.",
        min_share=0.05,
        subject=lambda one, _: f"Waiting for another thread, which is in {_name(one)}, takes",
        cure=_fixed("release the lock, or deliver the result, before this function"),
        needs_stacks=True,
    ),
    causes.CONTENTION: _Cause(
        rule="gil-contention",
        condition="Another thread runs Python functions while the main thread also runs Python code, over 20 %. Each "
        "waits for the other, because only one can hold the GIL. Also a function of another thread that is open "
        "during all steps, if the main thread is blocked for over 20 % outside recorded waits and other threads use "
        "the CPU.",
        min_share=0.1,
        subject=_fixed("Python code of another thread, which needs the GIL, overlaps"),
        cure=_fixed("run this function in another process, such as with multiprocessing, to free the GIL"),
        gain_share=0.5,
        after_cure=None,
    ),
    causes.FLOAT64: _Cause(
        rule="float64",
        condition="Operators on float64 tensors, or kernels for float64 matrix products, over 1 %.",
        min_share=0.005,
        subject=lambda one, _: f"Work in float64, most of it in {_name(one)}, takes",
        cure=_fixed(
            "find the float64 tensor, often created from NumPy or a Python list, and convert it to float32"
        ),
        is_certain=True,
        gain_share=0.5,
        after_cure="in float32",
    ),
    causes.SINGLE_VALUES: _Cause(
        rule="single-values",
        condition="Reading at least 16 single values of CPU tensors, as .item() does, over 5 %.",
        min_share=0.05,
        min_calls=16,
        subject=lambda _, calls: f"Reading single values of tensors ({calls}) takes",
        cure=_fixed("read all values at once with .tolist()"),
        is_certain=True,
    ),
    causes.LAYOUT: _Cause(
        rule="layout-copies",
        condition="Copies to another layout, data type or device by one function, or by convolutions, over 10 %.",
        min_share=0.1,
        subject=lambda _, calls: f"Copying tensors to another layout or data type ({calls}) takes",
        cure=lambda one, _: (
            "use channels_last for the model and its input: .to(memory_format=torch.channels_last)"
            if "conv" in (one.name or "").lower()
            else "copy once before the loop, or let the operators read the original layout"
        ),
    ),
    causes.EXPOSED_COPIES: _Cause(
        rule="exposed-copies",
        condition="Copies between the host and a device, from or to pinned memory, for which the device or the host "
        "waits, over 5 %.",
        min_share=0.05,
        subject=_fixed("Copies between the host and the device, without overlap, take"),
        cure=_fixed("copy on a separate stream with non_blocking=True while kernels run, and wait just before the use"),
    ),
    causes.NEW_BUFFERS: _Cause(
        rule="new-buffers",
        condition="Allocating tensors and filling them with one value in one function, over 10 %.",
        min_share=0.1,
        subject=lambda _, calls: f"Allocating and filling new tensors ({calls}) takes",
        cure=_fixed("allocate the tensor once and reuse it, or use torch.empty if all of it is overwritten"),
    ),
    causes.DEEP_COPY: _Cause(
        rule="deep-copies",
        condition="copy.deepcopy, over 5 %.",
        min_share=0.05,
        subject=_fixed("Copying objects with copy.deepcopy takes"),
        cure=_fixed("copy less often, or only the tensors that change, in place with torch.Tensor.copy_"),
        is_certain=True,
        needs_stacks=True,
        runs_operators=True,
    ),
    causes.UNPICKLING: _Cause(
        rule="unpickling",
        condition="Unpickling batches from DataLoader workers, over 10 %.",
        min_share=0.1,
        subject=_fixed("Unpickling batches from DataLoader workers takes"),
        cure=_fixed("return tensors from the workers, not Python objects"),
        is_certain=True,
        needs_stacks=True,
    ),
    causes.LOOP: _Cause(
        rule="small-operators",
        condition="One call of a function runs the same operator of less than 100 us at least 64 times, over 5 %. "
        "Without stacks, a stage or step runs it 512 times.",
        min_share=0.05,
        subject=lambda one, calls: (
            f"{'A Python loop over' if one.line else 'Running'} small operators ({calls}) takes"
        ),
        cure=lambda one, _: (
            "replace the loop with one operator on the entire tensor, or on all tensors with torch._foreach_*"
            if one.line
            else "fuse them with torch.compile"
        ),
    ),
    causes.SMALL_BATCHES: _Cause(
        rule="small-batches",
        condition="A function calls a model at least 64 times in a step, and operators shorter than 100 us take half "
        "of the model's time or more, over 10 %.",
        min_share=0.1,
        subject=lambda _, calls: f"Calling a model many times, with small operators ({calls}), takes",
        cure=_fixed("pass more inputs in each call, such as all sequences together"),
        needs_stacks=True,
        runs_operators=True,
    ),
    causes.PYTHON_CODE: _Cause(
        rule="python-code",
        condition="Python code that runs no operator, over 10 %.",
        min_share=0.1,
        subject=lambda one, _: "Sleeping (time.sleep) takes" if _sleeps(one) else "Python code without operators takes",
        cure=lambda one, calls: (
            _sleep_cure(calls) if _sleeps(one) else "vectorize this Python code, or move it out of the step"
        ),
        needs_stacks=True,
    ),
    causes.GRAPH_BREAKS: _Cause(
        rule="graph-breaks",
        condition="Code of a compiled function that runs outside of its at least four compiled regions, over 5 %.",
        min_share=0.05,
        subject=_fixed("Python code between the compiled regions of a torch.compile function takes"),
        cure=_fixed("find the graph breaks with TORCH_LOGS=graph_breaks, and remove them"),
    ),
    causes.REPEATED: _Cause(
        rule="duplicated-work",
        condition="A model runs the same operators twice in one stage, and one of the runs has no backward pass, over "
        "5 %.",
        min_share=0.05,
        subject=lambda one, _: f"Running {_module(one)} again, with the same operators but no backward pass, takes",
        cure=_fixed("if the input is the same, run the model once and reuse its output"),
    ),
    causes.SYNCHRONISATION: _Cause(
        rule="synchronisation",
        condition="Waits of the host for the device, whose removal saves over 5 % (nsys cuda_api_sync).",
        min_share=0.05,
        subject=lambda _, calls: f"Waiting for the device ({calls}) takes the host",
        cure=_fixed("read values of tensors, as .item() does, only once in many steps"),
        is_certain=True,
    ),
}  # fmt: skip
_SMALL_COLLECTIVES = attrs.evolve(
    _CAUSES[causes.COMMUNICATION],
    rule="small-collectives",
    subject=lambda _, calls: f"Communication without overlap ({calls}) takes",
    cure=lambda one, _: (
        "remove the barriers: collectives already wait for all ranks"
        if "barrier" in (one.name or "").lower()
        else "combine them, for example by flattening the tensors into one"
    ),
)
"""At least `_MIN_COLLECTIVES` communication calls per step, each shorter than `_MAX_SMALL_COLLECTIVE_US`."""
_MESSAGES = attrs.evolve(
    _CAUSES[causes.COMMUNICATION],
    rule="pipeline-bubble",
    subject=lambda one, _: f"Sends and receives ({_name(one)}) take",
    cure=_fixed("use more microbatches per step, or balance the pipeline stages"),
)
_OBJECTS = "_object"
"""Substring in the names of collectives that pickle Python objects."""
_MIN_COLLECTIVES, _MAX_SMALL_COLLECTIVE_US = 20, 5_000
_WITHOUT_DEVICE = frozenset({causes.COMMUNICATION, causes.SINGLE_VALUES})
"""Causes to skip if a device was recorded, because device rules or the synchronisation cause are more precise."""
_MIN_EVENT_LOOP = 0.2
_EVERYWHERE = frozenset({causes.PROFILER, causes.ANOMALY_DETECTION})
"""Causes that are spread over many functions."""
_ON_DEVICE = frozenset({causes.FLOAT64, causes.LAYOUT, causes.REPEATED, causes.EXPOSED_COPIES})
RULES_OF_CAUSES = tuple(sorted({cause.rule for cause in _CAUSES.values()}))


def account_causes(view: RankView) -> Iterator[RankFinding | NotJudged]:
    """Yield a finding for each cause in the account with a sufficient gain, and the causes that cannot be judged."""
    account = view.rank.account
    if account is None:
        yield from (NotJudged(rule, "the host was not recorded") for rule in ALL_CAUSES)
        return
    blocked = _blocked(view, account)
    for one, cause in _found(view, account):
        if blocked is not None and one == blocked[0]:
            continue
        if one.cause == causes.PROFILER and view.slowdown is not None:
            continue  # `run_rules.slow_recording` reports the measured slowdown
        # Without devices, this time includes waits for ranks that themselves wait for a CPU.
        step_us = account.time_us / account.steps
        is_unknown = one.cause == causes.COMMUNICATION and view.is_due_to_cpu_waits(
            _gain_us(view, account, one, cause), cause.min_share, step_us
        )
        yield NotJudged(cause.rule, WAITED_FOR_CPU) if is_unknown else _finding(view, account, one, cause)
    yield from _unexplained(view, account)
    if blocked is not None:
        yield blocked[1]
    yield from _outside_operators(view, account)
    yield from _not_judged(view, account)


def gain_from(view: RankView, cause: str) -> float:
    """Return the gain per step from removing a cause, or 0 if the cause has no finding."""
    account = view.rank.account
    if account is None:
        return 0.0
    return sum(_gain_us(view, account, *of) for of in _found(view, account) if of[0].cause == cause)


def small_kernels_us(view: RankView) -> float | None:
    """Return the gain per step from removing small kernels and their launches, or ``None`` if it is unknown.

    Exclude kernels in graphs.
    """
    account = view.rank.account
    gains = [one.gain_us or 0.0 for one in account.causes if one.cause == causes.SMALL] if account else []
    is_known = any(gains) or (not gains and bool(view.rank.graph_launches))
    return sum(gains) / account.steps if account and is_known else None


def main_place(view: RankView, cause: str) -> tuple[str | None, str | None]:
    """Return the stage and the line where a cause takes the most time. Each is ``None`` if unknown."""
    account = view.rank.account
    of_cause = (one for one in account.causes if one.cause == cause) if account else iter(())
    return next(((one.annotation, one.line) for one in of_cause), (None, None))


def explains_step(view: RankView, account: Account, step: int) -> bool:
    """Return whether a cause with a finding accounts for at least half of a step's excess over the median.

    Args:
        view: Rank that ran the step.
        account: Account of the rank.
        step: Index of the step.
    """
    if step >= len(account.step_us):
        return False
    excess_us = account.step_us[step] - statistics.median(account.step_us)
    return any(
        one.steps_us[step] - statistics.median(one.steps_us) >= excess_us / 2
        for one, _ in _found(view, account)
        if one.steps_us
    )


def _found(view: RankView, account: Account, without: str | None = None) -> Iterator[tuple[CauseTime, _Cause]]:
    """Yield the causes whose gain exceeds their minimum, except `without`."""
    for one in account.causes:
        cause = _cause_of(one, account)
        has_device = view.rank.devices or view.rank.launches
        if cause is None or one.cause == without or _is_backward(one) or (has_device and one.cause in _WITHOUT_DEVICE):
            continue
        if one.cause == causes.WAITING and view.is_engine:
            continue  # an engine waits for requests and clients, which the rules about engines judge
        if one.calls < cause.min_calls * account.steps:
            continue
        # One synchronisation per iteration is normal: an engine has to read the sampled tokens.
        if account.basis == ITERATION and one.cause == causes.SYNCHRONISATION and one.calls <= account.steps:
            continue
        if _gain_us(view, account, one, cause) > _min_share(one, cause) * account.time_us / account.steps:
            yield one, cause


def _cause_of(one: CauseTime, account: Account) -> _Cause | None:
    if one.cause == causes.COMMUNICATION and is_message(_name(one)):
        return _MESSAGES
    is_small = one.time_us < _MAX_SMALL_COLLECTIVE_US * one.calls
    if one.cause == causes.COMMUNICATION and is_small and one.calls >= _MIN_COLLECTIVES * account.steps:
        return _SMALL_COLLECTIVES
    return _CAUSES.get(one.cause)


def _min_share(one: CauseTime, cause: _Cause) -> float:
    is_event_loop = one.cause == causes.WAITING and _is_event_loop(one)
    return _MIN_EVENT_LOOP if is_event_loop else cause.min_share


def _gain_us(view: RankView, account: Account, one: CauseTime, cause: _Cause) -> float:
    """Return the gain per step, or the time per step if the gain is unknown.

    If a device was recorded, a cause on the host can save at most the device's idle time.
    """
    gain_us = one.time_us if one.gain_us is None else one.gain_us
    gain_us = max(0.0, gain_us) * cause.gain_share / account.steps
    # Until the first initialisation ends, the device has no work, so this time doesn't count as idle.
    if not view.rank.devices or one.cause in _ON_DEVICE or one.cause == causes.INITIALISATION:
        return gain_us
    if one.cause == causes.ALLOCATION:
        return min(gain_us, view.idle.get("allocating", 0.0))
    if one.cause == causes.SYNCHRONISATION:
        # Some of the idle time after a synchronisation is due to the other causes.
        return min(gain_us, max(0.0, _idle_us(view, account) - _found_us(view, account)))
    return min(gain_us, _idle_us(view, account))


def _idle_us(view: RankView, account: Account) -> float:
    """Return the device idle time in each step of the account, including before the step's first device work."""
    return max(0.0, account.time_us / account.steps - view.of_devices("busy_us"))


def _found_us(view: RankView, account: Account) -> float:
    """Return the total gain per step from all causes except synchronisations."""
    return sum(
        _gain_us(view, account, one, cause) for one, cause in _found(view, account, without=causes.SYNCHRONISATION)
    )


def explained_us(view: RankView) -> float:
    """Return the device idle time per step that the findings of `account_causes` explain."""
    account = view.rank.account
    return 0.0 if account is None else sum(_gain_us(view, account, *found) for found in _found(view, account))


def _is_backward(one: CauseTime) -> bool:
    """Return whether a cause is the wait for the backward pass, whose threads were only partly recorded."""
    return one.cause == causes.WAITING and _WAITS_FOR_BACKWARD in (one.name or "")


def _finding(view: RankView, account: Account, one: CauseTime, cause: _Cause) -> RankFinding:
    step_us, steps = account.time_us / account.steps, account.steps
    time_us, gain_us = one.time_us / steps, _gain_us(view, account, one, cause)
    bursts = _bursts(one, is_busy=bool(view.cpu_wait_share))
    subject = cause.subject(one, _calls(one, account))
    if bursts:
        text = f"{subject} {_burst_text(view, one, bursts)}{_where(one)}"
    else:
        where = "" if one.cause in _EVERYWHERE else _where(one)
        text = f"{subject} {percent(time_us / step_us)} of {_each(account)} ({ms(time_us)}){where}"
    if gain_us < _ALMOST_ALL * time_us and cause.after_cure:
        is_limited = gain_us < _ALMOST_ALL * cause.gain_share * time_us
        limit = None if one.next_limit is None else OwnerKind.from_label(one.next_limit)
        limited = f", limited by {limit.with_side}" if is_limited and limit not in {None, OwnerKind.BETWEEN} else ""
        about = "" if cause.gain_share == 1 else "about "
        text += f"; {cause.after_cure}, {_each(account)} would be {about}{ms(gain_us)} shorter{limited}"
    period = _period(bursts) if one.cause == causes.DATA_LOADING and _uses_workers(view) else 0
    if period:
        text += f". The delay recurs every {period} steps, which suggests one slow worker"
    slowest = _step(view, max(bursts, key=lambda step: one.steps_us[step])) if bursts else None
    return draft(
        view,
        cause.rule,
        text,
        "find what the slow worker reads, such as its shard"
        if period
        else _cure(view, account, one, cause, is_burst=bool(bursts)),
        gain_us=gain_us,
        time_us=time_us,
        step_us=step_us,
        stage=_stage(one),
        line=None if one.cause == causes.ANOMALY_DETECTION else one.line,
        confidence="high" if cause.is_certain else "medium",
        **({"evidence": view.evidence(slowest), "check": view.show_step(slowest)} if slowest else {}),
    )


def _each(account: Account) -> str:
    return (
        "the recording"
        if account.basis == RECORDING
        else "each iteration"
        if account.basis == ITERATION
        else "each step"
    )


def _where(one: CauseTime) -> str:
    """Return the place as a phrase, such as `` in train_step (train.py:12)``."""
    if one.line or _stage(one):
        return f" in {function_text(one.line or _stage(one) or '')}"
    return f" in {one.module.rpartition(' > ')[2]}" if one.module else ""


def _stage(one: CauseTime) -> str | None:
    return one.annotation


def _bursts(one: CauseTime, *, is_busy: bool) -> list[int]:
    """Return the indices of the steps with most of the time, or an empty list if it is spread over many steps.

    Waits for a CPU lengthen the same work in some steps, so a cause on a busy machine has bursts only if it takes
    hardly any time in the other steps.
    """
    if len(one.steps_us) < _FEWEST_STEPS:
        return []
    median_us = statistics.median(one.steps_us)
    mean_us = one.time_us / len(one.steps_us)
    factor = _MIN_BURST_IF_BUSY if is_busy else 2
    bursts = [step for step, time_us in enumerate(one.steps_us) if time_us > factor * median_us and time_us > mean_us]
    excess_us = sum(one.steps_us[step] - median_us for step in bursts)
    return bursts if 2 * len(bursts) <= len(one.steps_us) and excess_us >= one.time_us / 2 else []


def _burst_text(view: RankView, one: CauseTime, bursts: list[int]) -> str:
    usual = f"instead of {ms(statistics.median(one.steps_us))}"
    times = sorted(one.steps_us[step] for step in bursts)
    if len(bursts) == 1:
        step = _step(view, bursts[0])
        number = "one step" if step is None or step.step is None else f"step {step.step}"
        return f"{ms(times[0])} in {number} {usual}"
    return f"{ms(statistics.fmean(times))} in {len(bursts)} of {plural(len(one.steps_us), 'step')} {usual}"


def _step(view: RankView, index: int) -> StepSummary | None:
    return view.steps[index] if index < len(view.steps) else None


def _period(bursts: list[int]) -> int:
    """Return the interval between bursts if there are at least three at regular intervals, otherwise 0."""
    distances = {later - step for step, later in itertools.pairwise(bursts)}
    return distances.pop() if len(bursts) >= _MIN_PERIODS and len(distances) == 1 and distances != {1} else 0


def _uses_workers(view: RankView) -> bool:
    return any("_MultiProcessingDataLoaderIter" in mark.name for mark in view.rank.annotations)


def _cure(view: RankView, account: Account, one: CauseTime, cause: _Cause, *, is_burst: bool) -> str:
    if one.cause == causes.DATA_LOADING and _uses_workers(view):
        return (
            "load batches further ahead: raise prefetch_factor of the DataLoader"
            if is_burst
            else "raise num_workers of the DataLoader"
        )
    if one.cause == causes.PROFILER:
        return record_cheaply(view)
    return cause.cure(one, one.calls / account.steps)


def _unexplained(view: RankView, account: Account) -> Iterator[RankFinding]:
    """Yield a finding if the trace shows no cause for over 30 % of the time."""
    time_us = sum(owner.time_us for owner in account.owners if owner.kind in _UNEXPLAINED) / account.steps
    step_us = account.time_us / account.steps
    # If no device was recorded, another finding says so.
    if time_us > _MIN_UNEXPLAINED * step_us and (view.rank.devices or not view.rank.launches):
        yield draft(
            view,
            UNEXPLAINED,
            f"For {percent(time_us / step_us)} of {_each(account)} ({ms(time_us)}), the trace shows no cause: the "
            "device waits for work that was not recorded",
            "record several complete steps, and all processes that use the device",
            time_us=time_us,
            step_us=step_us,
        )


UNEXPLAINED, _MIN_UNEXPLAINED = "unexplained", 0.3
_UNEXPLAINED = frozenset({OwnerKind.DEVICE_HELD.label, OwnerKind.NOT_RECORDED.label})
_RUNNING = frozenset(
    kind.label for kind in (OwnerKind.PYTHON, OwnerKind.BETWEEN, OwnerKind.OPERATOR, OwnerKind.PROFILER)
)
"""Owners whose time can contain waits that were not recorded. Others are waits, or can contain recorded ones."""
_MIN_COVERED = 0.8
_MIN_BLOCKED = 0.2
_ALMOST_ALL = 0.8


def _blocked(view: RankView, account: Account) -> tuple[CauseTime | None, RankFinding] | None:
    """Return a finding if the recording thread is blocked outside recorded waits for over 20 % of the step.

    If a single function explains this time, also return its cause, which the finding replaces. The trace doesn't show
    when a ``with`` statement acquires a lock, so locks are inferred from the thread's CPU time. This requires stacks,
    and that the steps make up most of the recording.
    """
    load = view.rank.host_load
    share = load.blocked_share if load is not None else None
    if load is None or share is None or view.rank.devices or view.is_engine:
        return None
    recorded_us, step_us = load.wall_s * 1e6, account.time_us / account.steps
    if not account.has_stacks or not _MIN_COVERED * recorded_us <= account.time_us <= recorded_us / _MIN_COVERED:
        return None
    waits_us = sum(
        owner.time_us for owner in account.owners if owner.kind not in _RUNNING or (owner.name and is_sleep(owner.name))
    )
    # While another thread is on the path, the main thread waits for it in a recorded call.
    waits_us += sum(one.time_us for one in account.causes if one.cause == causes.OTHER_THREAD)
    most_us = (share * recorded_us - waits_us) / account.steps
    # The thread may have been blocked outside the steps all the time.
    blocked_us = most_us - max(0.0, recorded_us - account.time_us) / account.steps
    if blocked_us <= _MIN_BLOCKED * step_us:
        return None
    code = [one for one in account.causes if one.cause == causes.PYTHON_CODE and not _sleeps(one)]
    main = max(code, key=lambda one: one.time_us, default=None)
    main_us = main.time_us / account.steps if main is not None else 0.0
    if main is not None and _ALMOST_ALL * blocked_us <= main_us <= most_us / _ALMOST_ALL:
        time_us = min(most_us, main_us)
        text = f"Waiting without a recorded call, such as for a lock, takes {percent(time_us / step_us)} of "
        text += f"{_each(account)} ({ms(time_us)}){_where(main)}"
        cure = "find what this function waits for, such as a lock that another thread holds for too long"
        # A replay underestimates the gain, because it keeps the thread order that the lock enforced.
        finding = draft(view, "lock", text, cure, gain_us=time_us, step_us=step_us, stage=_stage(main), line=main.line)
        return main, finding
    functions = [one for one in account.causes if one.cause == causes.OPEN_FUNCTION]
    if functions and (load.others_share or 0.0) >= _ALMOST_ALL * blocked_us / step_us:
        only = functions[0] if len(functions) == 1 else None
        text = f"The main thread is blocked {percent(blocked_us / step_us)} of {_each(account)} ({ms(blocked_us)}), "
        text += "spread over its operators and functions, while other threads of the process use the CPU"
        text += f"; a thread that stays{_where(only)} throughout may be one of them" if only else ""
        finding = draft(
            view,
            "gil-contention",
            text,
            "find the thread that uses the CPU, such as with `py-spy top`, and run its function in another process",
            gain_us=blocked_us,
            step_us=step_us,
            line=only.line if only else None,
        )
        return None, finding
    return None


_WITHOUT_STACKS = ("idle-stage", "outside-operators")
_MIN_OUTSIDE, _MIN_IDLE_STAGE = 0.3, 0.1


def _outside_operators(view: RankView, account: Account) -> Iterator[RankFinding | NotJudged]:
    """Yield findings for time outside operators if stacks were not recorded.

    A stage that exceeds 10 % of the step and is mostly outside operators has its own finding. Other time outside
    operators has one if it exceeds 30 %. On a busy machine, the share of the recording that the recording thread waited
    for a CPU is subtracted from it first.
    """
    if account.has_stacks:
        return
    if view.is_engine and not view.rank.devices:
        yield from (NotJudged(rule, f"{HOST_BETWEEN} compares the iterations of engines") for rule in _WITHOUT_STACKS)
        return
    step_us = account.time_us / account.steps
    between = [one for one in account.causes if one.cause == causes.BETWEEN]
    stages = {stage.name: stage.total_us / view.host_steps for stage in view.stages}
    rest_us = 0.0
    main: CauseTime | None = None
    for one in between:
        time_us = one.time_us / account.steps
        gain_us = time_us if one.gain_us is None else one.gain_us / account.steps
        gain_us = min(gain_us, _idle_us(view, account)) if view.rank.devices else gain_us
        stage_us = stages.get(one.annotation or "", 0.0)
        if stage_us and gain_us > _MIN_IDLE_STAGE * step_us and time_us >= 0.9 * stage_us:
            yield draft(
                view,
                "idle-stage",
                f"{one.annotation} takes {percent(stage_us / step_us)} of {_each(account)} ({ms(stage_us)}), over 90% "
                "of it outside operators",
                get_function(view),
                gain_us=gain_us,
                time_us=time_us,
                step_us=step_us,
                stage=one.annotation,
                key=one.annotation,
            )
        else:
            rest_us += gain_us
            main = main or one
    # If there is a device, the host may be waiting for it in a call that was not recorded.
    if main is None or rest_us <= _MIN_OUTSIDE * step_us or view.rank.devices:
        return
    load = view.rank.host_load
    wait_share = load.cpu_wait_share if load is not None and view.cpu_wait_share else 0.0
    # The trace does not contain the waits for a CPU. Estimate that they are as frequent inside operators as outside.
    own_us = rest_us * (1 - wait_share) if wait_share is not None else 0.0
    if own_us <= _MIN_OUTSIDE * step_us:
        yield NotJudged("outside-operators", f"{WAITED_FOR_CPU}, which is not in the trace")
    else:
        stage = main.annotation if main.annotation and main.time_us / account.steps > rest_us / 2 else None
        yield draft(
            view,
            "outside-operators",
            f"The recorded threads run no operator {percent(rest_us / step_us)} of {_each(account)} ({ms(rest_us)})"
            + (f", most of it in {stage}" if stage else "")
            + (f"; without waits for a CPU, an estimated {ms(own_us)}" if wait_share else ""),
            get_function(view),
            gain_us=own_us,
            time_us=rest_us,
            step_us=step_us,
            stage=stage,
        )


def _not_judged(view: RankView, account: Account) -> Iterator[NotJudged]:
    """Yield the causes that cannot be ruled out because of missing data."""
    yield NotJudged("gil-contention", "traces show only Python functions that start during the recording, not the GIL")
    yield NotJudged("padding", "traces do not contain the values of tensors; log the share of padding in each batch")
    unexplained = sum(one.time_us for one in account.causes if one.cause == causes.BETWEEN) / account.time_us
    if not account.has_stacks:
        for cause in _CAUSES.values():
            if cause.runs_operators:
                yield NotJudged(cause.rule, "stacks were not recorded")
            elif cause.needs_stacks and unexplained > cause.min_share:
                yield NotJudged(
                    cause.rule, f"stacks were not recorded, and {percent(unexplained)} is outside operators"
                )
        if any(is_compiled_region(of.name) for of in (*view.rank.annotations, *view.rank.operators)):
            yield NotJudged("graph-breaks", "stacks were not recorded")
        yield NotJudged("duplicated-work", "stacks were not recorded")
    elif view.is_engine:
        yield NotJudged("waiting", "an engine waits for requests and clients")
    if view.rank.attributed is None or not view.rank.attributed.has_shapes:
        yield NotJudged("float64", "shapes and data types were not recorded")
        if view.rank.devices:
            yield NotJudged("duplicated-work", "shapes were not recorded")
    if not view.rank.devices:
        reason = "no device work was recorded"
        yield from (NotJudged(rule, reason) for rule in ("synchronisation", "allocation"))


ALL_CAUSES = (*RULES_OF_CAUSES, *_WITHOUT_STACKS, UNEXPLAINED, "padding")
RULES = {account_causes: ALL_CAUSES}
"""Rules, with the causes that each one looks for."""


def conditions() -> Iterator[tuple[str, str]]:
    """Yield each cause and its condition, for the documentation."""
    yield from ((cause.rule, cause.condition) for cause in _CAUSES.values())
