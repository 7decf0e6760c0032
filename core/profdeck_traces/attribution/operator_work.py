"""Floating-point operations and memory traffic of operators, computed from their recorded inputs.

FLOPs are counted as in ``torch.utils.flop_counter``: two for each multiply-add in matrix products, attention and
convolutions. There are three differences:

- Causal attention counts only unmasked pairs of query and key.
- The weight gradient of a grouped convolution counts each group's channels once.
- The inputs of ``_flash_attention_forward``, ``_efficient_attention_forward`` and their backward operators are assumed
  to have the layout (batch, sequence, heads, depth).

Bytes are the minimum memory traffic: each input is read once, and each output is written once (the roofline model of
Williams, Waterman and Patterson, CACM 52, 2009). For norms and embeddings, only bytes are counted.

No work is counted for operators without a formula, or if the recorded inputs do not determine the result. Examples are
fused operators, custom kernels, and attention with variable sequence lengths or a sliding window.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import attrs

from profdeck_traces.attribution.dtypes import bytes_of, torch_dtype

_MAX_FLOPS = 2**62
_Shape = list[int]


@attrs.frozen
class OperatorWork:
    """Work of one operator call."""

    flops: int | None
    """Floating-point operations; ``None`` for norms and embeddings."""
    size_bytes: int | None
    """Minimum memory traffic; ``None`` if a data type is unknown."""
    dtype: str | None
    """Data type of the first operand, which determines the peak rate."""


@attrs.frozen
class _Inputs:
    """Recorded inputs of one call. An input that is not a tensor has shape ``[]`` and no dtype."""

    dims: list[Any]
    types: list[Any]
    concrete: list[Any]

    def shape(self, index: int) -> _Shape:
        """Return the shape of a tensor. Raise ValueError if the input is a tensor list or the shape is malformed."""
        value = self.dims[index]
        if not isinstance(value, list) or not all(type(size) is int and size >= 0 for size in value):
            raise ValueError
        return value

    def dtype(self, index: int) -> str | None:
        return torch_dtype(self.types[index]) if isinstance(self.types[index], str) else None

    def itemsize(self, index: int) -> int | None:
        dtype = self.dtype(index)
        return None if dtype is None else bytes_of(dtype)

    def bytes(self, *indices: int) -> int | None:
        """Return the total size of the given tensors. Raise IndexError or ValueError if a tensor was not recorded."""
        sizes = [(prod(self.shape(index)), self.itemsize(index)) for index in indices]
        return _total([None if size is None else count * size for count, size in sizes])

    def is_tensor(self, index: int) -> bool:
        return index < len(self.types) and self.dtype(index) is not None

    def value(self, index: int) -> Any:
        """Return a recorded scalar or list. Raise ValueError if it was not recorded."""
        text = self.concrete[index]
        if text in {"True", "False"}:
            return text == "True"
        return json.loads(text.replace("True", "true").replace("False", "false"))


def _total(sizes: Sequence[int | None]) -> int | None:
    known = [size for size in sizes if size is not None]
    return sum(known) if len(known) == len(sizes) else None


def _scaled(count: int, itemsize: int | None) -> int | None:
    return None if itemsize is None else count * itemsize


_SCALAR_TYPES = {"5": 2, "6": 4, "15": 2}
"""Element sizes of float16, float32 and bfloat16, keyed by their number in ``c10/core/ScalarType.h``."""


def _product(inputs: _Inputs, *, left: int, right: int, out_dtype: int | None = None) -> OperatorWork:
    """Count the product of an m x k and a k x n matrix, or of batches of such matrices, as 2 m k n FLOPs each."""
    first, second = inputs.shape(left), inputs.shape(right)
    if not 2 <= len(first) == len(second) <= 3 or first[-1] != second[-2] or first[:-2] != second[:-2]:  # noqa: PLR2004
        raise ValueError
    outputs = prod(first[:-1]) * second[-1]
    return _product_work(inputs, (left, right), outputs * first[-1], outputs, out_dtype)


def _vector_product(inputs: _Inputs, *, matrix: int) -> OperatorWork:
    """Count the product of an m x k matrix and a vector of k elements, which is the next argument."""
    rows, columns = inputs.shape(matrix)
    if inputs.shape(matrix + 1) != [columns]:
        raise ValueError
    return _product_work(inputs, (matrix, matrix + 1), rows * columns, rows, None)


def _grouped(inputs: _Inputs, *, offsets: int = 2, out_dtype: int | None = None) -> OperatorWork:
    """Count a grouped matrix product. Offsets split the rows, the columns or the inner dimension into groups.

    Rows after the last offset belong to no group, but they are counted because traces do not record the offsets.
    """
    first, second = inputs.shape(0), inputs.shape(1)
    if (len(first), len(second)) not in {(2, 3), (3, 2), (2, 2), (3, 3)} or first[-1] != second[-2]:
        raise ValueError
    groups = first[0] if len(first) == 3 else second[0] if len(second) == 3 else max(inputs.shape(offsets) or [1])  # noqa: PLR2004
    is_divided = {len(first), len(second)} == {2, 3}
    outputs = first[-2] * second[-1] * (1 if is_divided else groups)
    multiplications = first[-2] * first[-1] * second[-1] * (groups if len(first) == len(second) == 3 else 1)  # noqa: PLR2004
    return _product_work(inputs, (0, 1), multiplications, outputs, out_dtype)


def _product_work(
    inputs: _Inputs, operands: tuple[int, int], multiplications: int, outputs: int, out_dtype: int | None
) -> OperatorWork:
    size = inputs.itemsize(operands[0])
    if out_dtype is not None and inputs.concrete[out_dtype] != "":
        size = _SCALAR_TYPES.get(inputs.concrete[out_dtype])
    sizes = [inputs.bytes(*operands), _scaled(outputs, size)]
    if operands[0] == 1:  # input 0 is the bias
        sizes.append(inputs.bytes(0))
    return OperatorWork(2 * multiplications, _total(sizes), inputs.dtype(operands[0]))


def _attention(  # noqa: PLR0913 - one parameter per kind of input
    inputs: _Inputs,
    *,
    causal: int,
    backward: bool = False,
    heads: int = 1,
    lengths: Sequence[int] = (),
    windows: Sequence[int] = (),
) -> OperatorWork:
    """Count attention: two matrix products forward, and five backward, where the scores are recomputed.

    Args:
        inputs: Query, key and value, preceded by the output gradient in the backward pass.
        causal: Index of ``is_causal``, or of ``custom_mask_type``, which is 0 without a causal mask.
        backward: Whether the operator computes gradients.
        heads: Dimension of the heads, 1 or 2. The other of these dimensions is the sequence.
        lengths: Indices of tensors with sequence lengths. If the call has such a tensor, its work is unknown.
        windows: Indices of window sizes.
    """
    query, key, value = (inputs.shape(index + backward) for index in range(3))
    batch, query_heads, depth = query[0], query[heads], query[3]
    queries, keys, value_depth = query[3 - heads], key[3 - heads], value[3]
    if [batch, depth] != [key[0], key[3]] or [batch, key[heads], keys] != [value[0], value[heads], value[3 - heads]]:
        raise ValueError
    if any(inputs.is_tensor(index) for index in lengths):
        raise ValueError
    if any(inputs.concrete[index] not in {"", "-1"} for index in windows if index < len(inputs.concrete)):
        raise ValueError
    pairs = queries * keys
    if inputs.value(causal):
        if queries != keys:  # operators differ in how they align the mask
            raise ValueError
        pairs = queries * (queries + 1) // 2
    products = 3 * depth + 2 * value_depth if backward else depth + value_depth
    out = batch * query_heads * queries * value_depth
    operands = inputs.bytes(*range(backward, backward + 3))
    # Forward writes the output. Backward reads the output and its gradient, and writes the input gradients.
    sizes = [operands, _scaled(out, inputs.itemsize(backward))] + ([operands, inputs.bytes(0)] if backward else [])
    return OperatorWork(2 * batch * query_heads * pairs * products, _total(sizes), inputs.dtype(int(backward)))


def _convolution(inputs: _Inputs, *, stride: int, padding: int, transposed: int | None = None) -> OperatorWork:
    """Count a convolution. Each weight is used once per output position, or per input position if transposed.

    The input ``dilation`` follows ``stride`` and ``padding``. After it come ``transposed`` and ``output_padding``, if
    the operator has them, and then ``groups``.
    """
    image, weight = inputs.shape(0), inputs.shape(1)
    dilation = max(stride, padding) + 1
    is_transposed = transposed is not None and inputs.value(transposed)
    groups = inputs.value(dilation + 1 if transposed is None else transposed + 2)
    if len(image) != len(weight) or image[1] != (weight[0] if is_transposed else weight[1] * groups):
        raise ValueError
    steps, pads, dilations = (inputs.value(index) for index in (stride, padding, dilation))
    extra = inputs.value(transposed + 1) if transposed is not None and is_transposed else [0] * len(steps)
    if not len(steps) == len(pads) == len(dilations) == len(extra) == len(image) - 2:
        raise ValueError
    sizes = zip(image[2:], weight[2:], steps, pads, dilations, extra, strict=True)
    output = [
        (size - 1) * step - 2 * pad + spread * (kernel - 1) + more + 1
        if is_transposed
        else (size + 2 * pad - spread * (kernel - 1) - 1) // step + 1
        for size, kernel, step, pad, spread, more in sizes
    ]
    channels = weight[1] * groups if is_transposed else weight[0]
    flops = 2 * image[0] * prod(image[2:] if is_transposed else output) * prod(weight)
    written = _scaled(image[0] * channels * prod(output), inputs.itemsize(0))
    return OperatorWork(flops, _total([inputs.bytes(0, 1), written]), inputs.dtype(0))


def _convolution_backward(inputs: _Inputs) -> OperatorWork:
    """Count the gradients of the input and the weight. Each takes as many FLOPs as the convolution."""
    gradient, image, weight = (inputs.shape(index) for index in range(3))
    is_transposed, (of_image, of_weight, _) = inputs.value(7), inputs.value(10)
    gradients = bool(of_image) + bool(of_weight)
    positions = prod((image if is_transposed else gradient)[2:])
    sizes = [inputs.bytes(0)] + [inputs.bytes(1, 2)] * gradients
    return OperatorWork(2 * gradient[0] * positions * prod(weight) * gradients, _total(sizes), inputs.dtype(0))


def _norm(inputs: _Inputs) -> OperatorWork:
    """Count the bytes of all input tensors, and of an output with the shape of the first input."""
    tensors = [index for index in range(len(inputs.types)) if inputs.is_tensor(index)]
    return OperatorWork(None, _total([inputs.bytes(*tensors), inputs.bytes(0)]), inputs.dtype(0))


def _embedding(inputs: _Inputs) -> OperatorWork:
    """Count the bytes of the indices and of the selected rows. Each row is read and written."""
    weight, indices = inputs.shape(0), inputs.shape(1)
    rows = _scaled(2 * prod(indices) * weight[1], inputs.itemsize(0))
    return OperatorWork(None, _total([inputs.bytes(1), rows]), inputs.dtype(0))


def _embedding_backward(inputs: _Inputs) -> OperatorWork:
    """Count the bytes of the output gradient, the indices, and the gradient of all weight rows."""
    written = _scaled(inputs.value(2) * inputs.shape(0)[-1], inputs.itemsize(0))
    return OperatorWork(None, _total([inputs.bytes(0, 1), written]), inputs.dtype(0))


def _with(function: Callable[..., OperatorWork], **options: Any) -> Callable[[_Inputs], OperatorWork]:
    return functools.partial(function, **options)


# Input positions are from aten/src/ATen/native/native_functions.yaml in pytorch/pytorch.
_FORMULAS: dict[str, Callable[[_Inputs], OperatorWork]] = {
    **dict.fromkeys(("aten::mm", "aten::bmm"), _with(_product, left=0, right=1)),
    "aten::_scaled_mm": _with(_product, left=0, right=1, out_dtype=6),
    **dict.fromkeys(
        ("aten::addmm", "aten::addmm_", "aten::_addmm_activation", "aten::baddbmm", "aten::baddbmm_"),
        _with(_product, left=1, right=2),
    ),
    "aten::mv": _with(_vector_product, matrix=0),
    **dict.fromkeys(("aten::addmv", "aten::addmv_"), _with(_vector_product, matrix=1)),
    "aten::_grouped_mm": _grouped,
    "aten::_scaled_grouped_mm": _with(_grouped, offsets=4, out_dtype=7),
    **dict.fromkeys(
        ("aten::_scaled_dot_product_flash_attention", "aten::_scaled_dot_product_flash_attention_for_cpu"),
        _with(_attention, causal=4),
    ),
    "aten::_scaled_dot_product_fused_attention_overrideable": _with(_attention, causal=5),
    **dict.fromkeys(
        ("aten::_scaled_dot_product_efficient_attention", "aten::_scaled_dot_product_cudnn_attention"),
        _with(_attention, causal=6),
    ),
    "aten::_flash_attention_forward": _with(_attention, causal=8, heads=2, lengths=(3,), windows=(11, 12)),
    "aten::_efficient_attention_forward": _with(_attention, causal=9, heads=2, lengths=(4, 12), windows=(13,)),
    "aten::_scaled_dot_product_flash_attention_for_cpu_backward": _with(_attention, causal=7, backward=True),
    "aten::_scaled_dot_product_flash_attention_backward": _with(_attention, causal=11, backward=True, lengths=(6,)),
    "aten::_scaled_dot_product_efficient_attention_backward": _with(_attention, causal=11, backward=True),
    "aten::_scaled_dot_product_cudnn_attention_backward": _with(_attention, causal=14, backward=True, lengths=(9,)),
    "aten::_flash_attention_backward": _with(
        _attention, causal=11, backward=True, heads=2, lengths=(6,), windows=(15, 16)
    ),
    "aten::_efficient_attention_backward": _with(
        _attention, causal=14, backward=True, heads=2, lengths=(6,), windows=(18,)
    ),
    **dict.fromkeys(
        ("aten::convolution", "aten::_convolution", "aten::convolution_overrideable"),
        _with(_convolution, stride=3, padding=4, transposed=6),
    ),
    "aten::cudnn_convolution": _with(_convolution, padding=2, stride=3),
    **dict.fromkeys(("aten::miopen_convolution", "aten::mkldnn_convolution"), _with(_convolution, padding=3, stride=4)),
    "aten::convolution_backward": _convolution_backward,
    **dict.fromkeys(
        (
            *("aten::native_layer_norm", "aten::native_layer_norm_backward", "aten::_fused_rms_norm"),
            *("aten::_fused_rms_norm_backward", "aten::native_group_norm", "aten::native_group_norm_backward"),
            *("aten::native_batch_norm", "aten::native_batch_norm_backward", "aten::cudnn_batch_norm"),
            *("aten::cudnn_batch_norm_backward", "aten::miopen_batch_norm", "aten::miopen_batch_norm_backward"),
        ),
        _norm,
    ),
    "aten::embedding": _embedding,
    "aten::embedding_dense_backward": _embedding_backward,
}
OPERATORS = frozenset(_FORMULAS)
"""Names of operators with a formula."""


def work_of(name: str, dims: str | None, types: str | None, concrete: str | None) -> OperatorWork | None:
    """Return the work of an operator call, or ``None`` if it has no formula or its inputs do not determine the work.

    Args:
        name: Name of the operator.
        dims: ``Input Dims`` as JSON: a list with the shape of each input; ``None`` if not recorded.
        types: ``Input type`` as JSON: the C++ type of each input.
        concrete: ``Concrete Inputs`` as JSON: the value of each scalar input as text, and ``""`` for tensors.
    """
    formula = _FORMULAS.get(name)
    if formula is None or dims is None:
        return None
    try:
        lists = [json.loads(text or "[]") for text in (dims, types, concrete)]
        if not all(isinstance(values, list) for values in lists):
            return None
        if types is None:
            lists[1] = [""] * len(lists[0])
        work = formula(_Inputs(*lists))
    except (ValueError, TypeError, IndexError, AttributeError, ArithmeticError, RecursionError):
        return None  # the inputs do not have the expected form
    if work.flops is not None and not 0 <= work.flops < _MAX_FLOPS:
        return None
    return work if work.size_bytes is None or 0 <= work.size_bytes < _MAX_FLOPS else None
