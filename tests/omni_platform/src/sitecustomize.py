"""Lets torchvision's wheel, of which there is no CPU build, be imported: declares the operators that it describes."""

from __future__ import annotations

import sys
from importlib.abc import MetaPathFinder
from typing import Any

_SEEN = ("nms", "qnms")  # the others are described only if they are there


class _Declare(MetaPathFinder):
    def find_spec(self, name: str, *_: Any) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            library = torch.library.Library("torchvision", "DEF")
            for operator in _SEEN:
                library.define(f"{operator}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _kept.append(library)


_kept: list[Any] = []
sys.meta_path.insert(0, _Declare())
