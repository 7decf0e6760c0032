"""Tests of shortened names, which must remain distinct."""

from __future__ import annotations

import pytest
from hypothesis import given, strategies as st

from profdeck_traces.analysis.short_names import cut_apart, cut_middle, full_name, short_kernel
from profdeck_traces.reading import compiled

EMBEDDING = (
    "split_embedding_backward_codegen_rowwise_adagrad_unweighted_kernel_{}_per_row_1<Half, float, Half, 2ul, 32>"
)


@given(st.lists(st.text(max_size=60), max_size=6), st.integers(0, 50))
def test_long_texts_are_shortened_and_short_texts_are_unchanged(texts: list[str], width: int) -> None:
    cut = cut_apart(texts, width)
    assert len(cut) == len(texts)
    assert all(len(short) <= width for short in cut)
    assert all(short == text for short, text in zip(cut, texts, strict=True) if len(text) <= width)


@pytest.mark.parametrize("width", [24, 40, 60, 90])
def test_names_that_differ_in_the_middle_remain_distinct(width: int) -> None:
    """Otherwise, three rows of a comparison would have the same name."""
    names = [EMBEDDING.format(kind) for kind in ("cta", "warp")]
    assert len({cut_middle(name, width) for name in names}) == 1
    first, second = cut_apart(names, width)
    assert "cta"[:3] in first
    assert "warp"[:3] in second
    assert first[: width // 3] == names[0][: width // 3]


def test_duplicate_names_are_shortened() -> None:
    name = EMBEDDING.format("cta")
    assert cut_apart([name, name], 40) == [cut_middle(name, 40)] * 2


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::(anonymous namespace)::fill<float>(int, float*) const", "fill<float>"),
        ("bool Op::operator()(int)", "bool Op::operator()"),
        ("_Zbroken", "_Zbroken"),
        ("(anonymous namespace)", "(anonymous namespace)"),
    ],
)
def test_kernels_have_no_arguments_and_no_usual_namespaces(name: str, short: str) -> None:
    assert short_kernel(name, 60) == short


@pytest.mark.skipif(compiled.load_library() is None, reason="the reader is not compiled")
def test_mangled_names_are_readable() -> None:
    assert short_kernel("_Z4fillIfEvPT_i", 60) == "fill<float>"


def test_mangled_name_of_an_enormous_text_stays_mangled() -> None:
    doubled = "".join(f"S_IS{digit}_S{digit}_E" for digit in "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ")
    name = f"_Z1f1AIiiES_IS_S_E{doubled}"
    assert full_name(name) == name
