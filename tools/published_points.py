# SPDX-License-Identifier: Apache-2.0
"""Published measurements that the cost model is held against: published_points.json."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
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
    attention_dp: bool = False
    method: Method
    batch: int
    num_draft_tokens: int
    tau: float
    prompt_tokens: int
    output_tokens: int
    weight_bits: float = 16
    head_bits: float = 16
    kv_bytes: int = 2
    algorithm: str = ""
    """Quantisation of the drafter's layers."""
    kind: str = ""
    """Name of the kind of draft, if not the method's."""
    head: Literal["", "DFlash2", "DSpark"] = ""
    """Head that the draft has beyond DFlash's, priced with its usual sizes."""
    user_rate: float = 0
    """Tokens/s of a user, for pareto quantities."""
    bound: Literal["", "at least", "at most"] = ""
    num_requests: int = 0
    """Requests of the run, all there at its start; 0: a steady state was measured."""
    missing: str = ""
    """The term that the model lacks, where the error is large."""


class PublishedPoints(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The data file."""

    points: tuple[PublishedPoint, ...]
    """All that are predicted."""
    not_predicted: tuple[tuple[str, str], ...]
    """Other published figures, with the reason why they are not predicted."""


@cache
def published_points() -> PublishedPoints:
    """The data file, read once."""
    return read_json(Path(__file__).with_suffix(".json"), PublishedPoints, ConfigError, what="published points")
