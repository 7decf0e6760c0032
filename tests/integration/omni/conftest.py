"""Fixtures for real vLLM-Omni pipelines on the CPU: a tiny diffusion model, and jobs in child processes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_servers import Job, runner, vllm_environment

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker("omni")


@pytest.fixture(scope="session")
def pipeline(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Directory of a Stable Diffusion pipeline with random weights."""
    path = tmp_path_factory.mktemp("pipeline")
    _save_pipeline(path)
    return path


def _save_pipeline(path: Path) -> None:
    import torch
    from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    characters = [chr(code) for code in range(33, 127)]
    tokens = [*characters, *(f"{character}</w>" for character in characters), "<|startoftext|>", "<|endoftext|>"]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    torch.manual_seed(0)
    text = CLIPTextConfig(
        hidden_size=32, intermediate_size=37, num_attention_heads=4, num_hidden_layers=2, vocab_size=len(tokens),
        bos_token_id=len(tokens) - 2, eos_token_id=len(tokens) - 1, pad_token_id=1,
    )  # fmt: skip
    blocks: Any = ["DownEncoderBlock2D"] * 4, ["UpDecoderBlock2D"] * 4
    StableDiffusionPipeline(
        # One latent covers 8 x 8 pixels, because vLLM-Omni warms up with images of 512 x 512 pixels.
        vae=AutoencoderKL(
            block_out_channels=[8] * 4, down_block_types=blocks[0], up_block_types=blocks[1], norm_num_groups=4
        ),
        unet=UNet2DConditionModel(
            block_out_channels=(32, 64), layers_per_block=1, sample_size=8, cross_attention_dim=32, norm_num_groups=8,
            down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), attention_head_dim=8,
        ),
        text_encoder=CLIPTextModel(text),
        tokenizer=CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=77),
        scheduler=DDIMScheduler(clip_sample=False, set_alpha_to_one=False, steps_offset=1),
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(path)  # fmt: skip


@pytest.fixture(scope="session")
def run_job(pipeline: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Job]:
    """Return a function that runs a script of ``jobs/``."""
    environment = vllm_environment(tmp_path_factory.mktemp("engines"))
    return runner(HERE / "jobs", pipeline, environment, tmp_path_factory.mktemp)
