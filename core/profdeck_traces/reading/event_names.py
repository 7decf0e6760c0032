"""Classification of events by name: runtime calls, collectives on the host, data loading, checkpoints and waits."""

from __future__ import annotations

import functools
import importlib.util
import pkgutil
import re
from enum import Enum
from pathlib import Path


class CallKind(Enum):
    """Purpose of a call into the runtime or driver of a device."""

    STREAM_SYNCHRONISATION = "stream synchronisation"
    EVENT_SYNCHRONISATION = "event synchronisation"
    DEVICE_SYNCHRONISATION = "device synchronisation"
    QUERY = "query"
    """Returns whether device work has finished, without waiting for it."""
    LAUNCH = "launch"
    OPERATOR_EXECUTION = "operator execution"
    """AscendCL call that runs an operator. The launches of its kernels are separate events."""
    COPY = "copy"
    """Copies or fills memory."""
    FREE = "free"
    ALLOCATION = "allocation"
    """Allocates, maps or registers memory, or undoes a mapping or registration."""
    OTHER = "other"


SYNCHRONISATIONS = frozenset(
    {CallKind.STREAM_SYNCHRONISATION, CallKind.EVENT_SYNCHRONISATION, CallKind.DEVICE_SYNCHRONISATION}
)

# Terms used by CUDA, HIP, Level Zero and AscendCL. The first matching pattern wins.
_CALLS = (
    (
        CallKind.STREAM_SYNCHRONISATION,
        re.compile(r"(Stream|CommandQueue|CommandList)\w*[Ss]ynchronize|[Ss]ynchronizeStream"),
    ),
    (CallKind.EVENT_SYNCHRONISATION, re.compile(r"(Event|Fence)\w*[Ss]ynchronize|[Ss]ynchronizeEvent")),
    (CallKind.DEVICE_SYNCHRONISATION, re.compile(r"[Ss]ynchronize")),
    (CallKind.QUERY, re.compile(r"EventQuery|StreamQuery|QueryEventStatus")),
    (CallKind.LAUNCH, re.compile(r"[Ll]aunch")),
    (
        CallKind.OPERATOR_EXECUTION,
        re.compile(r"AscendCL@acl(nn(?!\w*GetWorkspaceSize)|opCompileAndExecute|opExecute)"),
    ),
    (CallKind.COPY, re.compile(r"[Mm]emcpy|[Mm]emset|MemoryCopy|MemoryFill")),
    (CallKind.FREE, re.compile(r"Free")),
    (CallKind.ALLOCATION, re.compile(r"[Mm]alloc|Host(Alloc|Register|Unregister)|Mem(Alloc|Create|Release|Map|Unmap)")),
)
_BACKEND_COLLECTIVE = re.compile(r"(gloo|nccl|mpi|ucc|xccl|hccl):\w+")
_DISPATCHED_COLLECTIVE = re.compile(r"c10d::\w+_$")
# Exclude scheduler functions such as `get_next_batch_to_run`, which choose a batch but do not load it.
_LOADER_NAMES = "data_?load|(?:load|next|fetch|get|read)_?(?:batch|data)(?!_to_run)"
_DATA_LOADING = re.compile(rf"{_LOADER_NAMES}|(?:^|[^a-z])(?:data|fetch|loader|loading)$", re.IGNORECASE)
# Outside torch, match only the function name. The file path would match every function in a loader module.
_LOADER = re.compile(
    rf"enumerate\(DataLoader\)|dataloader.*next|utils/data/\S+: (?:__next__|fetch)$|\(\d+\): \w*(?:{_LOADER_NAMES})",
    re.IGNORECASE,
)
_FILE_READ = re.compile(r"<built-in (?:method read\w* of (?:_io|io)\b|function pread\b)")
_WORKER_WAIT = re.compile(r"torch/utils/data/dataloader\.py\(\d+\): _(?:try_get|get)_data$")
_WORKER_REQUEST = re.compile(r"torch/utils/data/dataloader\.py\(\d+\): _try_put_index$")
_SUBPROCESS = re.compile(r"(?:.*[\\/])?subprocess\.py\(\d+\): ")
_CHECKPOINT = re.compile(
    r"torch/serialization\.py\(\d+\): save|safetensors/\w+\.py\(\d+\): save|distributed/checkpoint|checkpoint.*save|"
    r"save_checkpoint",
    re.IGNORECASE,
)
_TORCH_LOAD = re.compile(r"torch/serialization\.py\(\d+\): load$")
_SAFETENSORS_LOAD = re.compile(r"safetensors/\w+\.py\(\d+\): load\w*$")
_STATE_LOAD = re.compile(r"torch/(?:nn/modules/module|optim/\w+)\.py\(\d+\): load_state_dict$")
_DATASET = re.compile(r"\(\d+\): __(?:getitems?|iter|next)__$")
_STACK_FORMATTING = re.compile(r"(?:.*[\\/])?traceback\.py\(\d+\): format_stack$")
# Unlike the rest of `torch/_dynamo`, `convert_frame.py` runs only if no compiled code matches.
_COMPILATION = re.compile(
    r"torch/_dynamo/convert_frame\.py\(\d+\): \w*(?:__call__|compile|convert)|"
    r"triton/(?:runtime/jit|compiler/compiler)\.py\(\d+\): _?compile|"
    r"\b(?:entire_frame_compile|_compile\.\w+|backend_compile|compile_fx\w*) \(dynamo_timed\)"
)
# Tensor formatting in torch, the logging module, experiment trackers, and file writes.
_OUTPUT_FRAME = re.compile(
    r"torch/_tensor_str\.py|(?:^|/)logging/(?:__init__|handlers)\.py|torch/utils/tensorboard/|"
    r"(?:^|/)(?:tensorboardX|wandb|mlflow|swanlab)/|"
    r"<built-in (?:function print|(?:function|method) (?:fsync|fdatasync)\b|method (?:write|writelines|flush) of _io)"
)
_VALIDATION = re.compile(r"(?:^|[^a-z])(?:validat(?:e|ion)|eval(?:uate|uation)?)(?:$|[^a-z])", re.IGNORECASE)
_VALIDATION_FRAME = re.compile(r"\(\d+\): (?:\w*_)?(?:run_)?(?:validate|validation|evaluate)(?:_\w+)?$")
# "Update" alone is ambiguous: update_policy trains, but update_weights sends weights to the servers.
_WEIGHT_SYNC = re.compile(
    r"weights?[^a-z]*(?:sync|updat|transfer|broadcast|reshard|refit)"
    r"|(?:sync|updat|transfer|broadcast|push|reshard|refit)[a-z]*[^a-z]*weight"
    r"|(?:param(?:eter)?s?|policy|model|rollout|engine)[^a-z]*(?:sync|transfer|broadcast|reshard|refit)"
    r"|(?:sync|transfer|broadcast|push|reshard|refit)[a-z]*[^a-z]*(?:param|policy|model|rollout|engine)",
    re.IGNORECASE,
)
_GARBAGE_COLLECTION = re.compile(r"(?:^|[^a-z])gc\.?(?:collect)?(?:$|[^a-z])|garbage", re.IGNORECASE)
# `run_backward` waits for the autograd threads.
_PROFILER_FRAME = re.compile(
    r"(?:.*[\\/])?(?:(?:site|dist)-packages[\\/]profdeck(?:_\w+)?[\\/]|torch[\\/]profiler[\\/]profiler\.py\()"
)
# torch strips the `sys.path` entry, so paths can be relative. Paths in source trees and zip files keep a prefix.
_PROFILER_FILE = re.compile(
    r"(?:.*[\\/](?:core|plugins|[^\\/]+\.(?:zip|egg|whl|pyz|pex))[\\/]|(?:core|plugins)[\\/])?"
    r"(?P<package>profdeck(?:_\w+)?)[\\/](?P<module>\w+)(?:[\\/]|\.py\()"
)
_THREAD_ENTRY = re.compile(r"(?:.*[\\/])?threading\.py\(\d+\): (?:_bootstrap|_bootstrap_inner|run)")
_WAITING_FRAME = re.compile(
    r"run_backward of|built-in method (acquire|__enter__) of .*[lL]ock"
    r"|built-in (function|method) (sleep|poll|select|wait)\b"
    r"|method '(acquire|recv|recv_into|poll|wait)'|selectors\.py|connection\.py.*(wait|_poll|poll|recv)"
    r"|threading\.py\(\d+\): (wait|join)|queue\.py\(\d+\): get|built-in method get of _queue\b|SemLock"
)
# `os.read` reads pipes, for example the output of a child process. Files are read with methods of `_io`.
_EXTERNAL_WAIT = re.compile(
    r"<built-in (?:function (?:waitpid|waitid|wait3|wait4|read)>|method (?:recv\w*|connect|accept|sendall|read) of "
    r"(?:_?socket|_?ssl))"
)
_EVENT_LOOP_WAIT = re.compile(r"select\.(?:epoll|kqueue)\b|selectors\.py")
_SOCKET_CALL = re.compile(r"<built-in method (?:recv\w*|send\w*|connect\w*|read|write) of (?:_?socket|_?ssl)")


def call_kind(name: str) -> CallKind:
    """Return the purpose of a call into a device's runtime or driver."""
    return next((kind for kind, pattern in _CALLS if pattern.search(name)), CallKind.OTHER)


def is_backend_collective(name: str) -> bool:
    """Return whether an annotation is a collective of a torch.distributed backend, such as ``gloo:all_reduce``."""
    return _BACKEND_COLLECTIVE.match(name) is not None


def is_host_collective(name: str) -> bool:
    """Return whether a host event is a collective, either a dispatched operator or a backend annotation."""
    return is_backend_collective(name) or _DISPATCHED_COLLECTIVE.match(name) is not None


def is_data_loading(name: str) -> bool:
    """Return whether an annotation, stage or operator loads data."""
    return _DATA_LOADING.search(name) is not None


def is_loader(name: str) -> bool:
    """Return whether an operator, an annotation or a Python frame loads the next batch or waits for it."""
    return _LOADER.search(name) is not None


def is_file_read(name: str) -> bool:
    """Return whether a Python frame reads a file."""
    return _FILE_READ.search(name) is not None


def is_worker_wait(name: str) -> bool:
    """Return whether a Python frame is the function that awaits and unpickles a batch from a DataLoader worker."""
    return _WORKER_WAIT.match(name) is not None


def is_worker_request(name: str) -> bool:
    """Return whether a Python frame sends the next indices to a DataLoader worker."""
    return _WORKER_REQUEST.match(name) is not None


def is_unpickling(name: str) -> bool:
    """Return whether a Python frame is a call to ``pickle.loads``."""
    return name == "<built-in function loads>"


def is_subprocess_frame(name: str) -> bool:
    """Return whether a Python frame is a function of the subprocess module."""
    return _SUBPROCESS.match(name) is not None


def is_checkpoint(name: str) -> bool:
    """Return whether an annotation or a Python frame saves a checkpoint."""
    return _CHECKPOINT.search(name) is not None


def is_checkpoint_load(name: str) -> bool:
    """Return whether a Python frame loads a file that `torch.save` or safetensors wrote."""
    return _TORCH_LOAD.search(name) is not None or is_safetensors_load(name)


def is_safetensors_load(name: str) -> bool:
    """Return whether a Python frame loads a file that safetensors wrote."""
    return _SAFETENSORS_LOAD.search(name) is not None


def is_state_load(name: str) -> bool:
    """Return whether a Python frame copies a state dict into a module or an optimizer."""
    return _STATE_LOAD.search(name) is not None


def is_dataset_frame(name: str) -> bool:
    """Return whether a Python frame is a data set method, such as `__getitem__`, that returns samples."""
    return _DATASET.search(name) is not None


def is_stack_formatting(name: str) -> bool:
    """Return whether a Python frame is `format_stack` of torch.fx or of the standard library."""
    return _STACK_FORMATTING.match(name) is not None


def is_compilation(name: str) -> bool:
    """Return whether an annotation or a Python frame compiles code with torch.compile or Triton."""
    return _COMPILATION.search(name) is not None


def is_output_frame(name: str) -> bool:
    """Return whether a Python frame formats tensors, logs, prints or writes a file."""
    return _OUTPUT_FRAME.search(name) is not None


def is_validation(name: str) -> bool:
    """Return whether an annotation marks a validation pass."""
    return _VALIDATION.search(name) is not None


def is_validation_frame(name: str) -> bool:
    """Return whether a Python frame is a function that runs a validation pass."""
    return _VALIDATION_FRAME.search(name) is not None


def is_weight_sync(name: str) -> bool:
    """Return whether an annotation or stage transfers weights from a trainer to servers."""
    return _WEIGHT_SYNC.search(name) is not None


def is_garbage_collection(name: str) -> bool:
    """Return whether an annotation marks a garbage collection."""
    return _GARBAGE_COLLECTION.search(name) is not None


def is_garbage_collection_frame(name: str) -> bool:
    """Return whether a Python frame is a garbage collection: torch's record of one, or a call to ``gc.collect``."""
    return name.startswith("Python GC") or name == "<built-in function collect>"


def is_profiler_frame(name: str) -> bool:
    """Return whether a frame is a function of profdeck or of ``torch.profiler.profile``."""
    if _PROFILER_FRAME.match(name):
        return True
    file = _PROFILER_FILE.match(name)
    return file is not None and file["module"] in _own_modules(file["package"])


@functools.cache
def _own_modules(package: str) -> frozenset[str]:
    """Return the modules and subpackages of an installed profdeck package, or an empty set for any other package.

    A user's package can have a similar name, such as ``profdeck_job``.
    """
    own = importlib.util.find_spec(__name__.partition(".")[0])
    spec = importlib.util.find_spec(package)
    if own is None or spec is None:
        return frozenset()
    here, *_ = own.submodule_search_locations or [""]
    locations = spec.submodule_search_locations or []
    # In a source tree, plugins are in a directory next to the core's.
    roots = {Path(here).parent, *(Path(here).parents[1] / name for name in ("core", "plugins"))}
    if not any(Path(location).parent in roots for location in locations):
        return frozenset()
    return frozenset(module.name for module in pkgutil.iter_modules(locations)) | {"__init__"}


def is_thread_entry(name: str) -> bool:
    """Return whether a Python frame is a function of `threading` that calls a thread's own function."""
    return _THREAD_ENTRY.fullmatch(name) is not None


def is_waiting_frame(name: str) -> bool:
    """Return whether a Python frame means that its thread is waiting."""
    return _WAITING_FRAME.search(name) is not None


def is_sleep(name: str) -> bool:
    """Return whether a Python frame is a call to ``time.sleep``."""
    return name == "<built-in function sleep>"


def is_event_loop_wait(name: str) -> bool:
    """Return whether a Python frame is an asyncio event loop waiting for events."""
    return _EVENT_LOOP_WAIT.search(name) is not None


def is_external_wait(name: str) -> bool:
    """Return whether a Python frame waits for a child process or a socket."""
    return _EXTERNAL_WAIT.search(name) is not None


def is_pageable_copy(name: str) -> bool:
    """Return whether a copy between the host and a device uses pageable host memory."""
    return "Pageable" in name


def is_socket_call(name: str) -> bool:
    """Return whether a Python frame connects, reads or writes a socket."""
    return _SOCKET_CALL.search(name) is not None
