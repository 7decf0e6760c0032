"""What kind of work a kernel does, told from its name by an ordered table that users can extend."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import attrs
import numpy as np

from profdeck_traces.reading.columns import DEVICE_WORK
from profdeck_traces.reading.trace import Trace

COMMUNICATION = "communication"
MEMORY_COPY, MEMORY_SET = "memory copy", "memory set"
UNCLASSIFIED = "unclassified"

# Names of C++ templates grow to many kilobytes; what a kernel is stands at the front.
_MAX_LENGTH = 2000
_MAX_KNOWN = 10_000
_MAX_CLASSIFIED = 5000
"""Maximum number of names to classify per trace. No real program has this many. A long name takes a millisecond."""
_KINDS = {"gpu_memcpy": MEMORY_COPY, "gpu_memset": MEMORY_SET}

# CANN ends a name with the type of the operator, its version and numbers; what it is a part of stands before. The types
# are those of its operator library, as far as the words of the table below do not tell them.
_CANN_TYPE = re.compile(r"(?:^|_)(?:Inplace)?([A-Z][A-Za-z\d]*?)D?(?:V\d)?D?[\d_]*$")
_CANN_CLASSES = {
    MEMORY_SET: "MemSet",
    "gemm": "Addmv Dot Einsum FullyConnection Linear",
    "sort and index": "Cummax Cummin MaskedSelect OneHot Where",
    "reduction": "BiasAddGrad L2Loss Median SquareSum SquareSumAll",
    "copy": """AsStrided AsStridedGrad BroadcastTo Cast Concat Contiguous DepthToSpace Diag DiagPart Expand ExpandDims
        Flatten Identity MirrorPad NpuFormatCast Pack Pad PadV3Grad RepeatInterleave Reshape Reverse Roll Slice
        SpaceToDepth Split SplitV Squeeze Stack StridedSlice StridedSliceGrad TensorMove Tile TransData Transpose
        Unpack Unsqueeze ViewCopy""",
    "elementwise": """Abs AccumulateN Acos Add AddN AddRelu Adds ApproximateEqual Arange Asin Assign AssignAdd
        AssignSub Atan Axpy BiasAdd BitwiseAnd BitwiseNot BitwiseOr BitwiseXor Ceil ClipByValue Cos Cosh Digamma Div
        DivNoNan Equal Erf Erfc Erfinv Exp Expm Eye Fill Floor FloorDiv FloorMod FusedMulAdd FusedMulAddN Greater
        GreaterEqual Invert IsFinite IsInf IsNan LeftShift Lerp Less LessEqual Lgamma LinSpace Log Log1p LogAddExp
        LogicalAnd LogicalNot LogicalOr LogicalXor Logit MaskedFill MaskedScale Maximum Minimum Mod Mul MulAddn Muls
        NanToNum Neg NotEqual OnesLike Pow Pows PowTensorScalar Range RealDiv Reciprocal ReciprocalGrad RightShift Rint
        Round Rsqrt RsqrtGrad Select Sign Sin Sinh Sqrt SqrtGrad Square SquaredDifference Sub Tan Threshold Tril Triu
        Trunc Truncate TruncateDiv Xlogy ZerosLike""",
}
_CLASS_OF_CANN_TYPE = {name: category for category, names in _CANN_CLASSES.items() for name in names.split()}

# The first row that fits decides, so what is special comes first: work that was fused into a kernel has its own names
# in it. Names are matched in small letters; white space in patterns means nothing. The words are from traces of CUDA,
# ROCm, Triton and CANN, and from the rules of TraceLens and of the Nsight scripts that come with inference engines.
_TABLE = (
    # Inductor lists the operators that it fused: https://github.com/pytorch/pytorch, torch/_inductor/codegen/triton.py.
    # That of torch_npu does not tell pointwise work from reductions ("unk").
    ("attention", r"^triton_tem_\w*attention"),
    ("convolution", r"^triton_tem_\w*conv"),
    ("gemm", r"^triton_(tem|mm|bmm)_|^triton_unk_\w*matmul"),
    ("embedding", r"^triton_(poi|red|per|unk)_\w*embedding"),
    ("normalisation", r"^triton_(red|per|unk)_\w*(rsqrt|norm)"),
    ("loss", r"^triton_(red|per|unk)_\w*(nll_loss|cross_entropy)"),
    ("softmax", r"^triton_(red|per|unk)_\w*softmax"),
    ("reduction", r"^triton_(red|per)_|^triton_unk_\w*_(sum|mean|amax|amin|argmax|argmin|var)(?![a-z])"),
    ("activation", r"^triton_(poi|unk)_\w*(silu|gelu|relu|sigmoid|tanh)"),
    ("elementwise", r"^triton_(poi|for|unk)_"),
    (
        COMMUNICATION,
        r"""nccl|rccl|hccl|hcom_|oneccl|msccl|gloo|multimem|deep_ep|(nv|roc|i)shmem|symm_mem|userbuffers
        |(?<!block)(?<!warp)all_?reduce|all_?gather|reduce_?scatter|all_?to_?all|(?<![a-z])a2a(?![a-z])
        |cross_device_reduce|quick_?reduce|(one|two)_?shot_?(push|pull|reduce)|send_?recv|mori::
        |ep(dispatch|combine)|moe_?(distribute|dispatch|combine)|dispatch\w*combine|dispatch_?layout|notify_?dispatch
        |rdmasend|intranode|internode|low_latency_(dispatch|combine)|all_peers
        |barrier_all""",
    ),
    (
        "moe",
        r"""moe|expert|group(ed)?_?(gemm(?!a)|mat_?mul|topk)|groupproblemshape|topk_?(gating|softmax|sigmoid)
        |gating_?top_?k|bmm_(mx)?(e\dm\d|bfloat16|fp16)|matmul_ogs|_topk_forward|bitmatrix|rout(er|ing)(?![a-z])
        |routing_?indices|routing_?renorm|ep_(scatter|gather)|expandinputrows|finalize(kernel|deepseek)
        |shuffle_rows|grouped_?(bias|dynamic)|sort_chunks_by_map|row_id_map|^_?permute_kernel|unpermute|(pre|post)_reorder|src2dst|eplb""",
    ),
    (
        "kv cache",
        r"""(reshape|concat|quant)_?and_?cache|reshape_?cache|paged_?cache
        |(set|store|append|copy|move|transfer|write|swap|gather)_?(paged_?)?(kv|mla_kv|k_cache|cache)
        |(copy|swap)_blocks|gather_\w{0,40}cache|kv_?indices|kv_buffer|block_table|page_table
        |slot_mapping|req_to_token|kvrmsnormropecache|scatterpakv""",
    ),
    (
        "linear attention",
        r"""mamba|selective_(scan|state)|(?<![a-z])ssd_|chunk_(scan|state|cumsum|fwd|bwd|gated|kda|gla|local)
        |bmm_chunk|state_passing|conv1d|delta_?rule|(?<![a-z])g[dl]n_|(?<![a-z])kda_|gated_delta|scaled_dot_kkt
        |recompute_w_u|fused_recurrent|lightning_attn|linear_attn|rwkv|wy_fast|solve_tril|merge_\d+x\d+_to""",
    ),
    (
        "attention",
        r"""attention|attn|flash_(fwd|bwd|decod)|(?<![a-z])flash::|flash_?mla|fmha|(?<![a-z])mha_|kernel_mha
        |(?<![a-z])mla_|_mla(?![a-z])|mla_?(prolog|preprocess|operation)|(?<![a-z])mlapo|ring_?mla
        |nsa_?(compress|select)|sdpa|(?<![a-z])xqa|(batch|single)_?(prefill|decode)|paged_(decode|prefill)
        |(?<![a-z])[gm]qa(?![a-z])|split_?kv|(?<![a-z])pa_(fwd|decode|prefill)|merge_states?
        |^_(fwd|bwd)_(grouped_)?kernel|^_bwd_preprocess|reduce_segments|lse_combine|combine_lse|mqa_logits|indexer
        |sparse_(decode|prefill)|alibi""",
    ),
    ("kv cache", r"kv_?cache(?!data)|paged_?kv"),
    ("copy", r"nchw_?to_?nhwc|nhwc_?to_?nchw"),
    (
        "convolution",
        r"""conv(?![a-z])|conv\d?d|convol|scudnn|winograd|(?<![a-z])(?<!pool\d)[fdw](prop|grad)(?![a-z])|[dw]grad_(alg|engine)
        |implicit_?gemm|cudnn::(cnn|detail)|cask_cudnn|im2col|col2im|miopen\w*conv|igemm_(fwd|bwd|wrw)|depthwise""",
    ),
    (
        "gemm",
        r"""(?<!deep_)(?<!fb)gemm(?!a(?![a-z])|arms)|gemv|mat_?mul|nvjet|cublas|hipblas|cijk_|(?<![a-z])b?mm_
        |_b?mm(?![a-z])|add_?b?mm|linear_?operation|scaled_mm|wv_?split_?k|split_?k_?reduce|reduce_split_k|marlin|machete|cutlass_\d
        |cutlass::(device_)?kernel|lora_(shrink|expand|[ab]_)|do_(shrink|expand)|[sb]gmv|xmma|tensorop
        |(?<![a-z])dot_kernel""",
    ),
    (
        "loss",
        r"""nll_?loss|cross_?entropy|(mse|l1|bce|smooth_l1)_?(loss|kernel|backward)|(ctc|lp|embedding)_?loss|kl_?div
        |log_?probs?(?![a-z])""",
    ),
    (
        "sampling",
        r"""(?<!up)(?<!down)(?<!up_)(?<!grid)(?<!grid_)sampl(e|ing)|top_?[kp]_?top_?p|top_?p|min_?p_kernel|top_?k_?(mask|renorm|sampl)|multinomial|penalt|gumbel
        |reject|logits|(?<!gen)bitmask|bad_words|speculat|draft|verify|eagle|(?<!e)n_?gram|build_tree|greedy""",
    ),
    (
        "input preparation",
        r"""prepare_|(?<![a-z])metadata|seq_?lens?(?![a-z])|input_ids|idx_mapping|req_ind|page_ind|token_to_req
        |cu_seqlens""",
    ),
    ("position", r"rotary|(?<!p)rope(?!ration)|(?<![a-z])position|pos_enc|pos_ids|cos_sin_cache"),
    ("embedding", r"embed|bounds_check_indices|pooled_embs"),
    (
        "optimiser",
        r"""(?<!h)adam|adagrad|adafactor|rmsprop|momentum|gradient_?descent|(?<![a-z])sgd|(?<![a-z])lamb(?!da)|muon|newton_schulz
        |multi_tensor|foreach|addcdiv|addcmul""",
    ),
    (
        "normalisation",
        r"""(rms|layer|group|batch|instance|ada|qk|l2|add|gemma|pre|post|dual|fused)_?norm|(?<![a-z])norm_(?!two)
        |_norm_|deep_?norm|bn_?infer|norm_?(kernel|fwd|bwd|forward|backward|rope)|(?<![a-z])bn_(fw|bw)|rowwise_?moments|gamma_?beta
        |computefusedparams|normali[sz]ation|(?<![a-z])ln_(fwd|bwd)|bntraining""",
    ),
    (
        "activation",
        r"""act_and_mul|silu|gelu|(?<![a-z])relu|_relu|leakyrelu|swish|swiglu|geglu|(?<![a-z])glu|softplus|sigmoid
        |tanh|mish(_|grad|$)|activation|threshold_kernel|(?<![a-z])[cs]?elu(?![a-z])|(?<![a-z])[cs]?elu_?grad|prelu
        |^aclnn\w*relu|relugrad""",
    ),
    ("softmax", r"soft_?max"),
    (
        "quantisation",
        r"""quant|qparam|h?fp8(rowwise)?_to|to_h?fp[48]|(?<![a-z])cvt_|mxfp[48]|nvfp4|hadamard|(up|down)cast|ue8m0|awq
        |gptq""",
    ),
    ("random", r"philox|distribution_|drop_?out|random|curand|bernoulli|genbitmask|(?<![a-z])rand|randperm"),
    (
        "pooling",
        r"""(max|avg|average|adaptive)_?pool|pooling|up_?sample|interpolat|resize_?(bi)?(linear|cubic|nearest)
        |grid_?sample|roi_?align""",
    ),
    (
        "sort and index",
        r"""sort|radix|scan|(?<!with_)index|gather|scatter|top_?k|unique|non_?zero|searchsorted|cumsum|cumprod
        |histogram|bincount|compact|deviceselect|reducebykey|masked_select|take_along|segment""",
    ),
    ("reduction", r"reduce|(?<![a-z])(sum|mean|amax|norm)(?![a-z])|lp_?norm|arg_?m(ax|in)|logsumexp"),
    (MEMORY_COPY, r"memcpy|rocclr_copy|^sdma"),
    (MEMORY_SET, r"memset|rocclr_fill|atomic_?addr_?clean"),
    (
        "copy",
        r"""copy|copies|catarray|(?<![a-z])cat_|concat|transpose|permute|(?<![a-z])(un)?pad_|(un)?pack|cast_|flip
        |roll_""",
    ),
    (
        "elementwise",
        r"""element_?wise|point_?wise|functor|unary|binary_op|arange|(?<![a-z])fill|masked_fill|clamp
        |(?<![a-z])(add|mul|div|sub|scale|bias|gate|lerp|where|tril|triu)_|_(add|mul)_|scal(e\w*)?_kernel""",
    ),
)


@attrs.frozen
class Rule:
    """Kernels whose name, or type of operator, has a match of the pattern anywhere are of this class."""

    category: str
    pattern: re.Pattern[str]


@functools.cache
def _rules() -> tuple[Rule, ...]:
    """Compile the table of kernel classes on first use, because it takes 20 ms and not all traces have kernels."""
    return tuple(Rule(category, re.compile(pattern, re.VERBOSE)) for category, pattern in _TABLE)


@attrs.frozen
class Classifier:
    """Tells the class of kernels, copies and fills."""

    extra: Sequence[Rule] = ()
    """These decide before all else."""
    _known: dict[tuple[str, str, str], str] = attrs.field(factory=dict, init=False, eq=False, repr=False)

    def classify(self, name: str, kind: str, operator: str = "") -> str:
        """Return the class of a kernel, copy or fill; the first 2,000 characters of names count.

        Args:
            name: Its name.
            kind: Its category in the trace.
            operator: The type of the operator that it carries out, where that is known: it tells more than the name,
                which may have that of a layer of the model in it.
        """
        key = name[:_MAX_LENGTH], kind, operator[:_MAX_LENGTH]
        known = self._known.get(key)
        if known is None:
            known = self._classify(*key)
            if len(self._known) < _MAX_KNOWN:  # ranks have the same kernels
                self._known[key] = known
        return known

    def _classify(self, name: str, kind: str, operator: str) -> str:
        for rule in self.extra:
            if rule.pattern.search(name) or (operator and rule.pattern.search(operator)):
                return rule.category
        if kind in _KINDS:
            return _KINDS[kind]
        found = _by_table(operator) if operator else UNCLASSIFIED
        return _by_table(name) if found == UNCLASSIFIED else found

    def classes_of(self, trace: Trace) -> list[str]:
        """Return the class of each name in a trace's tables, or an empty string if the name is not device work."""
        tables = trace.tables
        classes = [""] * len(tables.names)
        for place, code in enumerate(np.flatnonzero(tables.names_of_categories(DEVICE_WORK)).tolist()):
            name, kind = tables.names[code], tables.categories[tables.name_category[code]]
            classes[code] = (
                self.classify(name, kind, trace.kernel_types.get(name, "")) if place < _MAX_CLASSIFIED else UNCLASSIFIED
            )
        return classes


def _by_table(name: str) -> str:
    if (found := _CANN_TYPE.search(name)) and found[1] in _CLASS_OF_CANN_TYPE:
        return _CLASS_OF_CANN_TYPE[found[1]]
    name = name.lower()
    return next((rule.category for rule in _rules() if rule.pattern.search(name)), UNCLASSIFIED)
