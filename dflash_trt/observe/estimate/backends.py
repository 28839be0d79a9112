# SPDX-License-Identifier: Apache-2.0
"""Kernels between a drafter's GEMMs and attention, by what runs it: counted in its source (data/backends.json).

Each takes a fixed time, and what it reads and writes beside. Weights and attention are priced elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Literal

import msgspec

from dflash_trt.checkpoint.draft_spec import PartialDraftSpec
from dflash_trt.checkpoint.rope import Yarn
from dflash_trt.engine.signatures import fits_tiles
from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.observe.estimate.constants import DATA

Width = Literal["hidden", "qkv", "heads", "mlp"]
Gemm = Literal["qkv", "o", "gate_up", "down", ""]
When = Literal["", "bias", "plain RoPE", "scaled RoPE", "one number", "rows no multiple of 16", "unpadded"]
INPUT_WIDTHS: dict[Gemm, Width] = {"qkv": "hidden", "o": "heads", "gate_up": "hidden", "down": "mlp", "": "hidden"}
ROW_MULTIPLE = 16
"""Rows that torch's FP8 product takes a multiple of."""


class LayerKernels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Some kernels of each layer, alike."""

    what: str
    count: int
    width: Width
    values: float
    """BF16 numbers that each reads and writes, per number of a row of that width."""
    when: When = ""


class InputKernels(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Kernels that a quantised GEMM needs beside itself."""

    algorithm: str
    gemm: Gemm = ""
    """Which one of a layer; all unless given."""
    count: int
    values: float
    when: When = ""


class Backend(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    title: str
    source: str
    shown: str
    """How far the counts were checked."""
    has_our_kernel: bool = False
    """Whether its attention is this project's kernel."""
    layer: tuple[LayerKernels, ...]
    once: int
    """Kernels of a pass outside the layers."""
    scalar_seconds: float = 0.0
    """Time of a kernel on one number: the low end of small_kernel_seconds, chosen after the FP8 passes were seen."""
    inputs: tuple[InputKernels, ...] = ()


class SmallKernels(msgspec.Struct, frozen=True, kw_only=True):
    """All of a pass; numbers are BF16, for each row of the blocks."""

    count: int = 0
    hidden_values: float = 0.0
    """Numbers read and written on every rank."""
    shared_values: float = 0.0
    """Numbers of heads and MLPs, which ranks share."""
    scalar_seconds: float = 0.0
    """Time of the kernels on one number each, a scale."""
    count_unless_16: int = 0
    """Kernels besides, unless the rows are a multiple of 16."""


@cache
def backends() -> dict[str, Backend]:
    return read_json(DATA / "backends.json", dict[str, Backend], ConfigError, what="the package's data")


def small_kernels(backend: Backend, spec: PartialDraftSpec, gemms: Iterable[tuple[str, str]]) -> SmallKernels:
    """Kernels of a pass; `gemms` are those of all layers, each with the modules it is of and its algorithm."""
    widths: dict[Width, int] = {
        "hidden": spec.hidden_size, "heads": spec.num_attention_heads * spec.head_dim, "mlp": spec.intermediate_size,
        "qkv": (spec.num_attention_heads + 2 * spec.num_key_value_heads) * spec.head_dim,
    }  # fmt: skip
    facts = {"", "bias" if spec.attention_bias else "", f"{'scaled' if _is_scaled(spec) else 'plain'} RoPE"}
    facts |= set() if fits_tiles(spec) else {"unpadded"}
    used = [(spec.num_layers * each.count, each.width, each.values, each.when) for each in backend.layer]
    for modules, algorithm in gemms:
        kind = _kind(modules)
        used += [
            (each.count, INPUT_WIDTHS[kind], each.values, each.when)
            for each in backend.inputs
            if each.algorithm == algorithm and each.gemm in ("", kind)
        ]
    always = [(count, width, values) for count, width, values, when in used if when in facts]
    hidden = sum(count * values for count, width, values in always if width == "hidden")
    return SmallKernels(
        count=backend.once + sum(count for count, _, _ in always),
        hidden_values=hidden * widths["hidden"],
        shared_values=sum(count * values * widths[width] for count, width, values in always if width != "hidden"),
        scalar_seconds=backend.scalar_seconds * sum(count for count, _, _, when in used if when == "one number"),
        count_unless_16=sum(count for count, _, _, when in used if when == "rows no multiple of 16"),
    )


def _kind(modules: str) -> Gemm:
    kinds: dict[str, Gemm] = {"self_attn": "qkv", "o_proj": "o", "mlp": "gate_up", "down_proj": "down"}
    return kinds.get(modules.rpartition(".")[2], "")


def _is_scaled(spec: PartialDraftSpec) -> bool:
    """Whether the RoPE is YaRN's; published facts leave it out, and drafts with biases are gpt-oss's, which have it."""
    return spec.attention_bias if spec.rope is None else isinstance(spec.rope.scaling, Yarn)
