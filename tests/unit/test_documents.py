"""Config files with unusual or invalid text: parsed values and error messages."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from profdeck.config.sources import load_config
from profdeck_traces.base.documents import parse_yaml
from profdeck_traces.base.errors import ConfigError

BILLION_LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12)
)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("010", 10),
        ("0o10", 8),
        ("0x10", 16),
        ("-3", -3),
        ("10:20", "10:20"),
        ("1_000", "1_000"),
        ("yes", "yes"),
        ("off", "off"),
        ("true", True),
        ("~", None),
        ("2026-01-31", "2026-01-31"),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("1.2.3", "1.2.3"),
        ("{a: &a {b: 1}, c: {<<: *a, d: 2}}", {"a": {"b": 1}, "c": {"b": 1, "d": 2}}),
    ],
)
def test_scalars_follow_yaml_1_2(text: str, value: Any) -> None:
    parsed = parse_yaml(text)
    assert (parsed, type(parsed)) == (value, type(value))


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**63)
    | st.text(st.characters(max_codepoint=0x7E, min_codepoint=32)),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3),
    max_leaves=20,
)


@given(JSON)
def test_json_is_yaml(value: Any) -> None:
    assert parse_yaml(json.dumps(value)) == value


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("steps: [10:20]", "'10:20' is not a step: .* Write 10..20"),
        ("steps: ['3-4']", "Write 3..4"),
        ("steps: [2026-02-30]", "'2026-02-30' is not a step"),
        ("run: a\nrun: b", "duplicate key 'run'"),
        ("roles: {t: {backend: torch}, t: {backend: npu}}", "duplicate key 't'"),
        ("steps: [!!int x]", "not valid YAML: invalid literal"),
        ("run: !!timestamp x", "not valid YAML"),
        ("run: !!python/object:os.system x", "not valid YAML: could not determine a constructor"),
        ("roles: &a {trainer: *a}", "more than 32 levels of nesting"),
        ("steps: " + "[" * 3000, "more than 32 levels of nesting"),
        ("steps: " + "[" * 40 + "]" * 40, "more than 32 levels of nesting"),
        (BILLION_LAUGHS, "more than 100,000 values"),
        ("steps: [" + "9" * 5000 + "]", "not valid YAML: Exceeds the limit"),
        ("final_step: " + "9" * 30, "final_step: expected an integer from -"),
        ('output: "a\\0b"', r"output: expected a path, .* it contains the character '.x00'"),
        ('run: "\\ud800"', "run: expected text"),
        ("finish: {timeout_s: .inf}", "finish.timeout_s: expected a finite number"),
        ("finish: {timeout_s: 1e10}", "finish.timeout_s|timeout_s"),
        ("on_demand: yes", "expected true, false or a name, got 'yes' .text.. Write true"),
        ("on_demand: yes please", "expected true, false or a name, got 'yes please' .text..$"),
        ("on_demand: 'true'", "Remove the quotes"),
    ],
)
def test_invalid_file_is_rejected_with_a_short_message(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    started_s = time.process_time()
    with pytest.raises(ConfigError, match=message) as excinfo:
        load_config(tmp_path / "a.yaml")
    assert time.process_time() - started_s < 10
    assert len(str(excinfo.value)) < 700
    if len(text) < 100 and "\n" not in text:  # environment variables are parsed by the same rules
        key, _, value = text.partition(": ")
        with pytest.raises(ConfigError):
            load_config(environ={f"PROFDECK__{key.upper()}": value})


def test_unsupported_toml_values_are_rejected(tmp_path: Path) -> None:
    for number, text in enumerate(("final_step = " + "9" * 5000, "steps = " + "[" * 3000, "run = 1979-05-27")):
        (tmp_path / f"{number}.toml").write_text(text)
        with pytest.raises(ConfigError):
            load_config(tmp_path / f"{number}.toml")


@pytest.mark.parametrize("seconds", ["inf", "nan", "1e10", "-1", "0"])
def test_max_capture_s_outside_the_timer_range_is_rejected(seconds: str) -> None:
    from profdeck import Profiler

    settings = {"steps": [1], "trainer.backend": "torch", "trainer.options.max_capture_s": float(seconds)}
    with pytest.raises(ConfigError, match="max_capture_s"):
        Profiler.from_config(settings=settings)
