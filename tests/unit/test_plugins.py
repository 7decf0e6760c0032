from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import attrs
import pytest

from distributions import install
from profdeck import Backend, Library, Profiler, hookimpl
from profdeck.backends.hook_calls import RoleHooks
from profdeck.backends.plugins import (
    BACKENDS,
    LISTENERS,
    load_backend,
    load_listener,
    require_libraries,
)
from profdeck.base.errors import IncompatibleLibraryError
from profdeck.config.options import describe
from profdeck_traces.base.entry_points import installed, load
from profdeck_traces.base.errors import BrokenPluginError, MissingLibraryError, UnknownPluginError

BACKEND = "from profdeck import Backend, hookimpl\nclass Plugin(Backend):\n  name = 'odd'\n"
HOOKS = f"{BACKEND}  @hookimpl\n  def profile_start(self): pass\n  @hookimpl\n  def profile_stop(self): pass\n"


@pytest.fixture
def install_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Function that installs a distribution with one plugin, given its source code."""

    def install_distribution(group: str, name: str, code: str) -> None:
        module = f"offered_{name}"
        (tmp_path / f"{module}.py").write_text(code)
        install(tmp_path, module, f"[{group}]\n{name} = {module}:Plugin\n", "1.2")
        monkeypatch.syspath_prepend(str(tmp_path))

    yield install_distribution
    for name in [name for name in sys.modules if name.startswith("offered_")]:
        del sys.modules[name]


def test_unknown_name_error_suggests_a_similar_name(tally: ModuleType) -> None:
    with pytest.raises(UnknownPluginError, match=r"There is no backend 'talley'. Did you mean 'tally'\? Installed:"):
        load_backend("talley")
    with pytest.raises(UnknownPluginError, match="There is no listener 'x'"):
        load_listener("x", {})


def test_entry_points_are_read_once_for_each_import_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, calls = metadata.entry_points, list[None]()
    monkeypatch.setattr(metadata, "entry_points", lambda: calls.append(None) or read())
    assert "torch" in installed(BACKENDS)
    assert "ls" in installed("profdeck.commands")
    assert len(calls) == 1
    install(tmp_path, "later", "[profdeck.commands]\nls = later:command\nlater = later:command\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert installed("profdeck.commands")["later"].module == "later"
    assert installed("profdeck.commands")["ls"].module == "profdeck.cli.ls", "profdeck's entry point takes precedence"
    assert len(calls) == 2


def test_import_error_names_the_distribution(install_plugin) -> None:
    install_plugin(BACKENDS, "broken", "import no_such_module")
    with pytest.raises(BrokenPluginError, match=r"'broken' of offered_broken 1.2 fails to import .*no_such_module"):
        load_backend("broken")


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("Plugin = 3", "not a subclass of profdeck.Backend"),
        ("class Plugin: pass", "not a subclass of profdeck.Backend"),
        (
            "from profdeck import Backend\nclass Plugin(Backend): name, Options = 'odd', dict",
            "Options that are not an attrs class",
        ),
        (
            f"{BACKEND}  def profile_start(self, capture): pass",
            r"\(offered_odd.Plugin\) has no implementation of profile_start. Mark a method profile_start with @",
        ),
        (
            f"{BACKEND}  @hookimpl(wrapper=True)\n  def profile_start(self): return (yield)",
            r"no implementation of profile_start \(only a wrapper\)",
        ),
        (f"{BACKEND}  @hookimpl\n  def profile_start(self): pass", "no implementation of profile_stop"),
        (
            "from profdeck import Backend\nclass Plugin(Backend): name = 'other'",
            "The entry point 'odd' and the name of its backend differ: Plugin.name is 'other'",
        ),
        (
            f"{HOOKS}  common_options = ('with_stak',)",
            r"common_options contains 'with_stak', which is not a common option. Did you mean 'with_stack'\?",
        ),
        (
            f"import attrs\n@attrs.frozen\nclass Own: ...\n{BACKEND}  Options = Own",
            "must extend profdeck.CommonOptions: class Own",
        ),
        (f"{BACKEND}  hookspec_version = 99", "built for version 99 of profdeck's hooks; .* supports 1. Install"),
        (
            f"{HOOKS}  @hookimpl\n  def capture_finished(self, manifest): pass",
            "implements capture_finished, which only listeners can",
        ),
    ],
)
def test_invalid_backend_is_rejected(install_plugin, code: str, message: str) -> None:
    install_plugin(BACKENDS, "odd", code)
    with pytest.raises(BrokenPluginError, match=message):
        load_backend("odd")


@attrs.define
class MinimalBackend(Backend):
    name: ClassVar[str] = "plain"

    @hookimpl
    def profile_start(self, capture: object) -> None: ...

    @hookimpl
    def profile_stop(self) -> None: ...


def test_missing_or_incompatible_library_is_named() -> None:
    class MissingLibrary(MinimalBackend):
        libraries = (Library(("no-such-thing", "nor-this"), ">=1"),)

    class UnsupportedVersion(MinimalBackend):
        libraries = (Library(("no-such-thing", "pytest"), "<1"),)

    class SupportedVersion(MinimalBackend):
        libraries = (Library(("pytest",), ">=1"),)

    with pytest.raises(MissingLibraryError, match=r"needs no-such-thing, .* pip install 'profdeck\[plain\]'"):
        require_libraries(MissingLibrary)
    with pytest.raises(
        IncompatibleLibraryError, match=rf"supports pytest <1; version {pytest.__version__} is installed"
    ):
        require_libraries(UnsupportedVersion)
    require_libraries(SupportedVersion)


def test_only_the_requested_plugin_is_imported(install_plugin, tally: ModuleType) -> None:
    install_plugin(BACKENDS, "broken", "import no_such_module")
    assert {"broken", "tally"} <= installed(BACKENDS).keys()
    assert load_backend("tally").name == "tally"


def test_unknown_hook_or_argument_is_rejected() -> None:
    class UnknownHook(MinimalBackend):
        @hookimpl
        def profile_stopp(self, capture: object) -> None: ...

    message = r"'plain' implements 'profile_stopp', which is not a hook of profdeck. Did you mean 'profile_stop'\?"
    with pytest.raises(BrokenPluginError, match=message):
        RoleHooks(UnknownHook)

    class UnknownArgument(MinimalBackend):
        @hookimpl
        def profile_step(self, plugin: object) -> None: ...

    message = r"'plain': profile_step has no argument 'plugin'. Did you mean 'plugin_name'\?"
    with pytest.raises(BrokenPluginError, match=message):
        RoleHooks(UnknownArgument)


def test_listener_that_cannot_be_created_is_named(install_plugin) -> None:
    install_plugin(LISTENERS, "shy", "class Plugin:\n  def __init__(self): raise OSError('no')")
    with pytest.raises(BrokenPluginError, match="'shy' cannot be created: OSError: no"):
        load_listener("shy", {})
    assert isinstance(load(LISTENERS, "shy"), type)


def test_plugin_of_another_kind_is_rejected_with_its_config_key(install_plugin, tally: ModuleType) -> None:
    install_plugin(LISTENERS, "diary", "class Plugin: pass")
    with pytest.raises(UnknownPluginError, match="'diary' is a listener, not a backend. .* config key listeners"):
        load_backend("diary")
    with pytest.raises(UnknownPluginError, match="'tally' is a backend, not a listener. .* key backend of a role"):
        load_listener("tally", {})


class Diary:
    @hookimpl
    def profile_stop(self) -> None: ...


class StaticDiary:
    @staticmethod
    @hookimpl
    def profile_stop() -> None: ...


def test_string_or_class_is_rejected_as_listener(tally: ModuleType) -> None:
    message = "'diary' is a string, not an object .* belong in the config key 'listeners'"
    with pytest.raises(BrokenPluginError, match=message):
        Profiler.register("diary")
    settings = {"steps": [1], "trainer.backend": "tally"}
    with pytest.raises(BrokenPluginError, match=message):
        Profiler.from_config(settings=settings, listeners=["diary"])
    with pytest.raises(BrokenPluginError, match=r"'Diary' is a class, .* Pass Diary\(\) instead of Diary"):
        Profiler.register(Diary)
    Profiler.unregister(Profiler.register(StaticDiary))


def test_options_are_described(tally: ModuleType) -> None:
    options = describe(tally.TallyOptions)
    assert [option.name for option in options[:2]] == ["fail_at", "device"]
    assert {option.name for option in options} >= {"activities", "record_shapes", "max_capture_s"}
    assert all(option.text for option in options)
    by_name = {option.name: option for option in options}
    assert (by_name["record_shapes"].type, by_name["record_shapes"].default) == ("bool", "false")
    assert by_name["activities"].default == "automatic"
    assert by_name["max_capture_s"].default == "1800.0"
