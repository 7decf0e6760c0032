from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import attrs
import pytest
from hypothesis import given, strategies as st

from profdeck.backends.backend_setup import build_backend
from profdeck.config.model import TOP_LEVEL_KEYS, Config, Mode, OnError
from profdeck.config.options import CommonOptions
from profdeck.config.sources import load_config, parse_setting
from profdeck.config.structuring import structure, unstructure
from profdeck_traces.base.errors import ConfigError

ROLE = {"backend": "torch"}


def test_complete_config(tmp_path: Path) -> None:
    file = tmp_path / "profdeck.yaml"
    file.write_text(
        """
        output: ./elsewhere
        run: night
        steps: [10, "20..22", "every 500"]
        mode: discrete
        on_error: raise
        final_step: 2000
        listeners: [diary]
        roles:
          trainer:
            backend: torch
            ranks: all
            stages: [actor_update]
            window: {skip_first: 1, wait: 1, warmup: 1, active: 2, repeat: 3}
            options: {record_shapes: true}
          rollout: {backend: vllm, ranks: [0, 8]}
        """
    )
    config = load_config(file, environ={}).config
    assert config.output == Path("elsewhere")
    assert (config.mode, config.on_error, config.final_step) == (Mode.DISCRETE, OnError.RAISE, 2000)
    assert [step for step in range(1001) if step in config.steps] == [10, 20, 21, 22, 500, 1000]
    trainer, rollout = config.roles["trainer"], config.roles["rollout"]
    assert trainer.window is not None
    assert (trainer.window.active, trainer.window.cycle) == (2, 4)
    assert trainer.options == {"record_shapes": True}
    assert (trainer.expected_ranks(3), rollout.expected_ranks(4), rollout.expected_ranks(16)) == (
        (0, 1, 2),
        (0,),
        (0, 8),
    )


def test_home_directory_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "profdeck.yaml").write_text("output: ~/profiles\nsteps: [1]\nroles: {trainer: {backend: torch}}")
    config = load_config(tmp_path / "profdeck.yaml", environ={"PROFDECK__ROLES__TRAINER__TARGETS__FILE": "~/x"}).config
    assert config.output == tmp_path / "profiles"
    assert config.roles["trainer"].targets is not None
    assert config.roles["trainer"].targets.file == tmp_path / "x"


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("$HOME/profiles", r"output: '\$HOME/profiles' contains an environment variable"),
        (
            "~nobody-here/profiles",
            "output: '~nobody-here/profiles' starts with a home directory that cannot be resolved",
        ),
    ],
)
def test_paths_that_only_a_shell_expands_are_rejected(path: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(settings={"output": path}, environ={})


def test_toml_and_yaml_are_equivalent(tmp_path: Path) -> None:
    yaml, toml = tmp_path / "a.yaml", tmp_path / "a.toml"
    yaml.write_text('steps: [1, "3..4"]\nroles: {trainer: {backend: torch, options: {with_stack: true}}}')
    toml.write_text('steps = [1, "3..4"]\n[roles.trainer]\nbackend = "torch"\noptions.with_stack = true')
    assert load_config(yaml, environ={}).config == load_config(toml, environ={}).config


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"stps": [1]}, "unknown key 'stps'. Did you mean 'steps'? Allowed: output,"),
        ({"steps": "10"}, "steps: expected a list, got '10' (text). Write it in brackets: [10]."),
        ({"steps": ["often"]}, "steps: 'often' is not a step: expected a step number"),
        ({"steps": [True]}, "steps: True is not a step"),
        (
            {"finish": "make"},
            "finish: expected a mapping, got 'make' (text). Allowed keys: command, timeout_s, wait_s.",
        ),
        (
            {"roles": {"trainer": {"backend": "torch", "iterations": 20}}},
            "roles.trainer.iterations: expected a mapping, got 20 (an integer). Allowed keys: count, skip, first.",
        ),
        (
            {"roles": {"trainer": None}},
            "roles.trainer: expected a mapping, got nothing (null). Allowed keys: backend, ",
        ),
        ({"mode": "continous"}, "mode: expected one of continuous, discrete, got 'continous' (text). Did you mean"),
        ({"on_error": True}, "on_error: expected one of warn, raise, got True (a bool)."),
        ({"final_step": "7"}, "final_step: expected an integer, got '7' (text). Remove the quotes."),
        ({"final_step": 7.0}, "final_step: expected an integer, got 7.0 (a number)."),
        ({"final_step": True}, "final_step: expected an integer, got True (a bool)."),
        ({"output": 3}, "output: expected a path, got 3 (an integer)."),
        ({"run": "../x"}, "'../x' is not a directory name"),
        ({"run": "a/b"}, "'a/b' is not a directory name"),
        ({"roles": ["trainer"]}, "roles: expected a mapping"),
        ({"roles": {"trainer": {}}}, "roles.trainer.backend: this key is required."),
        ({"roles": {"trainer": {"backnd": "torch"}}}, "unknown key 'backnd'. Did you mean 'backend'?"),
        ({"roles": {"output": ROLE}}, "'output' cannot be the name of a role: it is a top-level key of the config"),
        ({"roles": {"../x": ROLE}}, "'../x' is not a role"),
        (
            {"roles": {"trainer": ROLE | {"ranks": "some"}}},
            "ranks: expected 'all', a range such as 0..7 or a list such as [0, 8], got 'some'",
        ),
        ({"roles": {"trainer": ROLE | {"ranks": "7..0"}}}, "the range '7..0' is empty"),
        ({"roles": {"trainer": ROLE | {"ranks": ["0..x"]}}}, "roles.trainer.ranks[0]: expected an integer, got '0..x'"),
        ({"roles": {"trainer": ROLE | {"ranks": 3}}}, "roles.trainer.ranks: expected a list, got 3"),
        ({"roles": {"trainer": ROLE | {"ranks": []}}}, "the list is empty"),
        ({"roles": {"trainer": ROLE | {"ranks": [0, "1"]}}}, "roles.trainer.ranks[1]: expected an integer, got '1'"),
        ({"roles": {"trainer": ROLE | {"ranks": [-1]}}}, "-1 is not a rank"),
        ({"roles": {"trainer": ROLE | {"stages": ["a/b"]}}}, "'a/b' is not a stage"),
        ({"roles": {"trainer": ROLE | {"batch_kinds": ["decod"]}}}, "Did you mean 'decode'?"),
        ({"roles": {"trainer": ROLE | {"window": {"active": 2.9}}}}, "window.active: expected an integer, got 2.9"),
        ({"roles": {"trainer": ROLE | {"window": {"active": 0}}}}, "'active' must be >= 1: 0"),
        ({"roles": {"trainer": ROLE | {"window": {}}}}, "roles.trainer.window.active: this key is required."),
        (
            {"mode": "discrete", "roles": {"trainer": ROLE | {"warmup_steps": 1}}},
            "roles.trainer.warmup_steps: not supported in discrete mode",
        ),
    ],
)
def test_error_contains_the_path_of_the_key(data: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        structure(data, Config, where="")
    assert message in str(excinfo.value)


@pytest.mark.parametrize(
    ("backend", "data", "message"),
    [
        ("tally", {"stages": ["a"]}, "roles.trainer.stages: continuous mode records whole steps"),
        ("tally", {"iterations": {"count": 1}}, "trainer.iterations: 'tally' is not an engine backend"),
        ("tally-engine", {"window": {"active": 1}}, "trainer.window: 'tally-engine' is an engine backend"),
        ("tally-engine", {"warmup_steps": 1}, "trainer.warmup_steps: 'tally-engine' is an engine backend"),
        (
            "tally-engine",
            {"stages": ["decode"]},
            "is an engine backend. Use batch_kinds instead, with values from",
        ),
        ("tally", {"batch_kinds": ["decode"]}, "trainer.batch_kinds: 'tally' is not an engine backend"),
    ],
)
def test_keys_that_the_backend_does_not_support_are_rejected(
    tally: ModuleType, backend: str, data: dict[str, Any], message: str
) -> None:
    config = structure({"roles": {"trainer": {"backend": backend} | data}}, Config, where="")
    with pytest.raises(ConfigError) as excinfo:
        build_backend(config, "trainer")
    assert message in str(excinfo.value)


@pytest.mark.parametrize(
    ("iterations", "message"),
    [
        ({}, "roles.trainer.iterations.count: this key is required."),
        ({"count": 0}, "'count' must be >= 1: 0"),
        ({"count": 1, "skip": -1}, "'skip' must be >= 0: -1"),
        ({"count": 1, "first": 2, "skip": 1}, "first and skip cannot both be set"),
        ({"count": 1, "skp": 2}, "unknown key 'skp'. Did you mean 'skip'?"),
    ],
)
def test_invalid_iterations_are_rejected(iterations: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        structure({"roles": {"trainer": ROLE | {"iterations": iterations}}}, Config, where="")
    assert message in str(excinfo.value)


def test_server_belongs_to_one_role_in_continuous_mode() -> None:
    rollout = {"backend": "vllm", "targets": {"urls": ["http://127.0.0.1:1/"]}}
    roles = {"rollout": rollout, "reference": {**rollout, "targets": {"urls": ["http://127.0.0.1:1"]}}}
    with pytest.raises(
        ConfigError, match=r"roles\.reference\.targets\.urls: .* is also a target of the role 'rollout'"
    ):
        structure({"steps": [1], "roles": roles}, Config, where="")
    assert structure({"steps": [1], "mode": "discrete", "roles": roles}, Config, where="").roles


def test_all_errors_are_reported_together() -> None:
    with pytest.raises(ConfigError) as excinfo:
        structure({"mode": "x", "final_step": "y", "roles": {"a": {"backend": 3}}}, Config, where="")
    assert len(str(excinfo.value).splitlines()) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"record_shapes": "false"}, "roles.trainer.options.record_shapes: expected true or false, got 'false' (text)"),
        ({"record_shapes": 1}, "record_shapes: expected true or false, got 1 (an integer)."),
        ({"activities": "cuda"}, "activities: expected a list, got 'cuda' (text). Write it in brackets: [cuda]."),
        ({"activities": ["cudaa"]}, "activities[0]: expected one of cpu, cuda, npu, got 'cudaa' (text). Did you mean"),
        ({"max_capture_s": "60"}, "max_capture_s: expected a number, got '60' (text)."),
        ({"max_capture_s": 0}, "'max_capture_s' must be > 0.0: 0.0"),
        ({"record_shape": True}, "unknown key 'record_shape'. Did you mean 'record_shapes'?"),
    ],
)
def test_options_are_not_coerced(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        structure(options, CommonOptions, where="roles.trainer.options")
    assert message in str(excinfo.value)


def test_null_selects_the_default() -> None:
    assert structure({"activities": None}, CommonOptions, where="").activities is None
    with pytest.raises(ConfigError, match=r"record_shapes: expected true or false, got nothing \(null\)"):
        structure({"record_shapes": None}, CommonOptions, where="")


scalars = st.one_of(st.none(), st.booleans(), st.integers(-3, 3), st.floats(), st.text(max_size=5))
json_values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@given(st.dictionaries(st.sampled_from([*TOP_LEVEL_KEYS, "x"]), json_values, max_size=4))
def test_arbitrary_data_raises_only_config_errors(data: dict[str, Any]) -> None:
    try:
        config = structure(data, Config, where="")
    except ConfigError as error:
        assert str(error)  # noqa: PT017  # both outcomes are valid; other exceptions are not
    else:
        assert structure(unstructure(config), Config, where="") == config


def test_precedence_and_sources_of_values(tmp_path: Path) -> None:
    file = tmp_path / "p.yaml"
    file.write_text(
        "steps: [1]\nmode: discrete\nroles: {Trainer: {backend: a, ranks: all, options: {with_flops: true}}}"
    )
    loaded = load_config(
        settings=dict([parse_setting("Trainer.options.with_stack=true"), parse_setting("mode=continuous")]),
        settings_source="--set",
        environ={
            "PROFDECK_CONFIG": str(file),
            "PROFDECK__TRAINER__BACKEND": "b",
            "PROFDECK__STEPS": "[5, '7..8']",
            "PROFDECK__MODE": "discrete",
            "HOME": "/",
        },
    )
    rows = {key: (value, source) for key, value, source in loaded.rows()}
    assert rows["roles.Trainer.backend"] == ("b", "environment PROFDECK__TRAINER__BACKEND")
    assert rows["roles.Trainer.ranks"] == ("all", f"file {file} (PROFDECK_CONFIG)")
    assert rows["steps"] == ([5, "7..8"], "environment PROFDECK__STEPS")
    assert rows["mode"] == ("continuous", "--set")
    assert rows["on_error"] == ("warn", "default")
    assert rows["roles.Trainer.options.with_stack"] == (True, "--set")
    assert rows["roles.Trainer.options.with_flops"] == (True, f"file {file} (PROFDECK_CONFIG)")
    assert {key.partition(".")[0] for key in rows} == set(TOP_LEVEL_KEYS) == {f.name for f in attrs.fields(Config)}


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.yaml", "steps: [1", "not valid YAML"),
        ("a.toml", "steps = [1", "not valid TOML"),
        ("a.yaml", "- 1", "expected a mapping of keys to values, got list"),
        ("a.json", "{}", r"must end in .yaml, .yml or .toml"),
        ("a.yaml", b"\xff\xfe\x00", "not valid YAML"),
    ],
)
def test_error_names_the_unusable_file(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    file = tmp_path / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=message) as excinfo:
        load_config(file, environ={})
    assert str(file) in str(excinfo.value)


def test_missing_file_is_rejected_and_empty_file_is_accepted(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        load_config(tmp_path / "none.yaml", environ={})
    (tmp_path / "empty.yaml").touch()
    assert load_config(tmp_path / "empty.yaml", environ={}).config == Config()


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("trainer.backend", "expected key=value"),
        ("=1", "expected key=value"),
        ("trainer=1", "'trainer' is not a key of the config. Expected one of output,"),
        ("trainer..x=1", "the key has an empty part"),
        ("trainer.backend=[a", "is not valid YAML"),
    ],
)
def test_invalid_settings_are_reported(setting: str, message: str) -> None:
    with pytest.raises(ConfigError) as excinfo:
        load_config(settings=dict([parse_setting(setting)]), environ={})
    assert message in str(excinfo.value)


def test_setting_below_a_scalar_is_rejected(tmp_path: Path) -> None:
    file = tmp_path / "a.yaml"
    file.write_text("roles: {trainer: {backend: torch, options: [1]}}")
    with pytest.raises(ConfigError, match="cannot be set, because 'options' is"):
        load_config(file, settings={"trainer.options.x": 1}, environ={})


def test_unknown_plugin_options_are_rejected(tally: ModuleType) -> None:
    with pytest.raises(ConfigError, match="unknown key 'fail_on'. Did you mean 'fail_at'?"):
        structure({"fail_on": "start"}, tally.TallyOptions, where="roles.trainer.options")


@pytest.mark.parametrize(
    ("ranks", "expected"),
    [("0..3", (0, 1, 2, 3)), (["0..2", 8], (0, 1, 2, 8)), (["4..4"], (4,)), ("all", "all"), ([2], (2,))],
)
def test_rank_ranges_are_expanded(ranks: object, expected: object) -> None:
    settings = {"trainer.backend": "torch", "trainer.ranks": ranks}
    assert load_config(settings=settings).config.roles["trainer"].ranks == expected
