"""Tests for FLOPs, memory traffic and MFU, compared with torch's counter and with hand-computed values."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from real_traces import each
from typer.testing import CliRunner

from profdeck.cli import app
from profdeck_traces.analysis.model import RankSummary
from profdeck_traces.analysis.summary import summarise_trace
from profdeck_traces.attribution.device_peaks import peaks_of
from profdeck_traces.attribution.model import AttributedTime
from profdeck_traces.attribution.operator_work import OperatorWork, work_of

Event = dict[str, Any]
H100 = "NVIDIA H100 80GB HBM3"


def work(name: str, dims: Any, types: Sequence[str] = (), concrete: Sequence[str] = ()) -> OperatorWork | None:
    concrete = concrete or [""] * len(dims)
    return work_of(name, json.dumps(dims), json.dumps(types) if types else None, json.dumps(concrete))


@pytest.mark.parametrize(
    ("name", "dims", "flops"),
    [
        ("aten::mm", [[2, 3], [3, 5]], 60),
        ("aten::addmm", [[5], [2, 3], [3, 5], [], []], 60),
        ("aten::bmm", [[7, 2, 3], [7, 3, 5]], 420),
        ("aten::baddbmm", [[7, 2, 5], [7, 2, 3], [7, 3, 5]], 420),
        ("aten::_grouped_mm", [[6, 3], [2, 3, 5], [2]], 180),
        ("aten::_grouped_mm", [[2, 6, 3], [3, 5], [2]], 180),
        ("aten::_grouped_mm", [[6, 3], [3, 5], [2]], 180),
        ("aten::_grouped_mm", [[2, 6, 3], [2, 3, 5], []], 360),
        ("aten::_grouped_mm", [[6, 3], [3, 5]], None),
        ("aten::_scaled_grouped_mm", [[6, 3], [2, 3, 5], [6], [2, 5], [2], [], [], [], []], 180),
        ("aten::mv", [[2, 3], [3]], 12),
        ("aten::addmv_", [[2], [2, 3], [3], [], []], 12),
        ("aten::mv", [[2, 3], [2]], None),
        ("aten::mm", [[2, 3], [4, 5]], None),
        ("aten::mm", [[2, 3]], None),
        ("aten::mm", [[2, "3"], [3, 5]], None),
        ("aten::mm", [[2**31, 2**31], [2**31, 2**31]], None),
        ("aten::mm", {"0": 1}, None),
        ("aten::bmm", [[7, 2, 3], [6, 3, 5]], None),
        ("aten::cat", [[2, 3], [3, 5]], None),
    ],
)
def test_flops_of_products(name: str, dims: Any, flops: int | None) -> None:
    found = work(name, dims)
    assert (None if found is None else found.flops) == flops


def test_bytes_are_each_input_and_output_once() -> None:
    half = ["c10::Half"] * 3
    assert work("aten::mm", [[2, 3], [3, 5]], half[:2]) == OperatorWork(60, 2 * (6 + 15 + 10), "float16")
    assert work("aten::addmm", [[5], [2, 3], [3, 5]], half) == OperatorWork(60, 2 * (5 + 6 + 15 + 10), "float16")
    types = ["float", "", "float", "float", "Scalar"]
    assert work("aten::native_layer_norm", [[4, 8], [], [8], [8], []], types) == OperatorWork(None, 320, "float32")
    scaled = work(
        "aten::_scaled_grouped_mm",
        [[6, 3], [2, 3, 5], [6], [2, 5], [2], [], [], [], []],
        ["c10::Float8_e4m3fn"] * 2 + ["float", "float", "int", "", "", "", ""],
        ["", "", "", "", "", "", "", "15", "False"],
    )
    assert scaled == OperatorWork(180, 18 + 30 + 2 * 30, "float8_e4m3fn")
    assert work("aten::addmv_", [[2], [2, 3], [3]], half) == OperatorWork(12, 2 * (2 + 6 + 3 + 2), "float16")
    embedding = work("aten::embedding", [[100, 8], [3]], ["float", "long int"])
    assert embedding == OperatorWork(None, 3 * 8 + 2 * 3 * 8 * 4, "float32")
    assert work("aten::mm", [[2, 3], [3, 5]], ["c10::Unknown"] * 2) == OperatorWork(60, None, "unknown")


def test_causal_attention_counts_unmasked_pairs() -> None:
    """The three queries attend to 1, 2 and 3 keys, so 6 of 9 pairs count."""
    dims, types = [[1, 2, 3, 4]] * 3 + [[], []], ["float"] * 3 + ["Scalar"] * 2

    def flops(causal: str, dims: Any = dims, name: str = "aten::_scaled_dot_product_flash_attention") -> int | None:
        found = work(name, dims, types, ["", "", "", "0.", causal])
        return None if found is None else found.flops

    assert (flops("False"), flops("True")) == (2 * 2 * 9 * 8, 2 * 2 * 6 * 8)
    assert flops("True", [[1, 2, 1, 4], *dims[1:]]) is None  # the mask alignment is unknown
    assert flops("") is None
    assert flops("False", [[1, 2, 3, 4], [1, 2, 3, 5], [1, 2, 3, 4]]) is None


def test_attention_with_unknown_lengths_is_not_counted() -> None:
    concrete = ["", "", "", "", "", "3", "3", "0.", "False", "False", "", "", "", "", ""]
    dims: list[Any] = [[1, 3, 2, 4]] * 3 + [[]] * 12
    types = ["float"] * 3 + [""] * 12

    def is_counted(**changes: str) -> bool:
        values = {int(index[1:]): value for index, value in changes.items()}
        return work(
            "aten::_flash_attention_forward",
            dims,
            [*types[:3], values.get(3, ""), *types[4:]],
            [values.get(index, text) if index != 3 else text for index, text in enumerate(concrete)],
        ) is not None  # fmt: skip

    assert is_counted()
    assert not is_counted(_3="int")  # cumulative sequence lengths
    assert not is_counted(_11="128")  # sliding window


def test_unknown_devices_and_partitions_have_no_peak() -> None:
    peaks = peaks_of(H100, 132)
    assert peaks is not None
    assert peaks.flops_per_s("bfloat16") == 989.4e12
    assert peaks.flops_per_s("float8_e4m3fn") == 2 * 989.45e12
    assert peaks.flops_per_s("complex64") is None
    assert peaks_of("NVIDIA H100 80GB HBM3 MIG 1g.10gb", 16) is None
    assert peaks_of("NVIDIA A10G", 80) is peaks_of("NVIDIA A100-PG509-200", 108) is peaks_of("", 304) is None
    assert peaks_of("A100-SXM4-40GB", 108) is peaks_of("NVIDIA A100-SXM4-40GB", 108) is not None
    assert peaks_of("AMD Instinct MI300X", 304) is not None
    assert peaks_of("AMD Instinct MI300X", 38) is None


def complete(category: str, name: str, start: float, duration: float, **args: Any) -> Event:
    return {"ph": "X", "cat": category, "name": name, "pid": 9, "tid": 1, "ts": start, "dur": duration, "args": args}


def launched(number: int, at: float, start: float, duration: float, name: str = "gemm") -> list[Event]:
    call = complete("cuda_runtime", "cudaLaunchKernel", at, 1, correlation=number)
    kernel = complete("kernel", name, start, duration, correlation=number, device=0, stream=7)
    return [call, kernel | {"pid": 0, "tid": 7}]


def product(
    at: float, duration: float, size: int = 4096, dtype: str = "c10::BFloat16", name: str = "aten::mm"
) -> Event:
    args = {"Input Dims": [[size, size], [size, size]], "Input type": [dtype] * 2, "Concrete Inputs": ["", ""]}
    return complete("cpu_op", name, at, duration, **args)


def written(path: Path, events: Sequence[Event], device: str = H100) -> Path:
    properties = [{"id": 0, "name": device, "numSms": 132}]
    path.write_text(json.dumps({"deviceProperties": properties, "traceEvents": events}))
    return path


def steps(*, other_us: float = 0.0) -> list[Event]:
    """Return two steps of 1 ms on the device.

    Each contains a matrix product of 200 us in nested operators, and kernels that are not counted.
    """
    events: list[Event] = []
    for step in (0, 1):
        now = step * 1000.0
        events += [
            complete("user_annotation", f"ProfilerStep#{step}", now, 1000),
            product(now + 1, 90, name="aten::matmul"),
            product(now + 2, 50),
            *launched(4 * step + 1, now + 3, now + 10, 200),
            complete("cpu_op", "aten::copy_", now + 20, 10, **{"Input Dims": [[4096, 4096]], "Input type": ["float"]}),
            *launched(4 * step + 2, now + 21, now + 210, 10, "copy"),
            complete(
                "cpu_op", "vllm::custom", now + 100, 50, **{"Input Dims": [[4096, 4096]], "Input type": ["float"]}
            ),
            *launched(4 * step + 3, now + 101, now + 300, other_us, "custom"),
            *launched(4 * step + 4, now + 160, now + 1009, 1, "end"),
        ]
    return events


FLOPS = 2 * 4096**3
IDEAL_US = FLOPS / 989.4e6


def by_name(summary: RankSummary) -> dict[str, AttributedTime]:
    assert summary.attributed
    return {row.name: row for row in summary.attributed.operators}


def test_mfu_and_rates_equal_a_count_by_hand(tmp_path: Path) -> None:
    """`matmul`, `mm` and the copy inside `mm` are counted once. The rate of `mm` uses only its own kernels."""
    summary = summarise_trace(written(tmp_path / "a.json", steps()))
    rows = by_name(summary)
    assert rows["aten::mm"].flops == 2 * FLOPS
    assert rows["aten::mm"].size_bytes == 2 * 3 * 4096**2 * 2
    assert rows["aten::mm"].work_us == 400
    assert rows["aten::mm"].peak_share == pytest.approx(2 * IDEAL_US / 400)
    assert rows["aten::mm"].bound == "compute"
    for name in ("aten::copy_", "vllm::custom"):
        assert (rows[name].flops, rows[name].work_us, rows[name].bound) == (None, None, None)
    utilization = summary.utilization
    assert utilization
    assert (utilization.device, utilization.dtype, utilization.dtype_share) == (H100, "bfloat16", 1)
    assert utilization.flops == summary.product_flops == 2 * FLOPS
    assert utilization.covered == pytest.approx(400 / 422)
    durations = [step.devices[0].duration_us for step in summary.steps]
    assert utilization.mfu == pytest.approx(2 * IDEAL_US / sum(durations))
    assert [step.flops for step in summary.steps] == [FLOPS, FLOPS]
    assert [step.mfu for step in summary.steps] == [pytest.approx(IDEAL_US / duration) for duration in durations]


def screen(path: Path, *options: str) -> str:
    result = CliRunner().invoke(app, ["summary", str(path), *options], env={"COLUMNS": "120"})
    assert result.exit_code == 0
    return " ".join(result.stdout.split())


def test_mfu_is_shown_if_most_of_the_time_is_counted(tmp_path: Path) -> None:
    shown = screen(written(tmp_path / "a.json", steps()))
    assert f"of 989 TFLOP/s ({H100}, bfloat16). FLOPs are known for 94.8% of the kernels' time." in shown
    hidden = written(tmp_path / "b.json", steps(other_us=600))
    assert "MFU" not in screen(hidden)
    summary = summarise_trace(hidden)
    assert summary.utilization
    assert summary.utilization.mfu is summary.steps[0].mfu is None


def test_unknown_device_is_named(tmp_path: Path) -> None:
    path = written(tmp_path / "a.json", steps(), "Example 1")
    assert "The peak of Example 1 for bfloat16 is unknown." in screen(path, "--by", "operator")
    assert "MFU" not in screen(path)
    row = by_name(summarise_trace(path))["aten::mm"]
    assert (row.flops, row.peak_share, row.bound) == (2 * FLOPS, None, None)
    path.write_text(json.dumps({"traceEvents": steps()}))
    assert "the trace does not name a single device model" in screen(path, "--by", "shape")


@pytest.mark.parametrize(
    ("size", "bound", "limit_us"), [(64, "memory", 3 * 64**2 * 2 / 3350e3), (4096, "compute", IDEAL_US)]
)
def test_bound_depends_on_the_arithmetic_intensity(tmp_path: Path, size: int, bound: str, limit_us: float) -> None:
    path = written(tmp_path / "a.json", [product(1, 20, size), *launched(1, 2, 30, 200)])
    row = by_name(summarise_trace(path))["aten::mm"]
    assert (row.bound, row.peak_share) == (bound, pytest.approx(limit_us / 200))
    assert bound in screen(path, "--by", "operator")


def test_work_of_an_operator_without_kernels_goes_to_the_operators_inside(tmp_path: Path) -> None:
    events = [product(1, 50), complete("cpu_op", "aten::a", 2, 10), *launched(1, 3, 100, 30)]
    events += [complete("cpu_op", "aten::b", 20, 10), *launched(2, 21, 130, 10)]
    rows = by_name(summarise_trace(written(tmp_path / "a.json", events)))
    assert rows["aten::a"].flops == pytest.approx(FLOPS * 3 / 4, rel=1e-4)
    assert (rows["aten::a"].flops or 0) + (rows["aten::b"].flops or 0) == FLOPS


def test_operators_without_device_events_have_no_rate(tmp_path: Path) -> None:
    """The operator may run on a device that was not recorded. Its duration is then only the launch time."""
    summary = summarise_trace(written(tmp_path / "a.json", [product(1, 50)]))
    row = by_name(summary)["aten::mm"]
    assert (summary.product_flops, row.flops, row.work_us, summary.utilization) == (FLOPS, FLOPS, None, None)


def test_a_job_on_a_cpu_has_rates_but_no_peak(tmp_path: Path) -> None:
    """The duration of a counted operator includes the operators that it calls."""
    path = tmp_path / "a.json"
    events = [product(1, 50), complete("cpu_op", "aten::copy_", 2, 30)]
    path.write_text(json.dumps({"deviceProperties": [], "traceEvents": events}))

    summary = summarise_trace(path)

    row = by_name(summary)["aten::mm"]
    assert (row.time_us, row.work_us, row.flops) == (20, 50, FLOPS)
    assert (row.peak_share, row.bound, summary.utilization) == (None, None, None)
    shown = screen(path, "--by", "operator")
    assert f"GFLOP/s operator 0.030 60.0% 1 aten::copy_ 0.020 40.0% 1 {FLOPS / 50e3:,.0f} aten::mm" in shown
    assert "peak" not in shown


def test_a_job_that_calls_a_device_has_no_rates(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    events = [product(1, 50), complete("cuda_runtime", "cudaLaunchKernel", 3, 1)]
    path.write_text(json.dumps({"deviceProperties": [], "traceEvents": events}))
    assert by_name(summarise_trace(path))["aten::mm"].work_us is None


@pytest.mark.shared_data
@each("gpu/*.json.gz", "public/*.json.gz")
def test_flops_of_real_traces_add_up(path: Path) -> None:
    """The FLOPs in each table add up to those of the utilization. No operator exceeds its device's peak rate."""
    summary = summarise_trace(path)
    assert summary.attributed
    expected = summary.utilization.flops if summary.utilization else 0
    for table in ("operators", "shapes", "modules", "stages", "lines"):
        rows = getattr(summary.attributed, table)
        assert sum(row.flops or 0 for row in rows if row.work_us) == pytest.approx(expected, rel=1e-9)
        assert all(0 < row.peak_share <= 1 for row in rows if row.bound == "compute")
        assert all((row.work_us or 0) <= row.time_us * 1.000001 for row in rows)


def profiled(path: Path, run: Callable[[], Any]) -> tuple[int | None, int]:
    """Profile a function. Return the FLOPs computed from its trace, and the FLOPs counted by torch."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
        run()
    profiler.export_chrome_trace(str(path))
    return summarise_trace(path).product_flops, counter.get_total_flops()


@pytest.mark.torch
def test_flops_of_a_transformer_equal_torchs_counter(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    layer = torch.nn.TransformerEncoderLayer(32, 4, 64, batch_first=True)
    model = torch.nn.Sequential(torch.nn.Embedding(50, 32), layer, torch.nn.LayerNorm(32), torch.nn.Linear(32, 50))
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
            model(torch.randint(0, 50, (3, 17))).square().mean().backward()
        optimizer.step()

    found, expected = profiled(tmp_path / "a.json", step)
    assert found == expected > 0


@pytest.mark.torch
def test_flops_of_operators_equal_torchs_counter(tmp_path: Path) -> None:
    """The operators run on torch's meta device, so no GPU is needed."""
    torch = pytest.importorskip("torch")
    aten = torch.ops.aten

    def t(*size: int, dtype: Any = torch.float16) -> Any:
        return torch.empty(*size, dtype=dtype, device="meta")

    query, key, value = t(2, 4, 16, 8), t(2, 4, 24, 8), t(2, 4, 24, 8)
    backward = (t(2, 4, 16, 8), query, key, value)
    out, scores, seed = t(2, 4, 16, 8), t(2, 4, 16, dtype=torch.float32), t(2, dtype=torch.int64)
    image, fp8, scale = t(2, 4, 9, 9), torch.float8_e4m3fn, t(1, dtype=torch.float32)
    square, one, none = [2, 2], [1, 1], None
    off, on = False, True
    both = [on, on, on]
    operators: list[Callable[[], Any]] = [
        lambda: aten._scaled_dot_product_flash_attention(query, key, value),
        lambda: aten._scaled_dot_product_efficient_attention(query, key, value, none, on),
        lambda: aten._scaled_dot_product_cudnn_attention(query, key, value, none, on),
        lambda: aten._scaled_dot_product_flash_attention_backward(
            *backward, out, scores, none, none, 16, 24, 0.0, off, seed, seed
        ),
        lambda: aten._scaled_dot_product_efficient_attention_backward(
            *backward, none, out, scores, seed, seed, 0.0, [*both, False]
        ),
        lambda: aten._scaled_dot_product_cudnn_attention_backward(
            *backward, out, scores, seed, seed, none, none, none, 16, 24, 0.0, off
        ),
        lambda: aten._scaled_mm(t(16, 32, dtype=fp8), t(48, 32, dtype=fp8).t(), scale, scale, out_dtype=torch.bfloat16),
        lambda: aten.convolution(image, t(8, 4, 3, 3), t(8), square, one, one, off, [0, 0], 1),
        lambda: aten.convolution(image, t(8, 2, 3, 3), t(8), square, one, square, off, [0, 0], 2),
        lambda: aten.convolution(image, t(4, 8, 3, 3), t(8), square, one, one, on, one, 1),
        lambda: aten.convolution_backward(
            t(2, 8, 5, 5), image, t(8, 4, 3, 3), [8], square, one, one, off, [0, 0], 1, both
        ),
        lambda: aten.convolution_backward(
            t(2, 8, 18, 18), image, t(4, 8, 3, 3), [8], square, one, one, on, one, 1, [False, True, True]
        ),
        lambda: aten.baddbmm(t(2, 3, 5), t(2, 3, 4), t(2, 4, 5)),
    ]
    for number, operator in enumerate(operators):
        found, expected = profiled(tmp_path / f"{number}.json", operator)
        assert found == expected > 0, number


@pytest.mark.torch
def test_layout_of_flash_attention_is_that_of_its_caller(tmp_path: Path) -> None:
    """The inner operator has the FLOPs that torch counts for the outer operator."""
    torch = pytest.importorskip("torch")
    query, key = (torch.empty(2, 4, length, 8, dtype=torch.float16, device="meta") for length in (16, 24))
    off = False
    inner = [tensor.transpose(1, 2) for tensor in (query, key, key)]

    def run(function: Callable[[], Any]) -> int | None:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profiler:
            function()
        profiler.export_chrome_trace(str(tmp_path / "a.json"))
        return summarise_trace(tmp_path / "a.json").product_flops

    def flash() -> Any:
        return torch.ops.aten._flash_attention_forward(*inner, None, None, 16, 24, 0.0, off, off)

    def efficient() -> Any:
        return torch.ops.aten._efficient_attention_forward(*inner, None, None, None, None, None, 0.0, 0)

    _, expected = profiled(
        tmp_path / "b.json", lambda: torch.ops.aten._scaled_dot_product_flash_attention(query, key, key)
    )
    assert run(flash) == run(efficient) == expected > 0
