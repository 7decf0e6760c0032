"""Writes checkpoints of the tiny model in the format of RL trainers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path


def write_checkpoint(model: Path, directory: Path, seed: int) -> Path:
    """Write a checkpoint with random weights and return its path.

    Args:
        model: directory with the config and the tokenizer. See `engine_servers.write_tiny_model`.
        directory: parent directory of the checkpoint.
        seed: seed of the weights.
    """
    import torch
    from safetensors.torch import save_file

    path = shutil.copytree(model, directory / f"checkpoint_{seed}")
    config = json.loads((path / "config.json").read_text())
    hidden, intermediate, vocabulary = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    shapes = {"model.embed_tokens": (vocabulary, hidden), "lm_head": (vocabulary, hidden), "model.norm": (hidden,)}
    for number in range(config["num_hidden_layers"]):
        layer = f"model.layers.{number}"
        shapes |= {f"{layer}.self_attn.{name}_proj": (hidden, hidden) for name in "qkvo"}
        shapes |= {f"{layer}.mlp.{name}_proj": (intermediate, hidden) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (hidden, intermediate)}
        shapes |= {f"{layer}.{name}_layernorm": (hidden,) for name in ("input", "post_attention")}
    generator = torch.Generator().manual_seed(seed)
    weights = {f"{name}.weight": 0.3 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
