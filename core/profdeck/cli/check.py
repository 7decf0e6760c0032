"""`profdeck check`: validates a config before the job starts."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import attrs
import typer
from rich.text import Text

from profdeck.backends import plugins
from profdeck.backends.api import Backend, EngineBackend
from profdeck.backends.backend_setup import build_backend, resolve_identity, run_preflight
from profdeck.backends.plugin_manager import PluginManager
from profdeck.base.errors import CaptureError
from profdeck.cli.options import SETTINGS_SOURCE, SettingsOption
from profdeck.config.model import Config, Mode, RoleConfig
from profdeck.config.schedule import GRAMMAR
from profdeck.config.sources import ConfigDraft, load_draft, parse_setting
from profdeck.config.structuring import structure
from profdeck_traces.base import entry_points
from profdeck_traces.base.errors import ConfigError, MissingLibraryError, ProfdeckError, describe_error, did_you_mean
from profdeck_traces.base.files import user_path
from profdeck_traces.cli import terminal
from profdeck_traces.cli.terminal import ExitCode

HOSTS = "profdeck.hosts"
"""Entry-point group of functions that check whether a framework loads profdeck.

A function returns a description of its result, or raises `ConfigError` with instructions.
"""


@attrs.frozen
class Check:
    """Result of one check."""

    what: str
    """Subject of the check, such as a config key."""
    detail: str
    """Description of the valid value, or error message."""
    code: ExitCode = ExitCode.OK
    """Exit code of the error; `ExitCode.OK` if the check passed."""
    lines: tuple[str, ...] = ()
    """Lines of the error message, with control characters escaped. Printed instead of `detail`."""
    is_warning: bool = False
    """True if the value is valid but probably unintended."""

    @classmethod
    def failed(cls, what: str, error: ProfdeckError) -> Check:
        """Return the result of a check that raised an error."""
        return cls(what, str(error), ExitCode(error.exit_code), tuple(terminal.error_lines(error)))


def command(  # noqa: PLR0913 - the options of the command line
    file: Annotated[Path, typer.Argument(metavar="FILE", parser=user_path, help="The config in YAML or TOML.")],
    *,
    role: Annotated[str | None, typer.Option(metavar="NAME", help="Check only this role.")] = None,
    settings: SettingsOption = None,
    here: Annotated[bool, typer.Option("--here", help="Also check that this machine can record.")] = False,
    connect: Annotated[bool, typer.Option("--connect", help="Also check that the targets respond.")] = False,
    measure: Annotated[bool, typer.Option("--measure", hidden=True)] = False,
    host: Annotated[str | None, typer.Option(metavar="NAME", help="Check that this framework loads profdeck.")] = None,
    json: terminal.JsonOption = False,
) -> None:
    """Check a config before the job starts, and show its problems."""
    if measure:
        raise ConfigError(
            "--measure was removed without a replacement: profdeck no longer predicts the size of captures."
        )
    checks = list(_checks(file, role, settings or (), here=here, connect=connect))
    if host is not None:
        checks.append(_attempt(f"host {host}", _host, host))
    failed = [check for check in checks if check.code]
    if json:
        listed = [
            {"what": check.what, "ok": not check.code, "detail": check.detail, "warning": check.is_warning}
            for check in checks
        ]
        terminal.print_json({"file": str(file), "ok": not failed, "checks": listed})
    else:
        _print(file, checks, failed)
    raise typer.Exit(min((check.code for check in failed), default=ExitCode.OK))


def _print(file: Path, checks: list[Check], failed: list[Check]) -> None:
    table = terminal.make_table("", "checked", "")
    for check in checks:
        state = Text("failed", style="red") if check.code else Text("ok", style="green")
        if check.is_warning:
            state = Text("warning", style="yellow")
        table.add_row(state, check.what, Text("\n".join(check.lines)) if check.lines else check.detail)
    console = terminal.stdout_console()
    console.print(table)
    warnings = sum(check.is_warning for check in checks)
    results = [f"{len(failed)} failed"] if failed else []
    results += [f"{warnings} warning{'s' if warnings > 1 else ''}"] if warnings else []
    console.print(f"{terminal.short_path(file)}: {len(checks)} checked, {', '.join(results) or 'no problems'}.")


def _checks(file: Path, role: str | None, texts: Iterable[str], *, here: bool, connect: bool) -> Iterator[Check]:
    settings = {}
    for text in texts:
        try:
            key, settings[key] = parse_setting(text)
        except ConfigError as error:
            yield Check.failed(SETTINGS_SOURCE, error)
    draft = None
    try:
        draft = load_draft(file, settings=settings, settings_source=SETTINGS_SOURCE)
        config = draft.checked().config
    except ConfigError as error:
        yield Check.failed("config", error)
        yield from _backends(draft, role)
        return
    yield Check("config", "valid keys and types")
    yield _attempt("steps", _steps, config)
    yield _attempt("output", _output_directory, config.output)
    for name in config.listeners:
        yield _attempt(f"listeners.{name}", _listener, name, config.listener_options.get(name, {}))
    if role is None and not config.roles:
        yield Check("roles", "No role is configured, so nothing would be recorded.", ExitCode.USAGE)
    for name in config.roles if role is None else (role,):
        yield from _role(config, name, here=here)
        if connect and (chosen := config.roles.get(name)) is not None and chosen.targets is not None:
            yield _attempt(f"roles.{name}.targets", _targets, config, name)


def _backends(draft: ConfigDraft | None, role: str | None) -> Iterator[Check]:
    """Check the backends and options even if the config has other errors, to report all errors at once."""
    roles = draft.data.get("roles") if draft is not None else None
    for name, section in roles.items() if isinstance(roles, Mapping) else ():
        if role not in {None, name} or not isinstance(section, Mapping):
            continue
        kept = {key: section[key] for key in ("backend", "options") if key in section}
        try:
            config = structure({"roles": {name: kept}}, Config, where="")
        except ConfigError:
            continue  # already reported
        yield from (check for check in _role(config, name, here=False) if check.code)


def _attempt(what: str, check: Callable[..., str], *arguments: Any) -> Check:
    try:
        return Check(what, check(*arguments))
    except ProfdeckError as error:
        return Check.failed(what, error)
    except Exception as error:  # noqa: BLE001  # a failing plugin must not hide other problems
        return Check(what, describe_error(error), ExitCode.PLUGIN)


def _host(name: str) -> str:
    description: str = entry_points.load(HOSTS, name)()
    return description


def _steps(config: Config) -> str:
    first, steps = config.steps.after(-1), ", ".join(map(str, config.steps.to_list()))
    if first is None and config.steps.timed:
        return f"{steps}: captured while the job runs"
    if first is None and config.roles and all(map(_has_engine_backend, config.roles.values())):
        return "none: captures of engines are started on demand or by iteration"
    if first is None and config.on_demand:
        return "none: captures are started on demand while the job runs"
    if first is None:
        raise ConfigError(
            "No step is selected, so nothing would be recorded. Set on_demand: true, or set steps to a list of "
            f"{GRAMMAR}."
        )
    if config.final_step is not None and first > config.final_step:
        raise ConfigError(f"The first selected step is {first}, but final_step is {config.final_step}.")
    return f"{steps}; the first is {first}"


def _has_engine_backend(role: RoleConfig) -> bool:
    try:
        return issubclass(plugins.load_backend(role.backend), EngineBackend)
    except ProfdeckError:  # reported by the check of the role
        return False


def _output_directory(output: Path) -> str:
    """Check that the output directory, or its nearest existing parent, is writable by creating a temporary file."""
    output = output.absolute()
    existing = next(path for path in (output, *output.parents) if path.exists())
    if not existing.is_dir():
        raise ConfigError(f"{existing} is not a directory, so {output} cannot be created. Choose another output.")
    try:
        with tempfile.TemporaryDirectory(prefix=".profdeck-check-", dir=existing) as probe:
            (Path(probe) / "file").write_bytes(b"profdeck")
    except OSError as error:
        raise ConfigError(f"{existing} cannot be written: {error.strerror}. Choose another output.") from None
    return f"{terminal.short_path(output)} can be written" + ("" if existing == output else "; it does not exist yet")


def _listener(name: str, options: Mapping[str, Any]) -> str:
    # Use a separate plugin manager, so that the listener is not called for captures in this process.
    PluginManager().add_object(name, plugins.load_listener(name, options))
    return "can be loaded"


def _role(config: Config, name: str, *, here: bool) -> Iterator[Check]:
    role, path = config.roles.get(name), f"roles.{name}"
    if role is None:
        hint = f"{did_you_mean(name, config.roles)} Its roles: {', '.join(config.roles) or 'none'}."
        yield Check(path, f"The config has no such role.{hint}", ExitCode.USAGE)
        return
    ranks = role.ranks if isinstance(role.ranks, str) else ", ".join(map(str, role.ranks))
    yield Check(f"{path}.ranks", ranks)
    try:
        cls = plugins.load_backend(role.backend)
    except ProfdeckError as error:
        yield Check.failed(f"{path}.backend", error)
        return
    library = _attempt(f"{path}.backend", _library, cls)
    options = _attempt(f"{path}.options", _options, config, name)
    yield library
    yield options
    if not options.code:
        yield from _step_limit(config, name)
    if here and not library.code and not options.code:
        yield _attempt(f"{path} on this machine", _here, config, name)


def _library(cls: type[Backend]) -> str:
    try:
        plugins.require_libraries(cls)
    except MissingLibraryError:
        if not issubclass(cls, EngineBackend):
            raise
        return f"{cls.name}, for servers (its engine is not installed on this host)"
    libraries = [" ".join(library.installed() or ()) for library in cls.libraries]
    return f"{cls.name}, with {', '.join(libraries)}" if libraries else cls.name


def _options(config: Config, name: str) -> str:
    build_backend(config, name)
    role = config.roles[name]
    options = ", ".join(role.options) or "defaults"
    if role.targets is not None and "auth" in role.options:
        return f"{options}; auth applies to servers that load this config, not to the job that captures them"
    return options


def _step_limit(config: Config, name: str) -> Iterator[Check]:
    """Warn if the schedule selects more adjacent steps than a capture may contain."""
    limit = build_backend(config, name).options.max_capture_steps
    if config.mode is Mode.DISCRETE or not config.join_steps:
        return
    long_captures = [f"{timed.count} steps" for timed in config.steps.timed if timed.count > limit]
    for first, last in config.steps.adjacent():
        end = min((step for step in (last, config.final_step) if step is not None), default=None)
        if end is None or end - first >= limit:
            long_captures.append(f"steps {first} to {'the end' if end is None else end}")
    for steps in long_captures:
        yield Check(
            f"roles.{name}.options.max_capture_steps",
            f"The capture of {steps} will be stopped after {limit} steps and marked partial, because a longer trace is "
            "hard to read. Select fewer steps, such as 'every 1000', or increase the limit.",
            is_warning=True,
        )


def _here(config: Config, name: str) -> str:
    backend = build_backend(config, name)
    identity = resolve_identity(name, backend)
    if identity.world_size > 1 and not config.roles[name].expected_ranks(identity.world_size):
        raise ConfigError(
            f"None of the selected ranks is in this job, which has the ranks 0 to {identity.world_size - 1}."
        )
    run_preflight(backend)
    return "can record"


def _targets(config: Config, name: str) -> str:
    """Connect to the targets in the same way as a capture, and describe how many respond."""
    from profdeck.replicas.reachability import reach_all

    backend, targets = build_backend(config, name), config.roles[name].targets
    assert isinstance(backend, EngineBackend)  # noqa: S101  # only engine backends have targets
    assert targets is not None  # noqa: S101  # checked by the caller
    results = asyncio.run(reach_all(type(backend), backend.options, targets))
    errors = [f"{target.handle}: {describe_error(error)}" for target, error in results if error is not None]
    if errors:
        raise CaptureError(f"{len(errors)} of {len(results)} cannot be reached. {' '.join(errors)}")
    return f"{len(results)} of {len(results)} respond"
