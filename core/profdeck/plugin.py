"""API for plugins: backends, listeners, stores, launchers, commands and kinds of artifacts.

`profdeck` contains the names that every plugin needs, such as `Backend`, `Capture` and `hookimpl`. `profdeck.engines`
contains the API for engine plugins. Names are imported on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from profdeck.base.lazy import lazy_names

if TYPE_CHECKING:
    from profdeck.backends.building import build_backend as build_backend, run_preflight as run_preflight
    from profdeck.backends.device_recording import (
        CaptureCycles as CaptureCycles,
        CyclePart as CyclePart,
        OneAtATime as OneAtATime,
        recording_metadata as recording_metadata,
    )
    from profdeck.backends.plugins import load_backend as load_backend
    from profdeck.backends.rival_profilers import RivalWatch as RivalWatch
    from profdeck.base.errors import (
        BrokenPluginError as BrokenPluginError,
        CaptureError as CaptureError,
        ConfigError as ConfigError,
        IncompatibleLibraryError as IncompatibleLibraryError,
        LeaseError as LeaseError,
        MissingLibraryError as MissingLibraryError,
        PluginError as PluginError,
        TargetError as TargetError,
        TraceError as TraceError,
        UnknownPluginError as UnknownPluginError,
        describe_error as describe_error,
        did_you_mean as did_you_mean,
        target_error as target_error,
    )
    from profdeck.base.files import (
        directory_size as directory_size,
        file_size as file_size,
        lock_directory as lock_directory,
        replace_file as replace_file,
    )
    from profdeck.base.imports import after_import as after_import
    from profdeck.base.json_files import JsonKind as JsonKind
    from profdeck.base.launchers import Launcher as Launcher, library_identity as library_identity
    from profdeck.base.processes import (
        is_running as is_running,
        process_started as process_started,
        start_detached as start_detached,
    )
    from profdeck.base.progress import Meter as Meter, Progress as Progress
    from profdeck.base.structuring import (
        duration_validator as duration_validator,
        structure as structure,
        unstructure as unstructure,
    )
    from profdeck.cli.kit import (
        SETTINGS_SOURCE as SETTINGS_SOURCE,
        ExitCode as ExitCode,
        JsonOption as JsonOption,
        SettingsOption as SettingsOption,
        make_table as make_table,
        print_json as print_json,
        print_stderr as print_stderr,
        short_path as short_path,
        show_progress as show_progress,
        stdout_console as stdout_console,
    )
    from profdeck.config.model import Config as Config, Mode as Mode, RoleConfig as RoleConfig
    from profdeck.config.schedule import WindowPhase as WindowPhase
    from profdeck.config.sources import (
        ConfigDraft as ConfigDraft,
        load_config as load_config,
        load_draft as load_draft,
        parse_setting as parse_setting,
        settings_environ as settings_environ,
    )
    from profdeck.config.targets import TargetsConfig as TargetsConfig
    from profdeck.lifecycle.last_word import suppress_exit_message as suppress_exit_message
    from profdeck.on_demand.stores import Store as Store
    from profdeck.records.artifact import CLOCK_ANCHOR as CLOCK_ANCHOR, Output as Output
    from profdeck.records.manifest import (
        Manifest as Manifest,
        is_manifest as is_manifest,
        read_manifest as read_manifest,
    )
    from profdeck.records.run_directory import run_name as run_name
    from profdeck.traces.analysis.recorder_model import (
        CommunicationSummary as CommunicationSummary,
        DeviceStepSummary as DeviceStepSummary,
        LinkSummary as LinkSummary,
        RecorderTables as RecorderTables,
    )
    from profdeck.traces.kinds import (
        ArtifactCheck as ArtifactCheck,
        ArtifactKind as ArtifactKind,
        PendingWork as PendingWork,
        StepOnDevice as StepOnDevice,
    )
    from profdeck.traces.parallel import (
        ReportResult as ReportResult,
        TraceFunction as TraceFunction,
        TraceJob as TraceJob,
        TraceResult as TraceResult,
        run_item as run_item,
    )

SECTIONS = {
    "Errors": {
        "base.errors": (
            "BrokenPluginError CaptureError ConfigError IncompatibleLibraryError LeaseError MissingLibraryError "
            "PluginError TargetError TraceError UnknownPluginError describe_error did_you_mean target_error"
        ),
    },
    "Config": {
        "config.model": "Config Mode RoleConfig",
        "config.targets": "TargetsConfig",
        "config.schedule": "WindowPhase",
        "config.sources": "ConfigDraft load_config load_draft parse_setting settings_environ",
        "base.structuring": "duration_validator structure unstructure",
        "records.run_directory": "run_name",
    },
    "Backends": {
        "backends.plugins": "load_backend",
        "backends.building": "build_backend run_preflight",
        "backends.device_recording": "CaptureCycles CyclePart OneAtATime recording_metadata",
        "backends.rival_profilers": "RivalWatch",
        "base.launchers": "Launcher library_identity",
        "base.imports": "after_import",
    },
    "Files and processes": {
        "records.artifact": "CLOCK_ANCHOR Output",
        "records.manifest": "Manifest is_manifest read_manifest",
        "base.files": "directory_size file_size lock_directory replace_file",
        "base.json_files": "JsonKind",
        "base.processes": "is_running process_started start_detached",
        "on_demand.stores": "Store",
    },
    "Artifacts and traces": {
        "traces.kinds": "ArtifactCheck ArtifactKind PendingWork StepOnDevice",
        "traces.analysis.recorder_model": "CommunicationSummary DeviceStepSummary LinkSummary RecorderTables",
        "traces.parallel": "ReportResult TraceFunction TraceJob TraceResult run_item",
        "base.progress": "Meter Progress",
    },
    "Commands": {
        "cli.kit": (
            "ExitCode JsonOption SETTINGS_SOURCE SettingsOption make_table print_json print_stderr short_path "
            "show_progress stdout_console"
        ),
        "lifecycle.last_word": "suppress_exit_message",
    },
}
"""Public names, grouped by topic and by the ``profdeck`` module that defines them."""

__getattr__, __dir__ = lazy_names(globals(), *SECTIONS.values())
