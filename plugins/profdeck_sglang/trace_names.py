"""Pattern for SGLang's forward-pass names in traces.

:class:`profdeck_traces.analysis.step_names.StepNames` loads this pattern. The names are created by
``build_step_span_name`` in sglang/srt/utils/profile_utils.py (0.5.23). Versions before 0.5.11 wrote no names. Examples:

- ``step[EXTEND bs=1 toks=6]``, ``step[DECODE bs=2]``, ``step[VERIFY bs=2]`` (formerly ``TARGET_VERIFY``),
  ``step[DRAFT bs=2]``, ``step[DRAFT_LOOP raw_bs=2 bs=4 topk=1]`` (``bs`` is padded) and other modes;
- ``step[MIXED bs=3 c=1 g=2 c_sq=6 ... g_sq=2 ...]`` with detailed annotations: numbers of requests and tokens in
  prefill (``c``) and decode (``g``).

:mod:`profdeck_sglang.iterations` annotates the complete batch:
``run_batch[c=1 g=2 c_toks=40 g_toks=2 resumed=1 resumed_toks=40 running=0 waiting=5 kv=83 limit=16]``. ``resumed`` is
the number of requests that resume after a retraction. ``running`` is the number of running requests that wait while a
prefill batch runs. ``waiting`` is the queue length, ``kv`` is the percentage of the KV cache in use, and ``limit`` is
the maximum number of running requests.
"""

ITERATION = (
    r"(?:run_batch\[c=(?P<prefill_requests>\d+) g=(?P<decode_requests>\d+)"
    r"|step\[(?:(?P<prefill>EXTEND)|(?P<decode>DECODE)|(?P<mixed>MIXED)|(?:TARGET_)?(?P<stage>\w+))"
    r" (?:raw_)?bs=(?P<requests>\d+))"
    r"(?: .*?\b(?:toks|c_sq|c_toks)=(?P<prefill_tokens>\d+))?"
    r"(?: .*?\bg_(?:sq|toks)=(?P<decode_tokens>\d+))?"
    r"(?: resumed=(?P<resumed_requests>\d+) resumed_toks=(?P<resumed_tokens>\d+))?"
    r"(?: running=(?P<running_requests>\d+))?(?: waiting=(?P<waiting_requests>\d+))?(?: kv=(?P<kv_percent>\d+))?"
    r"(?: limit=(?P<max_requests>\d+))?"
    r"(?: .*)?\]"
)
