"""What says the parallel coordinates of a rank is there in Megatron Core."""

from __future__ import annotations

from profdeck.base.identity import MEGATRON


def test_each_dimension_has_a_rank_and_a_size(code) -> None:
    functions = code("megatron-core", "0.16.1", "megatron/core/parallel_state.py").functions
    assert functions["model_parallel_is_initialized"].parameters == []
    for name in MEGATRON.values():
        for function in (f"get_{name}_rank", f"get_{name}_world_size"):
            given = functions[function].node.args
            assert len(given.args) == len(given.defaults), function  # none that has to be given
