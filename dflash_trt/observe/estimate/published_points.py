# SPDX-License-Identifier: Apache-2.0
"""Published measurements that the cost model is held against: data/published.json."""

from __future__ import annotations

from functools import cache
from typing import Literal

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.observe.estimate.constants import DATA
from dflash_trt.observe.estimate.shapes import Method

Quantity = Literal["ratio", "user", "total", "gpu", "gpu-best", "pareto", "pareto-eagle3"]


class PublishedPoint(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One published measurement, and the settings that it is predicted with."""

    id: str
    quantity: Quantity
    published: float
    use: Literal["calibration", "open", "held out"]
    source: str
    target: str
    draft: str | None
    gpu: str
    runtime: str
    tensor_parallel: int
    expert_parallel: int
    method: Method
    batch: int
    draft_tokens: int
    tau: float
    prompt_tokens: int
    output_tokens: int
    weight_bits: float = 16
    head_bits: float = 16
    kv_bytes: int = 2
    algorithm: str = ""
    """Of the drafter's layers."""
    user_rate: float = 0
    """Of pareto quantities, tokens/s."""
    bound: Literal["", "at least"] = ""
    missing: str = ""
    """The term that the model lacks, where the error is large."""


class _Published(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    points: tuple[PublishedPoint, ...]
    not_predicted: tuple[tuple[str, str], ...]
    taus: dict[str, str]


@cache
def _published() -> _Published:
    return read_json(DATA / "published.json", _Published, ConfigError, what="the package's data")


def published_points() -> tuple[PublishedPoint, ...]:
    """All that are predicted."""
    return _published().points


def not_predicted() -> tuple[tuple[str, str], ...]:
    """What was published besides, and why it is not predicted."""
    return _published().not_predicted


def published_taus() -> dict[str, str]:
    """What the cards and papers of drafts report, in words, by draft."""
    return _published().taus
