"""`profdeck backends`: which backends are installed, whether they can be used, and what their options mean."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Annotated, Any

import attrs
import typer
from rich.console import Console
from rich.padding import Padding

from profdeck.backends import plugins
from profdeck.backends.api import Backend, Library
from profdeck.base import entry_points
from profdeck.base.errors import PluginError
from profdeck.cli import kit
from profdeck.config.options import CommonOptions, OptionDoc, describe


@attrs.frozen
class Offer:
    """A backend as a distribution offers it."""

    name: str
    provider: str
    libraries: tuple[Library, ...]
    problem: str | None
    """Why it cannot be used."""

    @classmethod
    def of(cls, point: EntryPoint) -> Offer:
        """Load a backend; one that fails is an offer with a problem."""
        provider = f"{point.dist.name} {point.dist.version}" if point.dist else "unknown"
        libraries: tuple[Library, ...] = ()
        try:
            backend = plugins.load_backend(point.name)
            libraries = backend.libraries
            plugins.require_libraries(backend)
        except PluginError as error:
            return cls(point.name, provider, libraries, str(error))
        return cls(point.name, provider, libraries, None)

    def plain(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "name": self.name,
            "provided_by": self.provider,
            "usable": self.problem is None,
            "problem": self.problem,
            "libraries": [
                {
                    "names": list(library.names),
                    "supported_versions": library.versions,
                    "installed": " ".join(library.installed() or ()) or None,
                }
                for library in self.libraries
            ],
        }


def command(
    name: Annotated[str | None, typer.Argument(metavar="NAME", help="Explain the options of this backend.")] = None,
    *,
    json: kit.Json = False,
) -> None:
    """List the installed backends, or explain the options of one."""
    if name is not None:
        _explain(name, json=json)
        return
    offers = [Offer.of(point) for point in entry_points.installed(plugins.BACKENDS).values()]
    if json:
        kit.print_json({"backends": [offer.plain() for offer in offers]})
        return
    table = kit.table("backend", "provided by", "library", "supported", "usable")
    for offer in offers:
        found = [" ".join(library.installed() or (library.names[0], "missing")) for library in offer.libraries]
        supported = [library.versions for library in offer.libraries]
        usable = "no" if offer.problem else "yes"
        table.add_row(offer.name, offer.provider, "\n".join(found), "\n".join(supported), usable)
    console = kit.stdout()
    if not offers:
        console.print("No backends are installed. profdeck's own come with it: reinstall profdeck.")
        return
    console.print(table)
    for offer in offers:
        if offer.problem:
            console.print(f"{offer.name}: {offer.problem}")


def _explain(name: str, *, json: bool) -> None:
    backend = plugins.load_backend(name)
    offer = Offer.of(entry_points.installed(plugins.BACKENDS)[name])
    common = {doc.name for doc in describe(CommonOptions)}
    docs = describe(backend.Options)
    if json:
        options = [{**attrs.asdict(doc), "common": doc.name in common} for doc in docs]
        kit.print_json({**offer.plain(), "options": options})
        return
    console = kit.stdout()
    console.print(f"{name}: {_first_line(backend)}")
    console.print(f"Provided by {offer.provider}.")
    for library in offer.libraries:
        found = " ".join(library.installed() or ()) or "not installed"
        console.print(f"Supports {library.names[0]} {library.versions}: {found}.")
    if offer.problem:
        kit.warn(offer.problem)
    _print_options(console, f"Options of {name}", [doc for doc in docs if doc.name not in common])
    _print_options(console, "Options of every backend", [doc for doc in docs if doc.name in common])


def _first_line(backend: type[Backend]) -> str:
    return (backend.__doc__ or "").strip().partition("\n")[0]


def _print_options(console: Console, heading: str, docs: list[OptionDoc]) -> None:
    if docs:
        console.print(f"\n{heading}", style="bold")
    for doc in docs:
        console.print(f"  {doc.name}: {doc.type} = {doc.default}")
        console.print(Padding(doc.text.replace("``", "`"), (0, 0, 0, 6), expand=False))
