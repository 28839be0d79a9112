# SPDX-License-Identifier: Apache-2.0
"""How compressed-tensors 0.20 stores the weights of a module (format, width, groups), as config.json says it."""

from __future__ import annotations

import re
from typing import Any, Literal

import msgspec

from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.quantization import COMPRESSED, SECTION
from dflash_trt.errors import CheckpointError, cut

PACKED, INT, FLOAT, NAIVE, NVFP4 = (
    "pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "nvfp4-pack-quantized",
)  # fmt: skip
FORMATS = (PACKED, INT, FLOAT, NAIVE, NVFP4)
MAX_BLOCK = 2**31 - 1


class WeightArguments(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`weights` of a group (QuantizationArgs); fields that are not read here do not change the stored weights."""

    num_bits: Literal[4, 8]
    type: Literal["int", "float"] = "int"
    symmetric: bool = True
    strategy: Literal["tensor", "channel", "group", "tensor_group", "block"] | None = None
    group_size: int | None = None
    block_structure: tuple[int, int] | str | None = None
    dynamic: Literal[False] = False
    actorder: Literal["weight", "static", False] | None = None
    scale_dtype: str | None = None
    zp_dtype: str | None = None
    observer: str | None = None
    observer_kwargs: dict[str, Any] | None = None

    @property
    def block(self) -> tuple[int | None, int | None]:
        """Rows and columns that share a scale; None for all of them."""
        match self.strategy or ("tensor" if not self.group_size else "group" if self.group_size > 0 else "channel"):
            case "block":
                text = self.block_structure
                rows, columns = map(int, text.split("x")) if isinstance(text, str) else text or (0, 0)
                return rows, columns
            case "group" | "tensor_group":
                return 1, self.group_size or 0
            case "channel":
                return 1, None
            case _:
                return None, None

    def check(self) -> None:
        """Raises ValueError for sizes of groups or blocks out of range."""
        if wrong := [size for size in self.block if size is not None and not 1 <= size <= MAX_BLOCK]:
            raise ValueError(f"sizes of groups and blocks are 1 to {MAX_BLOCK}, not {wrong[0]}")

    def __str__(self) -> str:
        """'int4, groups of 128, symmetric'."""
        rows, columns = self.block
        scales = f"groups of {columns}" if columns and rows == 1 else f"blocks of {rows} x {columns}"
        if columns is None:
            scales = "a scale for each row" if rows else "one scale"
        signs = "" if self.type == "float" else ", symmetric" if self.symmetric else ", with zero points"
        return f"{self.type}{self.num_bits}, {scales}{signs}"


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """How one module is stored."""

    weights: WeightArguments
    format: str
    activations: str
    """Quantisation of activations, for people: "", or "; activations float8, dynamic"."""

    def __str__(self) -> str:
        """'pack-quantized (int4, groups of 128, symmetric)'."""
        return f"{self.format} ({self.weights}{self.activations})"


HINT = "vLLM serves this draft; for dflash-trt give the checkpoint that it was quantised from, and a --recipe"


ESCAPED = re.compile(r"\\.", re.DOTALL)
UNBOUNDED = re.compile(r"\)[*+{]|\\[1-9]|\(\?P=|\(\?[a-zA-Z]*x")
"""Repeated groups, references to groups and verbose mode, whose time may grow exponentially with a name's length."""
MAX_PATTERN, MAX_REPEATS, MAX_NAME = 1000, 4, 64


class Group(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A group of modules that share a scheme (QuantizationScheme)."""

    targets: list[str]
    weights: WeightArguments
    input_activations: dict[str, Any] | None = None
    output_activations: dict[str, Any] | None = None
    format: str | None = None


class Claims(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The quantization_config (QuantizationConfig); sections that change weights in other ways must be empty."""

    config_groups: dict[str, Group]
    quantization_status: str | None = None
    format: str = "dense"
    quant_method: str = COMPRESSED
    ignore: list[str] | None = None
    kv_cache_scheme: dict[str, Any] | None = None
    global_compression_ratio: float | None = None
    version: str | None = None
    sparsity_config: dict[str, Any] | None = None
    transform_config: dict[str, Any] | None = None
    moe_sparsity_config: dict[str, Any] | None = None


def read_claims(config: Facts) -> Claims:
    section = config.section(SECTION)
    try:
        claims = msgspec.convert(section.values(), Claims)
        for group in claims.config_groups.values():
            group.weights.check()
    except (msgspec.ValidationError, ValueError) as error:
        name = section.values().get("format")
        found = f"{COMPRESSED} {cut(name)}" if isinstance(name, str) else COMPRESSED
        raise CheckpointError(
            f"{config.file}: {SECTION}: expected a scheme of compressed-tensors with 4 or 8 bits, found {found}:"
            f" {error}",
            hint=HINT,
        ) from None
    for key in ("sparsity_config", "transform_config", "moe_sparsity_config"):
        if getattr(claims, key):
            raise section.error(key, "none, as it changes the weights", HINT)
    return claims


def scheme_of(config: Facts, claims: Claims, module: str) -> Scheme:
    """The scheme of the group that names the module: by name, regular expression or class, in this order."""

    def rank(target: str) -> int | None:
        if target.startswith("re:"):
            return 1 if _matches(config, target[3:], module) else None
        return {module: 0, "Linear": 2}.get(target)

    ranks = [(rank(target), group) for group in claims.config_groups.values() for target in group.targets]
    fitting = sorted(((r, group) for r, group in ranks if r is not None), key=lambda pair: pair[0])
    if not fitting:
        raise refusal(config, claims.format, f"a group that names {module}", "none in config_groups")
    group, weights = fitting[0][1], fitting[0][1].weights
    kind = group.format or claims.format
    if kind not in FORMATS:
        raise refusal(config, kind, f"one of {', '.join(FORMATS)}", cut(kind))
    is_float, bits = weights.type == "float", weights.num_bits
    suits = {PACKED: not is_float, INT: not is_float, NVFP4: is_float and bits == 4}
    if not suits.get(kind, bits == 8) or (is_float and not weights.symmetric):
        raise refusal(config, kind, "a type and width of this format", str(weights))
    return Scheme(weights=weights, format=kind, activations=_activations(group.input_activations))


def _matches(config: Facts, pattern: str, module: str) -> bool:
    """Whether a regular expression of the file matches; only those are tried whose time is bounded."""
    plain = ESCAPED.sub("x", pattern)
    is_bounded = len(pattern) <= MAX_PATTERN and sum(map(plain.count, "*+{")) <= MAX_REPEATS
    if not is_bounded or UNBOUNDED.search(plain) or UNBOUNDED.search(pattern):
        raise refusal(
            config, "config_groups", f"a regular expression with at most {MAX_REPEATS} repeats, none of a group",
            cut(pattern),
        )  # fmt: skip
    if len(module) > MAX_NAME:
        return False
    try:
        return re.match(pattern, module) is not None
    except re.error as error:
        raise refusal(config, "config_groups", "a regular expression", f"{cut(pattern)} ({error})") from None


def _activations(arguments: dict[str, Any] | None) -> str:
    if not arguments:
        return ""
    kind = f"{arguments.get('type', 'int')}{arguments.get('num_bits', 8)}"
    return f"; activations {cut(kind)}, {'dynamic' if arguments.get('dynamic') else 'static'}"


def refusal(config: Facts, kind: str, expected: str, found: str) -> CheckpointError:
    place = f"{config.file}: {SECTION} ({COMPRESSED} {cut(kind)})"
    return CheckpointError(f"{place}: expected {expected}, found {found}", hint=HINT)
