"""Tests of kernel classes by name and of user-defined rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from profdeck_traces.analysis.class_rules import load_rules
from profdeck_traces.analysis.classes import COMMUNICATION, UNCLASSIFIED, Classifier, Rule
from profdeck_traces.base.errors import ConfigError

NAMES = {
    COMMUNICATION: [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclKernel_SendRecv_RING_SIMPLE_Sum_int8_t(ncclDevComm*, unsigned long, ncclWork*)",
        "void vllm::cross_device_reduce_1stage<__nv_bfloat16, 8>(vllm::RankData*, vllm::RankSignals)",
        "void flashinfer::trtllm_allreduce_fusion::allreduce_fusion_kernel_oneshot_lamport<(AllReducePattern)1>()",
        "void deep_ep::internode_ll::dispatch<true, 3, 7168>()",
        "multimem_all_reduce_kernel",
        "two_shot_all_reduce_kernel_inplace",
        "nvshmemi_transfer_kernel",
        "hcom_allReduce__445_5",
        "MoeDistributeDispatchV2",
        "hcom_batchSendRecv_",
        "MatmulAllReduceAddRmsNorm",
        "DispatchFFNCombine",
        "NotifyDispatch",
    ],
    "moe": [
        "fused_moe_kernel",
        "void vllm::moe::topkGatingSoftmax<8, 256, 4, 16>()",
        "void vllm::moe::moe_align_block_size_kernel<int>()",
        "void ck::kernel_moe_gemm_2lds<ck::GridwiseMoeGemmBlockScale>()",
        "bmm_E4m3_E4m3E4m3_Fp32_t128x8x512_s6_et64x8_m64x8x32_cga1x1x1_16dp256b_TN",
        "_fwd_kernel_ep_gather",
        "GroupedMatmul",
        "MoeGatingTopK",
        "MoeInitRoutingV3",
        "MoeTokenUnpermuteGrad",
        "GroupedMatmulSwigluQuant",
        "aclnnGroupedMatmulV5_GroupedMatmul",
    ],
    "kv cache": [
        "void vllm::reshape_and_cache_flash_kernel<__nv_bfloat16, unsigned char, (vllm::Fp8KVCacheDataType)1>()",
        "void vllm::concat_and_cache_mla_kernel<>()",
        "create_flashinfer_kv_indices_triton",
        "KvRmsNormRopeCache",
        "ReshapeAndCache",
    ],
    "linear attention": [
        "chunk_gated_delta_rule_fwd_kernel_h",
        "_causal_conv1d_fwd_kernel",
        "_chunk_scan_fwd_kernel",
        "RecurrentGatedDeltaRule",
    ],
    "attention": [
        "void flash::flash_fwd_splitkv_kernel<Flash_fwd_kernel_traits<128>>()",
        "void cutlass::device_kernel<flash::enable_sm90_or_later<flash::FlashAttnFwdSm90<>>>()",
        "fmha_cutlassF_bf16_aligned_64x128_rf_sm80(PyTorchMemEffAttention::AttentionKernel<cutlass::bfloat16_t>)",
        "void vllm::paged_attention_v2_kernel<unsigned short, 128, (vllm::Fp8KVCacheDataType)0, false, 512>()",
        "void flashinfer::BatchPrefillWithPagedKVCacheKernel<flashinfer::KernelTraits<>>()",
        "cudnn_generated_fort_native_sdpa_sm90_flash_fprop_wgmma_f16_knob_7_64x128x128",
        "_ZN5aiter24fmha_fwd_hd128_bf16_a32_rtneE",
        "void deep_gemm::sm90_fp8_mqa_logits<128>()",
        "aclnnFlashAttentionScore_FlashAttentionScore_FlashAttentionScore",
        "_fwd_grouped_kernel_stage1",
        "FusedInferAttentionScore",
        "MlaPrologV3",
        "NsaCompressGrad",
        "LightningIndexer",
    ],
    "convolution": [
        "sm80_xmma_fprop_implicit_gemm_indexed_tf32f32_tf32f32_f32_nhwckrsc_nchw_execute_kernel_cudnn_infer",
        "void cudnn::detail::dgrad_engine<float, 512, 6, 5, 3, 3, 3, false>(int, int, int, float const*)",
        "cudnn_infer_volta_scudnn_128x64_relu_medium_nn_v1",
        "Conv2DBackpropFilter6",
        "Conv3DBackpropInputV2",
    ],
    "gemm": [
        "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT",
        "ampere_bf16_s16816gemm_bf16_128x64_ldg8_f2f_stages_64x4_tn",
        "void cutlass::Kernel<cutlass_80_tensorop_s1688gemm_128x64_32x6_nt_align1>()",
        "Cijk_Alik_Bljk_BBS_BH_Bias_HAS_SAV_UserArgs_MT256x256x64",
        "void deep_gemm::sm90_fp8_gemm_1d2d_impl<0u, 7168u>()",
        "void marlin::Marlin<__nv_bfloat16, 1125899906909960l>()",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float>()",
        "triton_tem_fused_mm_3",
        "aclnnMm_MatMulCommon_MatMulV2",
        "MatMulV3",
        "TransposeBatchMatMul",
        "QuantBatchMatmulV3",
        "LinearOperation",
        "Baddbmm",
        "triton_unk_fused_matmul_mul_permute_0",
    ],
    "sampling": ["void flashinfer::sampling::TopKTopPSamplingFromProbKernel<1024u>()", "_topk_topp_kernel"],
    "position": [
        "void vllm::rotary_embedding_kernel<c10::BFloat16, true>()",
        "void flashinfer::BatchQKApplyRotaryPosIdsCosSinCacheEnhancedKernel<true, 128u>()",
        "InterleaveRope",
        "RotaryMulGrad",
    ],
    "embedding": [
        "void split_embedding_codegen_forward_unweighted_kernel<c10::Half>(fbgemm_gpu::Tensor)",
        "EmbeddingDenseGradV2",
    ],
    "optimiser": [
        "void at::native::multi_tensor_apply_kernel<at::native::FusedAdamMathFunctor<float, 4>>()",
        "ApplyAdamWV2",
        "ApplyGradientDescent",
    ],
    "normalisation": [
        "void vllm::fused_add_rms_norm_kernel<c10::BFloat16, 8>()",
        "_gemma_rmsnorm_kernel",
        "triton_red_fused__to_copy_add_mean_mul_pow_rsqrt_3",
        "void (anonymous namespace)::LayerNormForwardCUDAKernel<cub::WarpAllReduce<float>>()",
        "void cudnn::bn_fw_tr_1C11_singleread<float, 512, true, 1, 2, 0>()",
        "aclnnRmsNorm_RmsNormAiCore_RmsNorm",
        "AddRmsNormDynamicQuant",
        "BNInfer",
        "DeepNormGrad",
        "LayerNormBetaGammaBackpropV2",
        "triton_unk_fused_native_layer_norm_0",
    ],
    "activation": [
        "void vllm::act_and_mul_kernel<c10::BFloat16, &vllm::silu_kernel<c10::BFloat16>, true>()",
        "_silu_mul_fp8_quant_deep_gemm",
        "triton_poi_fused_mul_silu_1",
        "DequantSwigluQuant",
        "GeluGradV2",
        "EluGradV2",
        "PRelu",
        "MishGrad",
    ],
    "softmax": [
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<4, float>()",
        "triton_per_fused__softmax_2",
        "ScaledMaskedSoftmaxGradV2",
    ],
    "loss": ["SoftmaxCrossEntropyWithLogits", "CTCLossV2"],
    "pooling": ["AvgPool3DGrad", "ResizeBilinearV2", "void at::native::upsample_bilinear2d_out_frame<float, float>()"],
    "quantisation": [
        "void per_token_group_quant_8bit_kernel<c10::BFloat16>()",
        "_hadamard_quantize_fp8",
        "DynamicQuantV2",
    ],
    "random": [
        "void at::native::distribution_elementwise_grid_stride_kernel<float, 4>()",
        "DSAStatelessGenBitMask",
        "StatelessRandperm",
    ],
    "sort and index": [
        "void at::native::sbtopk::gatherTopK<float, unsigned int, 2, false>()",
        "void cub::DeviceRadixSortOnesweepKernel<cub::DeviceRadixSortPolicy<long, int, int>::Policy800>()",
        "GatherV2",
        "MaskedSelectV3",
        "OneHotD",
    ],
    "reduction": [
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::ArgMaxOps<float>>>()",
        "triton_red_fused_sum_0",
        "LpNormReduceV2",
        "L2Loss",
        "SquareSumV1",
        "BiasAddGrad",
        "triton_unk_fused_mean_0",
    ],
    "memory copy": ["__amd_rocclr_copyBuffer", "MEMCPY_ASYNC"],
    "memory set": [
        "__amd_rocclr_fillBufferAligned",
        "aclnnMm_MatMulCommon_MemSet",
        "AtomicAddrClean",
    ],
    "copy": [
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<float, CatArrInputTensorMetadata<float>>()",
        "void at::native::unrolled_elementwise_kernel<at::native::direct_copy_kernel_cuda(at::TensorIteratorBase&)>()",
        "aclnnReduceSum_CastAiCore_Cast",
        "trans_TransData_10",
        "SplitVD",
        "RepeatInterleaveV2",
        "aclnnInplaceCopy_ViewCopyAiCore_ViewCopy",
    ],
    "elementwise": [
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>()",
        "triton_poi_fused_all_reduce_add_1",
        "aclnnAddmm_AddAiCore_Add",
        "RealDiv139",
        "InplaceAdd",
        "AddN",
        "Log1p",
        "ClipByValueV2",
        "triton_unk_fused_eq_where_zeros_like_1",
    ],
    UNCLASSIFIED: ["my_kernel", ""],
}


@pytest.mark.parametrize(("category", "name"), [(category, name) for category in NAMES for name in NAMES[category]])
def test_kernel_is_classified_by_its_name(category: str, name: str) -> None:
    assert Classifier().classify(name, "kernel") == category


def test_operator_type_takes_precedence_over_the_name() -> None:
    name = "Default/network/attention/Dense-op7"

    assert Classifier().classify(name, "kernel") == "attention"
    assert Classifier().classify(name, "kernel", "MatMulV2") == "gemm"
    assert Classifier().classify(name, "kernel", "Op7") == "attention"
    assert Classifier([Rule("ours", re.compile("^MatMulV2$"))]).classify(name, "kernel", "MatMulV2") == "ours"


def test_copies_and_fills_are_classified_by_kind() -> None:
    assert Classifier().classify("Memcpy HtoD (Pinned -> Device)", "gpu_memcpy") == "memory copy"
    assert Classifier().classify("anything", "gpu_memset") == "memory set"


@pytest.mark.parametrize("unit", ["a", "_A", "gather_", "scal", "1_", "triton_poi_fused_", "miopen"])
def test_only_the_front_of_a_huge_name_is_looked_at(unit: str) -> None:
    name = unit * (10_000_000 // len(unit))

    assert Classifier().classify(name + "nccl", "kernel") == Classifier().classify(name[:2000], "kernel")


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("rules.yaml", "- {class: moe, pattern: 'my_.*_Kernel'}\n- class: ours\n  pattern: ^nccl|Memcpy\n"),
        ("rules.yml", "rules:\n- {class: moe, pattern: my_.*_Kernel}\n- {class: ours, pattern: ^nccl|Memcpy}\n"),
        ("rules.toml", "rules = [{class = 'moe', pattern = 'my_.*_Kernel'}, {class='ours', pattern='^nccl|Memcpy'}]"),
        ("b.toml", "[[rules]]\nclass='moe'\npattern='my_.*_Kernel'\n[[rules]]\nclass='ours'\npattern='^nccl|Memcpy'"),
    ],
)
def test_user_rules_take_precedence(tmp_path: Path, file: str, text: str) -> None:
    (tmp_path / file).write_text(text)

    classifier = Classifier(load_rules(tmp_path / file))

    assert classifier.classify("nccl_my_gemm_Kernel", "kernel") == "moe"
    assert classifier.classify("ncclDevKernel", "kernel") == "ours"
    assert classifier.classify("Memcpy DtoH", "gpu_memcpy") == "ours"
    assert classifier.classify("my_gemm_kernel", "kernel") == "gemm"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- {class: moe, patern: x}", "rule 1: unknown key 'patern'. Did you mean 'pattern'? Allowed: class, pattern."),
        ("- {class: a, pattern: b}\n- {class: moe}", "rule 2: 'pattern' must be a text that is not empty, got nothing"),
        ("- {class: 3, pattern: x}", "rule 1: 'class' must be a text that is not empty, got 3 (an integer)."),
        ("- {class: a, pattern: ''}", "rule 1: 'pattern' must be a text that is not empty, got '' (text)."),
        ("- {class: a, pattern: 'f('}", "rule 1: the pattern 'f(' is no regular expression: missing ), "),
        ("- moe", "rule 1: expected the keys class and pattern, got 'moe' (text)."),
        ("moe: my_.*", "expected a list of rules such as {class: moe, pattern: my_moe_.*}"),
        ("", "expected a list of rules"),
        ("[", "not valid YAML: "),
    ],
)
def test_invalid_rule_is_reported(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "rules.yaml"
    path.write_text(text)

    with pytest.raises(ConfigError) as raised:
        load_rules(path)

    assert str(raised.value).startswith(f"{path}: {message}")


def test_unreadable_file_is_a_config_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        load_rules(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="must end in .yaml, .yml or .toml"):
        load_rules(tmp_path / "rules.json")
