"""vLLM options that cure performance problems. See `profdeck_traces.findings.cures`.

The option names are from vLLM 0.32.0 (vllm/engine/arg_utils.py).
"""

CURES = {
    "prefill-next-to-decode": "lower --max-num-batched-tokens, so that long prompts are split over more iterations",
    "prefill-bound": "cache shared prefixes: check that --no-enable-prefix-caching is not set, or add prefill servers",
    "request-queue": "raise --max-num-seqs, or add servers",
    "kv-pressure": "raise --gpu-memory-utilization, or add servers",
    "preemption": "lower --max-num-seqs, so that the KV cache holds all running requests",
    "decode-launch-bound": "let vLLM capture CUDA graphs: check that --enforce-eager is not set",
    "host-between-iterations": "schedule the next iteration while the model runs: check that --async-scheduling is set",
    "rejected-speculation": "lower num_speculative_tokens in --speculative-config",
}
