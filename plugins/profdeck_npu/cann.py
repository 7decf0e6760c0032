"""Imports torch_npu, and checks the process for settings that prevent its profiler from recording."""

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

# CANN reads these variables in all releases, torch_npu in some. If one is set, msprof occupies the device's profiler.
_MSPROF_VARIABLES = ("PROFILING_MODE", "PROFILER_SAMPLECONFIG")
# The second variable is the old name of the first. torch_npu reads both.
_DAEMON_VARIABLES = ("MSMONITOR_USE_DAEMON", "KINETO_USE_DAEMON")
_DYNAMIC_VARIABLE = "PROF_CONFIG_PATH"


def load() -> Any:
    """Import torch and torch_npu, and return torch_npu.

    Raises:
        MissingLibraryError: an import failed, for example because CANN is missing.
    """
    autoload = os.environ.get(_AUTOLOAD)
    try:
        # With torch_npu installed, importing torch imports torch_npu and fails with it.
        import torch  # noqa: F401
        import torch_npu
    except (ImportError, OSError, RuntimeError) as error:
        # torch_npu sets this variable during its import. Child processes would inherit it.
        os.environ.pop(_AUTOLOAD, None) if autoload is None else os.environ.update({_AUTOLOAD: autoload})
        reason = diagnose(error) or f"{_first_line(error)}. Check that the versions of torch, torch_npu and CANN match."
        raise MissingLibraryError(f"The backend 'npu' cannot be used in this process: {reason}") from error
    return torch_npu


def diagnose(error: BaseException) -> str | None:
    """Return advice for an import that failed because torch_npu cannot load CANN. Return ``None`` for other errors.

    An import of torch can fail in this way, too, because torch imports torch_npu if it is installed.
    """
    version = LIBRARY.installed()
    text = "".join(traceback.format_exception(error))
    library = re.search(r"(lib\w+\.so[\w.]*): cannot open shared object file", text)
    if version is None or library is None or "torch_npu" not in text:
        return None
    return (
        f"torch_npu {version[1]} is installed, but its dependency {library[1]} of CANN cannot be loaded. On a host "
        f"with an NPU, {_SOURCE}. On other hosts, set {_AUTOLOAD}=0 or uninstall torch_npu so that `import torch` "
        "works, and use another backend."
    )


def _first_line(error: BaseException) -> str:
    while error.__cause__ is not None:
        error = error.__cause__
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")


def check_environment(environ: Mapping[str, str] = os.environ) -> None:
    """Check that no environment variable enables another profiler in this process.

    Raises:
        ConfigError: another profiler is enabled. It would conflict with torch_npu's profiler.
    """
    for name in _MSPROF_VARIABLES:
        if environ.get(name):
            raise ConfigError(
                f"{name}={environ[name]} indicates that msprof profiles this process, so torch_npu's profiler would "
                f"record nothing. Start the job without msprof and unset {name}, or do not use the backend 'npu'."
            )
    if environ.get(_DYNAMIC_VARIABLE):
        raise ConfigError(
            f"{_DYNAMIC_VARIABLE}={environ[_DYNAMIC_VARIABLE]} enables torch_npu's dynamic profiling, which starts its "
            f"own captures. A process supports only one capture at a time. Unset {_DYNAMIC_VARIABLE}, or do not use "
            "the backend 'npu'."
        )
    for name in _DAEMON_VARIABLES:
        if re.fullmatch(r"\s*\+?0*1\s*", environ.get(name, "")):
            raise ConfigError(
                f"{name}={environ[name]} lets the msMonitor daemon start captures in this process. A process supports "
                f"only one capture at a time. Unset {name}, or do not use the backend 'npu'."
            )


def check_msprof() -> None:
    """Check that CANN's program msprof, which reads device data during the analysis, is installed.

    Raises:
        ConfigError: msprof is not on the PATH.
    """
    if shutil.which("msprof") is None:
        raise ConfigError(
            "options.analyse is on, but the analysis requires CANN's program msprof, which is not on the PATH. Either "
            f"{_SOURCE}, or set options.analyse to false and run `profdeck npu analyse` on a host with msprof."
        )


def physical_device(index: int, environ: Mapping[str, str] = os.environ) -> int:
    """Convert a device index of this process to the device number on the host.

    ``ASCEND_RT_VISIBLE_DEVICES`` lists host device numbers. Like torch_npu's ``_parse_visible_devices``, this function
    ignores all text after the first character that is not a digit or comma.
    """
    number_list = re.match(r"[\d,]*", environ.get("ASCEND_RT_VISIBLE_DEVICES", ""))
    visible = [int(number) for number in number_list[0].split(",") if number] if number_list else []
    return visible[index] if index < len(visible) else index
