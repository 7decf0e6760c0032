"""SGLang options that cure performance problems. See `profdeck_traces.findings.cures`.

The option names are from SGLang 0.5.23 (sglang/srt/server_args.py).
"""

CURES = {
    "prefill-next-to-decode": "lower --chunked-prefill-size, so that long prompts are split over more iterations",
    "prefill-bound": "cache shared prefixes: check that --disable-radix-cache is not set, or add prefill servers",
    "request-queue": "raise --max-running-requests, or add servers",
    "kv-pressure": "raise --mem-fraction-static, or add servers",
    "preemption": "lower --max-running-requests, so that the KV cache holds all running requests",
    "decode-launch-bound": "let SGLang capture CUDA graphs: check that --disable-cuda-graph is not set",
    "host-between-iterations": "process outputs while the model runs: check that --disable-overlap-schedule is not set",
    "sampler": "use SGLang's fused sampling kernels: --sampling-backend flashinfer",
}
