"""What this process has of torch_npu and CANN, and what would keep torch_npu's profiler from recording in it."""

from __future__ import annotations

import os
import re
import shutil
import traceback
from collections.abc import Mapping
from typing import Any

from profdeck import Library
from profdeck.plugin import ConfigError, MissingLibraryError

LIBRARY = Library(("torch-npu",), ">=2.6,<3")

_AUTOLOAD = "TORCH_DEVICE_BACKEND_AUTOLOAD"
_SOURCE = (
    "source CANN's set_env.sh (often /usr/local/Ascend/ascend-toolkit/set_env.sh) in the shell that starts the job"
)

# Read by torch_npu in some releases and by CANN in all: msprof holds the device's profiler then.
_MSPROF = ("PROFILING_MODE", "PROFILER_SAMPLECONFIG")
# The second is the old name of the first, which is still read.
_DAEMON = ("MSMONITOR_USE_DAEMON", "KINETO_USE_DAEMON")
_DYNAMIC = "PROF_CONFIG_PATH"


def load() -> Any:
    """Import torch and torch_npu, and return torch_npu.

    Raises:
        MissingLibraryError: one of them does not load, as without CANN.
    """
    autoload = os.environ.get(_AUTOLOAD)
    try:
        # With torch_npu installed, importing torch imports torch_npu and fails with it.
        import torch  # noqa: F401
        import torch_npu
    except (ImportError, OSError, RuntimeError) as error:
        # torch_npu sets it while it is imported, and would leave it to child processes.
        os.environ.pop(_AUTOLOAD, None) if autoload is None else os.environ.update({_AUTOLOAD: autoload})
        why = diagnose(error) or f"{_first_line(error)}. Check that the versions of torch, torch_npu and CANN fit."
        raise MissingLibraryError(f"The backend 'npu' cannot be used in this process: {why}") from error
    return torch_npu


def diagnose(error: BaseException) -> str | None:
    """Say what to do about an import that failed because torch_npu finds no CANN; None if it failed otherwise.

    With torch_npu installed that import may be one of torch, which loads all its extensions.
    """
    version = LIBRARY.installed()
    text = "".join(traceback.format_exception(error))
    library = re.search(r"(lib\w+\.so[\w.]*): cannot open shared object file", text)
    if version is None or library is None or "torch_npu" not in text:
        return None
    return (
        f"torch_npu {version[1]} is installed, and CANN's {library[1]}, which it needs, cannot be loaded. Where there "
        f"is an NPU, {_SOURCE}. Elsewhere set {_AUTOLOAD}=0 or uninstall torch_npu, for `import torch` to work, and "
        "choose another backend."
    )


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Refuse a process in which another way of profiling is switched on.

    Raises:
        ConfigError: it is; torch_npu's profiler would record nothing, or be in the way.
    """
    for name in _MSPROF:
        if environ.get(name):
            raise ConfigError(
                f"{name}={environ[name]} says that msprof profiles this process, and torch_npu's profiler records "
                f"nothing then. Start the job without msprof and unset {name}, or choose no backend 'npu'."
            )
    if environ.get(_DYNAMIC):
        raise ConfigError(
            f"{_DYNAMIC}={environ[_DYNAMIC]} switches on torch_npu's dynamic profiling, which starts captures of its "
            f"own, and there can be one at a time. Unset {_DYNAMIC}, or choose no backend 'npu'."
        )
    for name in _DAEMON:
        if re.fullmatch(r"\s*\+?0*1\s*", environ.get(name, "")):
            raise ConfigError(
                f"{name}={environ[name]} lets the msMonitor daemon start captures in this process, and there can be "
                f"one at a time. Unset {name}, or choose no backend 'npu'."
            )


def check_msprof() -> None:
    """Check that CANN's program for the analysis of device data can be found.

    Raises:
        ConfigError: it is not on the PATH.
    """
    if shutil.which("msprof") is None:
        raise ConfigError(
            "options.analyse is on, and the analysis needs CANN's program msprof, which is not on the PATH. Either "
            f"{_SOURCE}, or set options.analyse to false and run `profdeck npu analyse` where msprof is."
        )


def physical_device(index: int, environ: Mapping[str, str] = os.environ) -> int:
    """Return the number that the host gives to the device which this process calls ``index``.

    Source: ``ASCEND_RT_VISIBLE_DEVICES`` lists the host's numbers; all behind another character than digits and commas
    is ignored, as torch_npu's ``_parse_visible_devices`` says.
    """
    listed = re.match(r"[\d,]*", environ.get("ASCEND_RT_VISIBLE_DEVICES", ""))
    visible = [int(number) for number in listed[0].split(",") if number] if listed else []
    return visible[index] if index < len(visible) else index
