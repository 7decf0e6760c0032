"""`profdeck plugins`: the installed plugins of every kind, their hooks and their options."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Annotated, Any, cast

import attrs
import typer
from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from profdeck.backends.api import Backend, Library
from profdeck.backends.backend_setup import supported_options
from profdeck.backends.plugin_manager import PluginManager
from profdeck.backends.plugins import (
    BACKENDS,
    LISTENERS,
    Implementation,
    check_backend,
    check_hooks,
    listener_options,
    load_backend,
    load_listener,
    require_libraries,
)
from profdeck.base.launchers import LAUNCHERS, Launcher
from profdeck.cli._commands import COMMANDS, is_built_in
from profdeck.cli.check import HOSTS
from profdeck.config.options import COMMON_OPTIONS, OptionDoc, describe, json_schema
from profdeck.engine.clusters import CLUSTERS, Cluster
from profdeck.on_demand.stores import GROUP as STORES
from profdeck_traces.base import entry_points
from profdeck_traces.base.entry_points import TRACE_NAMES
from profdeck_traces.base.errors import PluginError, UnknownPluginError, describe_error, did_you_mean
from profdeck_traces.cli import terminal
from profdeck_traces.inputs.artifact_kinds import ARTIFACT_KINDS

GROUPS = {
    "backend": BACKENDS,
    "listener": LISTENERS,
    "command": COMMANDS,
    "artifact kind": ARTIFACT_KINDS,
    "cluster": CLUSTERS,
    "host": HOSTS,
    "launcher": LAUNCHERS,
    "store": STORES,
    "trace names": TRACE_NAMES,
}
"""Entry-point groups by kind of plugin."""
CLASSES: dict[str, type] = {"cluster": Cluster, "launcher": Launcher}
"""Required classes of the entry-point objects, by kind of plugin."""


@attrs.frozen
class InstalledPlugin:
    """An installed plugin, with the results of loading and checking it."""

    kind: str
    name: str
    provider: str
    value: object = None
    """The loaded object; ``None`` if it cannot be loaded."""
    hooks: tuple[Implementation, ...] = ()
    problem: str | None = None
    """Reason why the plugin cannot be used; ``None`` if it is usable."""

    @classmethod
    def load(cls, kind: str, point: EntryPoint) -> InstalledPlugin:
        """Import and check a plugin. Errors are stored in `problem`."""
        provider = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
        plugin = cls(kind, point.name, provider)
        try:
            value = load_backend(point.name) if kind == "backend" else entry_points.load(GROUPS[kind], point.name)
            plugin = attrs.evolve(plugin, value=value)
            if kind in CLASSES:
                entry_points.check_instance(point, value, CLASSES[kind])
            if kind == "backend":
                plugin = attrs.evolve(plugin, hooks=tuple(check_backend(value)))
                require_libraries(value)
            elif kind == "cluster":
                cast("Cluster", value).require(f"The cluster '{point.name}' needs")
            elif kind == "listener":
                # Without calling the constructor, which may need options or a library that is not installed.
                listener = cast("Any", value).__new__(value) if isinstance(value, type) else value
                plugin = attrs.evolve(plugin, hooks=tuple(check_hooks(kind, point.name, listener)))
                options = listener_options(point.name, value)
                if options is None or not _has_required_fields(options):
                    listener = load_listener(point.name, {})
                PluginManager().add_object(point.name, listener)
        except PluginError as error:
            return attrs.evolve(plugin, problem=str(error))
        except Exception as error:  # noqa: BLE001  # a broken plugin must not hide the others
            return attrs.evolve(plugin, problem=f"The {kind} '{point.name}' cannot be loaded: {describe_error(error)}")
        return plugin

    @property
    def libraries(self) -> tuple[Library, ...]:
        """Libraries whose profilers a backend controls; empty for other plugins."""
        return getattr(self.value, "libraries", ()) if self.kind == "backend" else ()

    @property
    def options(self) -> type | None:
        """Options class of a backend or listener; ``None`` if there are no options."""
        options = getattr(self.value, "Options", None) if self.kind in {"backend", "listener"} else None
        return options if isinstance(options, type) and attrs.has(options) else None

    @property
    def unsupported_options(self) -> frozenset[str]:
        """Names of common options that a backend does not support."""
        if self.kind != "backend" or self.value is None:
            return frozenset()
        return COMMON_OPTIONS - supported_options(cast("type[Backend]", self.value))

    @property
    def summary(self) -> str:
        """First line of the docstring of a class or function; empty for other objects."""
        text = self.value.__doc__ if callable(self.value) else None
        return (text or "").strip().partition("\n")[0].replace("``", "`")

    def plain(self) -> dict[str, Any]:
        """Convert to JSON-compatible data."""
        document: dict[str, Any] = {
            "kind": self.kind,
            "name": self.name,
            "provided_by": self.provider,
            "usable": self.problem is None,
            "problem": self.problem,
            "hooks": [{"name": item.hook, "wrapper": item.wraps, "order": _order(item)} for item in self.hooks],
        }
        if self.kind == "backend":
            document["libraries"] = [
                {
                    "names": list(library.names),
                    "supported_versions": library.versions,
                    "installed": " ".join(library.installed() or ()) or None,
                }
                for library in self.libraries
            ]
        return document


def _has_required_fields(options: type) -> bool:
    return any(field.init and field.default is attrs.NOTHING for field in attrs.fields(options))


def command(
    name: Annotated[
        str | None, typer.Argument(metavar="NAME", help="Print the hooks and options of this plugin.")
    ] = None,
    *,
    json: terminal.JsonOption = False,
) -> None:
    """List the installed plugins, or print the options of one."""
    points = [
        (kind, point)
        for kind, group in GROUPS.items()
        for point in entry_points.installed(group).values()
        if not is_built_in(point)
    ]
    names = {point.name for _, point in points}
    if name is not None and name not in names:
        raise UnknownPluginError(f"There is no plugin '{name}'.{did_you_mean(name, names)} List all: profdeck plugins")
    plugins = [InstalledPlugin.load(kind, point) for kind, point in points if name in {None, point.name}]
    if json:
        terminal.print_json({"plugins": [_document(plugin, explain=name is not None) for plugin in plugins]})
    elif name is not None:
        for number, plugin in enumerate(plugins):
            _explain(plugin, first=number == 0)
        if any(plugin.problem for plugin in plugins):
            raise typer.Exit(terminal.ExitCode.PLUGIN)
    else:
        _list(plugins)


def _document(plugin: InstalledPlugin, *, explain: bool) -> dict[str, Any]:
    document = plugin.plain()
    if explain and plugin.options is not None:
        document["options_schema"] = json_schema(plugin.options, plugin.name, omitted=plugin.unsupported_options)
    return document


def _list(plugins: list[InstalledPlugin]) -> None:
    console = terminal.stdout_console()
    if not plugins:
        console.print("No plugins are installed. Reinstall profdeck, which includes plugins.")
        return
    table = terminal.make_table("kind", "name", "provided by", "hooks", "usable")
    for plugin in plugins:
        usable = "no" if plugin.problem else "yes"
        table.add_row(plugin.kind, plugin.name, plugin.provider, Text("\n".join(_hook_texts(plugin))), usable)
    console.print(table)
    for plugin in plugins:
        if plugin.problem:
            console.print(f"{plugin.kind} {plugin.name}: {plugin.problem}")


def _hook_texts(plugin: InstalledPlugin) -> list[str]:
    return [f"{item.hook}{_attributes(item)}" for item in plugin.hooks]


def _attributes(item: Implementation) -> str:
    attributes = ", ".join(filter(None, ["wrapper" if item.wraps else None, _order(item)]))
    return f" ({attributes})" if attributes else ""


def _order(item: Implementation) -> str | None:
    return next((name for name in ("tryfirst", "trylast") if item.options.get(name)), None)


def _explain(plugin: InstalledPlugin, *, first: bool) -> None:
    console = terminal.stdout_console()
    summary = f": {plugin.summary}" if plugin.summary else ""
    if not first:
        console.print()
    console.print(f"{plugin.kind} {plugin.name}{summary}")
    console.print(f"Provided by {plugin.provider}.")
    if plugin.hooks:
        console.print(f"Hooks: {', '.join(_hook_texts(plugin))}.")
    for library in plugin.libraries:
        installed = " ".join(library.installed() or ()) or "not installed"
        console.print(f"Supports {library.names[0]} {library.versions}: {installed}.")
    if plugin.problem:
        terminal.warn(plugin.problem)
    if plugin.options is None:
        return
    common = COMMON_OPTIONS if plugin.kind == "backend" else frozenset()
    docs = [doc for doc in describe(plugin.options) if doc.name not in plugin.unsupported_options]
    _print_options(console, f"Options of {plugin.name}", [doc for doc in docs if doc.name not in common])
    _print_options(console, "Supported common options", [doc for doc in docs if doc.name in common])


def _print_options(console: Console, heading: str, docs: list[OptionDoc]) -> None:
    if docs:
        console.print()
        console.print(heading, style="bold")
    for doc in docs:
        limits = f" ({doc.limits})" if doc.limits else ""
        console.print(f"  {doc.name}: {doc.type}{limits} = {doc.default}")
        console.print(Padding(Text(doc.text.replace("``", "`")), (0, 0, 0, 6), expand=False))
