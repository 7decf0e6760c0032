"""API for plugins: backends, listeners, stores, launchers, commands and kinds of artifacts.

`profdeck` contains the names that every plugin needs, such as `Backend`, `Capture` and `hookimpl`. `profdeck.engines`
contains the API for engine plugins. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from profdeck_traces.base.lazy import lazy_names

if TYPE_CHECKING:
    from profdeck.backends.backend_setup import build_backend as build_backend, run_preflight as run_preflight
    from profdeck.backends.device_recording import (
        CaptureCycles as CaptureCycles,
        CyclePart as CyclePart,
        OneAtATime as OneAtATime,
        recording_metadata as recording_metadata,
    )
    from profdeck.backends.plugins import load_backend as load_backend
    from profdeck.backends.rival_profilers import RivalWatch as RivalWatch
    from profdeck.base.errors import (
        CaptureError as CaptureError,
        IncompatibleLibraryError as IncompatibleLibraryError,
        LeaseError as LeaseError,
        TargetError as TargetError,
        target_error as target_error,
    )
    from profdeck.base.imports import after_import as after_import
    from profdeck.base.json_files import JsonKind as JsonKind
    from profdeck.base.launchers import Launcher as Launcher, library_identity as library_identity
    from profdeck.base.processes import (
        is_running as is_running,
        pid_namespace as pid_namespace,
        process_started as process_started,
        start_detached as start_detached,
    )
    from profdeck.cli.options import SETTINGS_SOURCE as SETTINGS_SOURCE, SettingsOption as SettingsOption
    from profdeck.config.model import Config as Config, Mode as Mode, RoleConfig as RoleConfig
    from profdeck.config.schedule import WindowPhase as WindowPhase
    from profdeck.config.sources import (
        ConfigDraft as ConfigDraft,
        load_config as load_config,
        load_draft as load_draft,
        parse_setting as parse_setting,
        settings_environ as settings_environ,
    )
    from profdeck.config.structuring import (
        duration_validator as duration_validator,
        structure as structure,
        unstructure as unstructure,
    )
    from profdeck.config.targets import TargetsConfig as TargetsConfig
    from profdeck.lifecycle.exit_summary import suppress_exit_message as suppress_exit_message
    from profdeck.on_demand.stores import Store as Store
    from profdeck.records.artifact import Output as Output
    from profdeck.records.manifest import (
        Manifest as Manifest,
        is_manifest as is_manifest,
        read_manifest as read_manifest,
    )
    from profdeck.records.run_directory import run_name as run_name
    from profdeck_traces.base.errors import (
        BrokenPluginError as BrokenPluginError,
        ConfigError as ConfigError,
        MissingLibraryError as MissingLibraryError,
        PluginError as PluginError,
        TraceError as TraceError,
        UnknownPluginError as UnknownPluginError,
        describe_error as describe_error,
        did_you_mean as did_you_mean,
    )
    from profdeck_traces.base.files import (
        directory_size as directory_size,
        file_size as file_size,
        lock_directory as lock_directory,
        replace_file as replace_file,
        user_path as user_path,
    )
    from profdeck_traces.cli.terminal import (
        ExitCode as ExitCode,
        JsonOption as JsonOption,
        make_table as make_table,
        print_json as print_json,
        print_line as print_line,
        print_stderr as print_stderr,
        shell_path as shell_path,
        short_path as short_path,
        show_progress as show_progress,
        stdout_console as stdout_console,
    )
    from profdeck_traces.inputs.facts import CLOCK_ANCHOR as CLOCK_ANCHOR

SECTIONS = {
    "Errors": {
        "profdeck.base.errors": "CaptureError IncompatibleLibraryError LeaseError TargetError target_error",
        "profdeck_traces.base.errors": (
            "BrokenPluginError ConfigError MissingLibraryError PluginError TraceError UnknownPluginError "
            "describe_error did_you_mean"
        ),
    },
    "Config": {
        "profdeck.config.model": "Config Mode RoleConfig",
        "profdeck.config.targets": "TargetsConfig",
        "profdeck.config.schedule": "WindowPhase",
        "profdeck.config.sources": "ConfigDraft load_config load_draft parse_setting settings_environ",
        "profdeck.config.structuring": "duration_validator structure unstructure",
        "profdeck.records.run_directory": "run_name",
    },
    "Backends": {
        "profdeck.backends.plugins": "load_backend",
        "profdeck.backends.backend_setup": "build_backend run_preflight",
        "profdeck.backends.device_recording": "CaptureCycles CyclePart OneAtATime recording_metadata",
        "profdeck.backends.rival_profilers": "RivalWatch",
        "profdeck.base.launchers": "Launcher library_identity",
        "profdeck.base.imports": "after_import",
    },
    "Files and processes": {
        "profdeck.records.artifact": "Output",
        "profdeck_traces.inputs.facts": "CLOCK_ANCHOR",
        "profdeck.records.manifest": "Manifest is_manifest read_manifest",
        "profdeck_traces.base.files": "directory_size file_size lock_directory replace_file user_path",
        "profdeck.base.json_files": "JsonKind",
        "profdeck.base.processes": "is_running pid_namespace process_started start_detached",
        "profdeck.on_demand.stores": "Store",
    },
    "Commands": {
        "profdeck.cli.options": "SETTINGS_SOURCE SettingsOption",
        "profdeck_traces.cli.terminal": (
            "ExitCode JsonOption make_table print_json print_line print_stderr shell_path short_path show_progress "
            "stdout_console"
        ),
        "profdeck.lifecycle.exit_summary": "suppress_exit_message",
    },
}
"""Public names, grouped by topic and by the module that defines them."""

__getattr__, __dir__ = lazy_names(globals(), *SECTIONS.values())
