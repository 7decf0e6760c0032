"""Peak rates of devices, looked up by the device name in a trace.

Rates are for dense operations (without structured sparsity) at the boost clock. If the device has matrix units for a
data type, the rate is that of the matrix units. Vendor figures with sparsity are halved. The bandwidth is that of the
device memory.

Sources:

- A100, A10, L4, L40S, V100, V100S, T4, H100, H200, B200, GB200: NVIDIA data sheets at
  https://www.nvidia.com/en-us/data-center/ (``a100``, ``h100``, ...), and the Ampere, Hopper and Blackwell architecture
  white papers. The GB200 figures are for one of the two GPUs in a superchip.
- H20: NVIDIA publishes no data sheet. The rates are those reported by system vendors and the press.
- MI250X, MI300X, MI325X, MI355X: AMD product pages, https://www.amd.com/en/products/accelerators/instinct.html. The
  MI250X figures are for half a card, because each of its two dies is a device.

Ascend devices are not listed, because published figures for the Ascend 910B contradict each other and Ascend traces do
not contain the device name.
"""

from __future__ import annotations

import re

import attrs


@attrs.frozen
class DevicePeaks:
    """Peak rates of one device. A rate is ``None`` if it is unknown or the device has no matrix units for the type."""

    memory: float
    """Bandwidth in GB/s (10^9 bytes per second)."""
    float16: float
    """In TFLOP/s (10^12 operations per second), like all rates below."""
    bfloat16: float | None
    float32: float
    """TF32 if the device supports it, because traces do not record the setting; otherwise plain float32."""
    float64: float | None
    float8: float | None = None
    int8: float | None = None
    multiprocessors: int | None = None
    """Number of compute units; set only for devices whose partitions have the same name as the device."""

    def flops_per_s(self, dtype: str) -> float | None:
        """Return the peak rate in operations per second of a dtype such as ``bfloat16``, or ``None`` if unknown."""
        key = "float8" if dtype.startswith("float8_e") else dtype
        if key not in _DTYPES:
            return None
        rate: float | None = getattr(self, key)
        return None if rate is None else rate * 1e12

    @property
    def bytes_per_s(self) -> float:
        """Memory bandwidth in bytes per second."""
        return self.memory * 1e9


_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64", "float8", "int8"})
_A100 = DevicePeaks(1555, 312, 312, 156, 19.5, int8=624)
_H100 = DevicePeaks(3350, 989.4, 989.4, 494.7, 67, 1978.9, 1978.9)
_V100 = DevicePeaks(900, 125, None, 15.7, 7.8)
_MI300X = DevicePeaks(5300, 1307.4, 1307.4, 653.7, 163.4, 2614.9, 2614.9, 304)
_PEAKS = {
    r"A100-(SXM4|PCIE)-40GB": _A100,
    r"A100-SXM4-80GB": attrs.evolve(_A100, memory=2039),
    r"A100 80GB PCIe": attrs.evolve(_A100, memory=1935),
    r"H100 80GB HBM3": _H100,
    r"H100 PCIe": DevicePeaks(2000, 756, 756, 378, 51, 1513, 1513),
    r"H200": attrs.evolve(_H100, memory=4800),
    r"H20": DevicePeaks(4000, 148, 148, 74, 1, 296, 296),
    r"B200": DevicePeaks(8000, 2250, 2250, 1125, 37, 4500, 4500),
    r"GB200": DevicePeaks(8000, 2500, 2500, 1250, 40, 5000, 5000),
    r"L4": DevicePeaks(300, 121, 121, 60, None, 242.5, 242.5),
    r"L40S": DevicePeaks(864, 362, 362, 183, None, 733, 733),
    r"A10": DevicePeaks(600, 125, 125, 62.5, None, int8=250),
    r"Tesla V100-(SXM[23]|DGXS)-(16|32)GB": _V100,
    r"Tesla V100-PCIE-(16|32)GB": DevicePeaks(900, 112, None, 14, 7),
    r"Tesla V100S-PCIE-32GB": DevicePeaks(1134, 130, None, 16.4, 8.2),
    r"Tesla T4": DevicePeaks(320, 65, None, 8.1, None, int8=130),
    r"AMD Instinct MI250X": DevicePeaks(1638, 191.5, 191.5, 47.9, 47.9, int8=191.5),
    r"AMD Instinct MI300X( VF)?": _MI300X,
    r"AMD Instinct MI325X( VF)?": attrs.evolve(_MI300X, memory=6000),
    r"AMD Instinct MI355X( VF)?": DevicePeaks(8000, 2516.6, 2516.6, 157.3, 78.6, 5033.2, 5033.2, 256),
}
"""Peak rates, keyed by a regular expression for the device name without the ``NVIDIA`` prefix, which old drivers omit.

A pattern must match the complete name. MIG partitions and other models match no pattern."""


def peaks_of(name: str, multiprocessors: int | None) -> DevicePeaks | None:
    """Return the peak rates of a device, or ``None`` if the device is unknown.

    Args:
        name: Name in the trace's ``deviceProperties``, such as ``NVIDIA H100 80GB HBM3``.
        multiprocessors: ``numSms`` in the same entry. It is smaller for a partition than for the full AMD device.
    """
    model = name.removeprefix("NVIDIA ")
    peaks = next((peaks for pattern, peaks in _PEAKS.items() if re.fullmatch(pattern, model)), None)
    if peaks is None or peaks.multiprocessors not in (None, multiprocessors):
        return None
    return peaks
