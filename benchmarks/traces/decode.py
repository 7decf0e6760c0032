"""Synthetic trace of LLM decoding with CUDA graphs, in Kineto's layout: few host events and many short kernels.

One graph launch starts all kernels of an iteration. They share its correlation ID and differ in their graph node ID.
Gaps between kernels are about one microsecond, and few host operators belong to them.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

ITERATIONS = 60
LAYERS = 32
PID, DEVICE, STREAM = 4242, 0, 7
PROCESSORS = 132
"""Number of multiprocessors of the simulated device."""
KERNELS = (
    # Name, duration in us, blocks, threads. One layer of a dense model, as measured on one of eight devices.
    (("void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>(c10::BFloat16*, c10::BFloat16*, c10::BFloat16 const*, "
     "float, int, int)"), 2.6, 64, 1024),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_TNT", 6.9, 132, 384),
    (("void vllm::rotary_embedding_kernel<c10::BFloat16, true>(long const*, c10::BFloat16*, c10::BFloat16*, "
     "c10::BFloat16 const*, int, long, long, int, int, int)"), 2.1, 64, 128),
    (("void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, __nv_bfloat16, (vllm::Fp8KVCacheDataType)0>("
     "__nv_bfloat16 const*, __nv_bfloat16 const*, __nv_bfloat16*, __nv_bfloat16*, long const*, long, long, long, int, "
     "int, int, int, float const*, float const*)"), 1.8, 64, 512),
    (("void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<flash::CollectiveMainloopFwdSm90"
     "<2, cute::tuple<cute::C<1>, cute::C<1>, cute::C<1> >, cute::tuple<cute::C<64>, cute::C<128>, cute::C<128> >, "
     "128, cutlass::bfloat16_t, float, cutlass::arch::Sm90, true, false, false, true, true, false, true> > > >"),
     11.4, 132, 256),
    ("nvjet_tst_64x8_64x16_4x1_v_bz_splitK_TNT", 5.2, 128, 384),
    (("void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals, vllm::Signal*, "
     "__nv_bfloat16*, int, int)"), 7.7, 36, 512),
    ("nvjet_tst_128x8_64x12_2x1_v_bz_TNT", 13.5, 132, 384),
    (("void vllm::act_and_mul_kernel<c10::BFloat16, &(c10::BFloat16 vllm::silu_kernel<c10::BFloat16>("
     "c10::BFloat16 const&)), true>(c10::BFloat16*, c10::BFloat16 const*, int)"), 2.2, 64, 1024),
    ("nvjet_tst_64x16_64x13_4x1_v_bz_splitK_TNT", 9.8, 128, 384),
)  # fmt: skip
LAUNCH = "cudaGraphLaunch"
HOST = (
    ("user_annotation", "execute_new_64_context_0(0)_generation_64(64)", 420.0),
    ("cpu_op", "aten::copy_", 14.0),
    ("cpu_op", "aten::index_select", 21.0),
)


def decode_trace() -> str:
    """Return the JSON text of the trace of one rank."""
    properties = f'{{"id": {DEVICE}, "name": "NVIDIA H100 80GB HBM3", "numSms": {PROCESSORS}}}'
    head = f'{{\n  "schemaVersion": 1,\n  "deviceProperties": [\n    {properties}\n  ],\n  "traceEvents": [\n'
    return head + ",\n".join(_events()) + "\n  ]\n}\n"


def _events() -> Iterator[str]:
    generator = random.Random(4)  # not security-relevant
    now_ns = 5_000_000_000_123
    for iteration in range(ITERATIONS):
        correlation = 100 + iteration
        host_ns = now_ns
        for category, name, lasts_us in HOST:
            args = f'"External id": {correlation}, "Ev Idx": {3 * iteration}'
            yield _event((category, name), (PID, PID), host_ns, round(lasts_us * 1000), args)
            host_ns += 5_000
        args = f'"External id": {correlation}, "cbid": 311, "correlation": {correlation}'
        yield _event(("cuda_runtime", LAUNCH), (PID, PID), host_ns, 95_000, args)
        yield _arrow("s", PID, PID, host_ns, correlation)
        now_ns += 60_000
        yield _arrow("f", DEVICE, STREAM, now_ns, correlation)
        for node in range(LAYERS * len(KERNELS)):
            name, mean_us, blocks, threads = KERNELS[node % len(KERNELS)]
            lasts_ns = round(mean_us * generator.uniform(930, 1100))
            args = (
                f'"External id": {correlation}, "queued": 0, "device": {DEVICE}, "context": 1, "stream": {STREAM}, '
                f'"correlation": {correlation}, "registers per thread": {32 + 8 * (node % 10)}, '
                f'"shared memory": {1024 * (node % 10)}, "blocks per SM": {blocks / PROCESSORS:.6f}, '
                f'"warps per SM": {blocks * threads / 32 / PROCESSORS:.6f}, "grid": [{blocks}, 1, 1], '
                f'"block": [{threads}, 1, 1], "est. achieved occupancy %": {min(100, threads // 20)}, '
                f'"graph id": 7, "graph node id": {70_000 + node}'
            )
            yield _event(("kernel", name), (DEVICE, STREAM), now_ns, lasts_ns, args)
            now_ns += lasts_ns + generator.randrange(700, 1500)
        now_ns += 180_000


def _event(kind: tuple[str, str], track: tuple[int, int], start_ns: int, lasts_ns: int, args: str) -> str:
    (category, name), (pid, tid) = kind, track
    return (
        f'  {{\n    "ph": "X", "cat": "{category}", "name": "{name}", "pid": {pid}, "tid": {tid},\n'
        f'    "ts": {_us(start_ns)}, "dur": {_us(lasts_ns)},\n    "args": {{\n      {args}\n    }}\n  }}'
    )


def _arrow(phase: str, pid: int, tid: int, time_ns: int, number: int) -> str:
    end = ', "bp": "e"' if phase == "f" else ""
    return (
        f'  {{\n    "ph": "{phase}", "id": {number}, "pid": {pid}, "tid": {tid}, "ts": {_us(time_ns)},\n'
        f'    "cat": "ac2g", "name": "ac2g"{end}\n  }}'
    )


def _us(time_ns: int) -> str:
    return f"{time_ns // 1000}.{time_ns % 1000:03d}"
