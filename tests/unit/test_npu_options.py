"""Tests of the NPU backend's options and their error messages."""

from __future__ import annotations

import inspect
from typing import Any

import attrs
import pytest

from profdeck import Activity
from profdeck.config.options import describe
from profdeck.config.structuring import structure, unstructure
from profdeck_npu import NpuBackend, NpuOptions
from profdeck_npu.options import AicMetrics, Export, HostSystem, Level
from profdeck_traces.base.errors import ConfigError

WHERE = "roles.trainer.options"


def structure_options(**values: Any) -> NpuOptions:
    return structure(values, NpuOptions, where=WHERE)


def test_defaults_record_host_and_device() -> None:
    defaults = structure_options()
    assert defaults == NpuOptions()
    assert defaults.activities == (Activity.CPU, Activity.NPU)
    assert (defaults.level, defaults.aic_metrics) == (Level.LEVEL1, AicMetrics.PIPE_UTILIZATION)
    assert (defaults.export, defaults.analyse, defaults.data_simplification) == ((Export.TEXT,), True, True)
    enabled_options = {name for name, value in attrs.asdict(defaults).items() if value is True}
    assert enabled_options == {"analyse", "data_simplification"}


def test_all_options_can_be_set() -> None:
    values: dict[str, Any] = {
        "activities": ["npu", "cpu"],
        "record_shapes": True,
        "with_stack": True,
        "profile_memory": True,
        "with_modules": True,
        "with_flops": False,
        "max_capture_s": 60.0,
        "max_capture_steps": 5,
        "max_memory_share": 0.5,
        "level": "level2",
        "aic_metrics": "MemoryUB",
        "l2_cache": True,
        "op_attr": True,
        "record_op_args": True,
        "mstx": True,
        "mstx_domain_include": [],
        "mstx_domain_exclude": ["communication"],
        "sys_io": True,
        "sys_interconnection": True,
        "host_sys": ["cpu", "mem", "disk", "network", "osrt", "numa"],
        "gc_detect_threshold_ms": 0,
        "data_simplification": False,
        "export": ["text", "db"],
        "analyse": False,
        "analyse_timeout_s": 10,
    }
    assert unstructure(structure_options(**values)) == values


@pytest.mark.parametrize(
    ("values", "metrics"),
    [
        ({"level": "level0"}, "AiCoreNone"),
        ({"level": "level1"}, "PipeUtilization"),
        ({"level": "level2"}, "PipeUtilization"),
        ({"level": "level2", "aic_metrics": "AiCoreNone"}, "AiCoreNone"),
        ({"level": "level0", "aic_metrics": "AiCoreNone"}, "AiCoreNone"),
        ({"level": "level_none", "mstx": True}, "AiCoreNone"),
        ({"activities": ["cpu"]}, "AiCoreNone"),
    ],
)
def test_default_aic_metrics_are_resolved_for_manifests(values: dict[str, Any], metrics: str) -> None:
    assert unstructure(structure_options(**values))["aic_metrics"] == metrics


INVALID: list[tuple[dict[str, Any], str]] = [
    ({"level": "level3"}, ".level: expected one of level_none, level0, level1, level2, got 'level3' (text)."),
    ({"level": 1}, ".level: expected one of level_none, level0, level1, level2, got 1 (an integer)."),
    ({"aic_metrics": "pipeutilization"}, ".aic_metrics: expected one of AiCoreNone, PipeUtilization, "),
    ({"aic_metrics": "PipeUtilisation"}, "Did you mean 'PipeUtilization'?"),
    ({"l2_cache": "true"}, ".l2_cache: expected true or false, got 'true' (text). Remove the quotes."),
    ({"host_sys": ["cpu", "gpu"]}, ".host_sys[1]: expected one of cpu, mem, disk, network, osrt, numa, got 'gpu'"),
    ({"host_sys": "cpu"}, ".host_sys: expected a list, got 'cpu' (text). Write it in brackets: [cpu]."),
    ({"export": ["csv"]}, ".export[0]: expected one of text, db, got 'csv' (text)."),
    ({"mstx_domain_include": "default"}, ".mstx_domain_include: expected a list, got 'default'"),
    ({"gc_detect_threshold_ms": -1}, "gc_detect_threshold_ms"),
    ({"gc_detect_threshold_ms": float("inf")}, "gc_detect_threshold_ms"),
    ({"analyse": "subprocess"}, ".analyse: expected true or false, got 'subprocess' (text)."),
    ({"analyse_timeout_s": 0}, "analyse_timeout_s"),
    ({"msprof_tx": True}, "unknown key 'msprof_tx'."),
    ({"l2cache": True}, "unknown key 'l2cache'. Did you mean 'l2_cache'?"),
    # Combinations of options.
    ({"activities": []}, "activities: the list is empty, so nothing would be recorded; remove the key"),
    ({"activities": ["cpu", "cuda"]}, "activities: the backend npu does not record cuda; allowed: cpu, npu"),
    (
        {"level": "level0", "aic_metrics": "Memory"},
        "aic_metrics: Memory requires level1 or level2, but the level is level0; increase the level, or remove",
    ),
    (
        {"level": "level_none", "mstx": True, "aic_metrics": "L2Cache"},
        "but the level is level_none; increase the level",
    ),
    ({"level": "level_none"}, "level: level_none only records mstx ranges, but mstx is off; turn on mstx, or use"),
    (
        {"mstx_domain_include": ["a", "b"]},
        "mstx_domain_include: requires mstx, which is off; turn on mstx, or remove mstx_domain_include",
    ),
    (
        {"mstx_domain_exclude": ["c"]},
        "mstx_domain_exclude: requires mstx, which is off; turn on mstx, or remove mstx_domain_exclude",
    ),
    (
        {"mstx": True, "mstx_domain_include": ["a"], "mstx_domain_exclude": ["b"]},
        "mstx_domain_exclude: torch_npu does not support it together with mstx_domain_include; remove one",
    ),
    ({"mstx": True, "mstx_domain_include": [""]}, "mstx_domain_include: a domain name is empty; expected"),
    ({"op_attr": True}, "op_attr: attributes are only written to the database; add db to export, or turn off op_attr"),
    ({"export": []}, "export: the list is empty, so the analysis would write nothing; remove the key"),
    (
        {"activities": ["npu"], "gc_detect_threshold_ms": 1},
        "gc_detect_threshold_ms: requires the activity cpu; add cpu to activities, or remove gc_detect",
    ),
    (
        {"activities": ["cpu"], "level": "level2", "mstx": True},
        "level: requires the npu activity; add npu to activities, or remove level, mstx",
    ),
    ({"activities": ["cpu"], "host_sys": ["cpu"]}, "host_sys: requires the npu activity; add npu"),
    ({"activities": ["cpu"], "aic_metrics": "Memory"}, "aic_metrics: requires the npu activity; add npu"),
    ({"with_flops": True}, "with_flops: torch_npu's analysis does not support FLOPs; turn off with_flops"),
]


@pytest.mark.parametrize(("values", "message"), INVALID, ids=[str(values) for values, _ in INVALID])
def test_invalid_options_are_rejected(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        structure_options(**values)
    text = str(caught.value)
    assert text.startswith(WHERE)
    assert message in text


def test_every_device_option_requires_the_activity_npu() -> None:
    host_options = {"activities", "gc_detect_threshold_ms", "data_simplification", "export"}
    mstx_options = {"mstx_domain_include", "mstx_domain_exclude"}  # require mstx
    device_options = set(inspect.get_annotations(NpuOptions)) - host_options - mstx_options
    values = {
        "level": "level2",
        "aic_metrics": "Memory",
        "host_sys": ["mem"],
        **{
            name: True
            for name in device_options
            if inspect.get_annotations(NpuOptions)[name] == "bool" and name != "analyse"
        },
    }
    assert device_options == {*values, "analyse", "analyse_timeout_s"}
    for name, value in values.items():
        with pytest.raises(ConfigError, match=f"{name}: requires the npu activity"):
            structure_options(activities=["cpu"], **{name: value})


def test_enum_values_match_torch_npu() -> None:
    """Users can look up the values in torch_npu's documentation. tests/contract compares them with the wheels."""
    assert [*HostSystem] == ["cpu", "mem", "disk", "network", "osrt", "numa"]
    assert len(AicMetrics) == 9
    assert [*Level] == ["level_none", "level0", "level1", "level2"]


def test_every_option_documents_its_default() -> None:
    for option in describe(NpuBackend.Options):
        assert "default" in option.text.lower(), option.name
    assert {option.name: option.default for option in describe(NpuOptions)}.items() >= {
        "activities": "[cpu, npu]",
        "level": "level1",
        "aic_metrics": "automatic",
        "host_sys": "[]",
        "export": "[text]",
    }.items()
