"""Tests of the Megatron Core functions that return parallel ranks and group sizes."""

from __future__ import annotations

from profdeck_torch.launchers import MEGATRON


def test_each_parallel_dimension_has_a_rank_and_a_size(code) -> None:
    state = code("megatron-core", "0.16.1", "megatron/core/parallel_state.py")
    assert state["model_parallel_is_initialized"].parameters == []
    for name in MEGATRON.values():
        for function in (f"get_{name}_rank", f"get_{name}_world_size"):
            assert set(state[function].parameters) == state[function].defaults.keys(), (
                function
            )  # all parameters are optional
