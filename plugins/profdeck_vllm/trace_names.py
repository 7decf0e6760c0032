"""How vLLM names its iterations in a trace; see :class:`profdeck_traces.analysis.step_names.StepNames`.

Without and with ``detailed_trace_annotation`` (``Worker.annotate_profile`` in vllm/v1/worker/gpu_worker.py, 0.32.0),
and as it was before vLLM told the phases apart:

- ``execute_context_1(6)_generation_3(3)``: requests, and tokens in brackets;
- ``execute_9_context_1(sq6sk6sqsq36sqsk36)_generation_3(sq3sk30sqsq3sqsk30)``: ``sq`` are the tokens;
- ``execute_new_1_cached_3``: those cached may be in either phase, so no stage is read from it.

And as :mod:`profdeck_vllm.diffusion_worker` names them in diffusion stages of vLLM-Omni, with their requests:
``diffusion_request(1)``, ``diffusion_batch(4)``, ``diffusion_step(2)``.
"""

ITERATION = (
    r"execute_(?:new_\d+_cached_\d+"
    r"|(?:\d+_)?context_(?P<prefill_requests>\d+)\((?:sq)?(?P<prefill_tokens>\d+)[^)]*\)"
    r"_generation_(?P<decode_requests>\d+)\((?:sq)?(?P<decode_tokens>\d+)[^)]*\))"
    r"|diffusion_(?:request|batch|step)\((?P<requests>\d+)\)"
)
