"""`profdeck check`: everything about a config that can be known before the job starts."""

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
from profdeck.config.model import Config, RoleConfig
from profdeck.config.schedule import GRAMMAR
from profdeck.config.sources import load_config, parse_setting
from profdeck_traces.base import entry_points
from profdeck_traces.base.errors import ConfigError, MissingLibraryError, ProfdeckError, describe_error, did_you_mean
from profdeck_traces.cli import terminal
from profdeck_traces.cli.terminal import ExitCode

HOSTS = "profdeck.hosts"
"""Entry points that say whether a framework loads profdeck, or raise `ConfigError` with what to do."""


@attrs.frozen
class Check:
    """One thing that was checked."""

    what: str
    detail: str
    """What was found, or what is wrong."""
    code: ExitCode = ExitCode.OK


def command(  # noqa: PLR0913 - the options of the command line
    file: Annotated[Path, typer.Argument(metavar="FILE", help="The config, a YAML or TOML file.")],
    *,
    role: Annotated[str | None, typer.Option(metavar="NAME", help="Check this role only.")] = None,
    settings: SettingsOption = None,
    here: Annotated[bool, typer.Option("--here", help="Check that this machine can record, too.")] = False,
    connect: Annotated[bool, typer.Option("--connect", help="Also check that the targets respond.")] = False,
    measure: Annotated[bool, typer.Option("--measure", hidden=True)] = False,
    host: Annotated[str | None, typer.Option(metavar="NAME", help="Check that this framework loads profdeck.")] = None,
    json: terminal.JsonOption = False,
) -> None:
    """Check a config before the job starts; show what is wrong."""
    if measure:
        raise ConfigError(
            "--measure was removed without a replacement: profdeck no longer predicts the size of captures."
        )
    checks = list(_checks(file, role, settings or (), here=here, connect=connect))
    if host is not None:
        checks.append(_attempt(f"host {host}", _host, host))
    wrong = [check for check in checks if check.code]
    if json:
        listed = [{"what": check.what, "ok": not check.code, "detail": check.detail} for check in checks]
        terminal.print_json({"file": str(file), "ok": not wrong, "checks": listed})
    else:
        _print(file, checks, wrong)
    raise typer.Exit(min((check.code for check in wrong), default=ExitCode.OK))


def _print(file: Path, checks: list[Check], wrong: list[Check]) -> None:
    table = terminal.make_table("", "checked", "")
    for check in checks:
        state = Text("failed", style="red") if check.code else Text("ok", style="green")
        table.add_row(state, check.what, check.detail)
    console = terminal.stdout_console()
    console.print(table)
    console.print(
        f"{terminal.short_path(file)}: {len(checks)} checked, "
        f"{f'{len(wrong)} failed' if wrong else 'nothing is wrong'}."
    )


def _checks(file: Path, role: str | None, texts: Iterable[str], *, here: bool, connect: bool) -> Iterator[Check]:
    settings = {}
    for text in texts:
        try:
            key, settings[key] = parse_setting(text)
        except ConfigError as error:
            yield Check(SETTINGS_SOURCE, str(error), ExitCode.USAGE)
    try:
        config = load_config(file, settings=settings, settings_source=SETTINGS_SOURCE).config
    except ConfigError as error:
        yield Check("config", str(error), ExitCode.USAGE)
        return
    yield Check("config", "its keys and the types of its values")
    yield _attempt("steps", _steps, config)
    yield _attempt("output", _output_directory, config.output)
    for name in config.listeners:
        yield _attempt(f"listeners.{name}", _listener, name, config.listener_options.get(name, {}))
    if role is None and not config.roles:
        yield Check("roles", "There is no role, so nothing would be recorded.", ExitCode.USAGE)
    for name in config.roles if role is None else (role,):
        yield from _role(config, name, here=here)
        if connect and (chosen := config.roles.get(name)) is not None and chosen.targets is not None:
            yield _attempt(f"roles.{name}.targets", _targets, config, name)


def _attempt(what: str, check: Callable[..., str], *arguments: Any) -> Check:
    try:
        return Check(what, check(*arguments))
    except ProfdeckError as error:
        return Check(what, str(error), ExitCode(error.exit_code))
    except Exception as error:  # noqa: BLE001  # plugins run here, and one that fails must not hide other problems
        return Check(what, describe_error(error), ExitCode.PLUGIN)


def _host(name: str) -> str:
    found: str = entry_points.load(HOSTS, name)()
    return found


def _steps(config: Config) -> str:
    first, given = config.steps.after(-1), ", ".join(map(str, config.steps.to_list()))
    if first is None and config.steps.timed:
        return f"{given}: asked for while the job runs"
    if first is None and config.roles and all(map(_is_of_an_engine, config.roles.values())):
        return "none: the engines are asked for captures, or their iterations say when"
    if first is None and config.on_demand:
        return "none: captures are asked for while the job runs"
    if first is None:
        raise ConfigError(
            f"Nothing is selected, so nothing would be recorded. Set steps to a list of {GRAMMAR}; or on_demand: true."
        )
    if config.final_step is not None and first > config.final_step:
        raise ConfigError(f"The first selected step is {first}, but final_step is {config.final_step}.")
    return f"{given}; the first is {first}"


def _is_of_an_engine(role: RoleConfig) -> bool:
    try:
        return issubclass(plugins.load_backend(role.backend), EngineBackend)
    except ProfdeckError:  # said of the role itself
        return False


def _output_directory(output: Path) -> str:
    """Write into the directory, or the nearest one above it that exists, and remove what was written."""
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
    # A manager of its own: the listener must not participate in recordings of this process.
    PluginManager().add_object(name, plugins.load_listener(name, options))
    return "can be loaded"


def _role(config: Config, name: str, *, here: bool) -> Iterator[Check]:
    role, path = config.roles.get(name), f"roles.{name}"
    if role is None:
        hint = f"{did_you_mean(name, config.roles)} It has: {', '.join(config.roles) or 'none'}."
        yield Check(path, f"The config has no such role.{hint}", ExitCode.USAGE)
        return
    ranks = role.ranks if isinstance(role.ranks, str) else ", ".join(map(str, role.ranks))
    yield Check(f"{path}.ranks", ranks)
    try:
        cls = plugins.load_backend(role.backend)
    except ProfdeckError as error:
        yield Check(f"{path}.backend", str(error), ExitCode(error.exit_code))
        return
    library = _attempt(f"{path}.backend", _library, cls)
    options = _attempt(f"{path}.options", _options, config, name)
    yield library
    yield options
    if here and not library.code and not options.code:
        yield _attempt(f"{path} on this machine", _here, config, name)


def _library(cls: type[Backend]) -> str:
    try:
        plugins.require_libraries(cls)
    except MissingLibraryError:
        if not issubclass(cls, EngineBackend):
            raise
        return f"{cls.name}, for servers: its engine is not installed here"
    found = [" ".join(library.installed() or ()) for library in cls.libraries]
    return f"{cls.name}, with {', '.join(found)}" if found else cls.name


def _options(config: Config, name: str) -> str:
    build_backend(config, name)
    role = config.roles[name]
    given = ", ".join(role.options) or "all at their defaults"
    if role.targets is not None and "auth" in role.options:
        return f"{given}; auth counts for servers that load this config, not for the job that asks them"
    return given


def _here(config: Config, name: str) -> str:
    backend = build_backend(config, name)
    identity = resolve_identity(name, backend)
    if identity.world_size > 1 and not config.roles[name].expected_ranks(identity.world_size):
        raise ConfigError(f"None of its ranks is in this job, whose ranks are 0 to {identity.world_size - 1}.")
    run_preflight(backend)
    return "can record"


def _targets(config: Config, name: str) -> str:
    """Connect to the targets as a capture would, and return the number of targets that respond."""
    from profdeck.replicas.reachability import reach_all

    backend, targets = build_backend(config, name), config.roles[name].targets
    assert isinstance(backend, EngineBackend)  # noqa: S101  # others have no targets
    assert targets is not None  # noqa: S101  # the caller has looked
    found = asyncio.run(reach_all(type(backend), backend.options, targets))
    silent = [f"{target.handle}: {describe_error(error)}" for target, error in found if error is not None]
    if silent:
        raise CaptureError(f"{len(silent)} of {len(found)} cannot be reached. {' '.join(silent)}")
    return f"{len(found)} of {len(found)} answer"
