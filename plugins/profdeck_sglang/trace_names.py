"""How SGLang names its forward passes in a trace; see :class:`profdeck_traces.analysis.step_names.StepNames`.

By ``build_step_span_name`` in sglang/srt/utils/profile_utils.py (0.5.23); before 0.5.11 they had no names:

- ``step[EXTEND bs=1 toks=6]``, ``step[DECODE bs=2]``, ``step[VERIFY bs=2]`` (``TARGET_VERIFY`` of old),
  ``step[DRAFT bs=2]``, ``step[DRAFT_LOOP raw_bs=2 bs=4 topk=1]`` (``bs`` is padded) and other modes;
- with detailed annotations also, say, ``step[MIXED bs=3 c=1 g=2 c_sq=6 ... g_sq=2 ...]``: requests and tokens of
  prefill (``c``) and of decoding (``g``).
"""

ITERATION = (
    r"step\[(?:(?P<prefill>EXTEND)|(?P<decode>DECODE)|(?P<mixed>MIXED)|(?:TARGET_)?(?P<stage>\w+))"
    r" (?:raw_)?bs=(?P<requests>\d+)"
    r"(?: .*?\b(?:toks|c_sq)=(?P<prefill_tokens>\d+))?"
    r"(?: .*?\bg_sq=(?P<decode_tokens>\d+))?"
    r"(?: .*)?\]"
)
