"""Pattern for vLLM's iteration names in traces.

:class:`profdeck_traces.analysis.step_names.StepNames` loads this pattern. The names are created by
``Worker.annotate_profile`` in vllm/v1/worker/gpu_worker.py (0.32.0):

- ``execute_context_1(6)_generation_3(3)``: numbers of requests, with numbers of tokens in parentheses.
- ``execute_9_context_1(sq6sk6sqsq36sqsk36)_generation_3(sq3sk30sqsq3sqsk30)``: with ``detailed_trace_annotation``.
  The number after ``sq`` is the number of tokens.
- ``execute_context_1(40)_generation_3(12)_resumed_1(40)_draft_9_rejected_4_waiting_2_kv_87``: with the counts that
  :mod:`profdeck_vllm.iterations` appends. These are requests resumed after a preemption, with their tokens in
  parentheses, draft tokens, and draft tokens rejected since the previous iteration, each omitted if it is 0. They are
  followed by the number of waiting requests and the KV cache usage in percent.
- ``execute_new_1_cached_3``: in older versions. A cached request can be in either phase, so the stage is unknown.

:mod:`profdeck_vllm.diffusion_worker` names the iterations in diffusion stages of vLLM-Omni. The number is the number
of requests: ``diffusion_request(1)``, ``diffusion_batch(4)``, ``diffusion_step(2)``.
"""

ITERATION = (
    r"execute_(?:new_\d+_cached_\d+"
    r"|(?:\d+_)?context_(?P<prefill_requests>\d+)\((?:sq)?(?P<prefill_tokens>\d+)[^)]*\)"
    r"_generation_(?P<decode_requests>\d+)\((?:sq)?(?P<decode_tokens>\d+)[^)]*\)"
    r"(?:_resumed_(?P<resumed_requests>\d+)\((?P<resumed_tokens>\d+)\))?"
    r"(?:_draft_(?P<draft_tokens>\d+))?(?:_rejected_(?P<rejected_tokens>\d+))?"
    r"(?:_waiting_(?P<waiting_requests>\d+)_kv_(?P<kv_percent>\d+))?)"
    r"|diffusion_(?:request|batch|step)\((?P<requests>\d+)\)"
)
