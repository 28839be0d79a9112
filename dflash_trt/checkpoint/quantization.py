# SPDX-License-Identifier: Apache-2.0
"""Quantised weights in modelopt's layout: which module is quantised how, read from its tensors.

`number_formats` lists the tensors of a layer. An FP8 context cache has scalars `k_proj.k_scale` and `v_proj.v_scale`,
F32, in every layer.
"""

from __future__ import annotations

import struct

import msgspec

from dflash_trt.checkpoint.draft_spec import D2T
from dflash_trt.checkpoint.draft_tensors import Shape
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.number_formats import FORMATS, FP8
from dflash_trt.checkpoint.safetensors_file import Expected, StoredTensor
from dflash_trt.errors import CheckpointError

MIXED = "MIXED_PRECISION"
DENSE_DTYPES = ("BF16", "F16", "F32")
INDEX_DTYPES = ("I64",)
HF_QUANT_CONFIG = "hf_quant_config.json"
SECTION, COMPRESSED = "quantization_config", "compressed-tensors"


class Quantization(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Quantised modules and cache of a checkpoint, read from its tensors; empty for an unquantised one."""

    modules: dict[str, str]
    """Algorithm by module name; a module that is not named is dense."""
    fp8_kv_cache: bool
    """Whether the context cache is FP8 with the checkpoint's scales."""

    def algorithms(self) -> set[str]:
        """Algorithms of layers and context cache."""
        return {*self.modules.values(), *([FP8] if self.fp8_kv_cache else [])}


def is_compressed(config: Facts) -> bool:
    """Whether config.json names compressed-tensors as the quantiser."""
    return config.peek(SECTION).get("quant_method") == COMPRESSED


def read_quantization(modules: list[str], attention: list[str], weights: dict[str, StoredTensor]) -> Quantization:
    """The quantisation of the linear layers `modules`; `attention` names the self_attn modules.

    Raises CheckpointError where tensors fit no algorithm.
    """
    algorithms = {module: _algorithm(module, weights) for module in modules}
    quantised = {module: algorithm for module, algorithm in algorithms.items() if algorithm is not None}
    fp8_kv_cache = any(f"{layer}.k_proj.k_scale" in weights for layer in attention)
    return Quantization(modules=quantised, fp8_kv_cache=fp8_kv_cache)


def _algorithm(module: str, weights: dict[str, StoredTensor]) -> str | None:
    weight = weights.get(f"{module}.weight")
    if weight is None or weight.dtype in DENSE_DTYPES:
        return None
    scale, has_input = weights.get(f"{module}.weight_scale"), f"{module}.input_scale" in weights
    if not (stored := [each for each in FORMATS.values() if each.codes == weight.dtype]):
        known = ", ".join(sorted({*DENSE_DTYPES, *(each.codes for each in FORMATS.values())}))
        raise weight.error(f"one of the dtypes {known}", weight.dtype)
    scale_type = None if scale is None else scale.dtype
    nearest = max(stored, key=lambda each: (each.scale_type == scale_type, each.quantises_input == has_input))
    return nearest.name  # `expected_tensors` says what it lacks


def expected_tensors(dense: dict[str, Shape], quantization: Quantization, attention: list[str]) -> Expected:
    """Name -> allowed dtypes and shape of every tensor, given the shapes of the unquantised checkpoint."""
    expected: Expected = {}
    for name, shape in dense.items():
        module = name.removesuffix(".weight")
        algorithm = quantization.modules.get(module) if name.endswith(".weight") else None
        if algorithm is None:
            expected[name] = (INDEX_DTYPES if name == D2T else DENSE_DTYPES, shape)
        else:
            rows, columns = shape
            tensors = FORMATS[algorithm].tensors(rows, columns)
            expected |= {f"{module}.{part}": ((dtype,), size) for part, (dtype, size) in tensors.items()}
    if quantization.fp8_kv_cache:
        for layer in attention:
            expected[f"{layer}.k_proj.k_scale"] = (("F32",), ())
            expected[f"{layer}.v_proj.v_scale"] = (("F32",), ())
    return expected


def read_scale(tensor: StoredTensor) -> float:
    """The value of a scalar F32 tensor; raises CheckpointError unless it is finite and > 0."""
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        (value,) = struct.unpack("<f", stream.read(4))
    if not 0 < value < float("inf"):
        raise tensor.error("a finite scale > 0", str(value))
    return float(value)


def claims_of(document: Facts) -> Facts:
    """The part with the algorithm: nested in hf_quant_config.json and in the section of modelopt's DFlash exporter."""
    return document.section("quantization") if "quantization" in document else document


Claims = list[tuple[str, Facts]]
"""Configurations of a quantisation, each with its place."""


def read_claims(config: Facts) -> Claims:
    """Reads the quantisation that hf_quant_config.json and config.json claim, on which other runtimes rely."""
    file = config.file.with_name(HF_QUANT_CONFIG)
    claims: Claims = []
    if file.is_file():
        document = Facts.load(file, what="a modelopt quantisation config")
        claims.append((f"{file}: quantization", document.section("quantization")))
    if SECTION in config:
        claims.append((f"{config.file}: {SECTION}", claims_of(config.section(SECTION))))
    return claims


def check_claims(config: Facts, claims: Claims, quantization: Quantization) -> None:
    """Raises CheckpointError where a configuration contradicts the tensors, or there is none for quantised ones."""
    algorithms, fp8_kv_cache = set(quantization.modules.values()), quantization.fp8_kv_cache
    actual = None if not algorithms else algorithms.pop() if len(algorithms) == 1 else MIXED
    if actual is not None and not claims:
        raise CheckpointError(f"{config.file}: missing {SECTION} or {HF_QUANT_CONFIG} for {actual} tensors")
    for place, section in claims:
        claimed_cache = section.optional("kv_cache_quant_algo", section.text)
        is_whole = HF_QUANT_CONFIG in place  # config.json's section need not name the cache
        if is_whole and (claimed_cache == FP8) != fp8_kv_cache:
            scales = "k_scale and v_scale tensors" if fp8_kv_cache else "no k_scale and v_scale tensors"
            raise CheckpointError(
                f"{place}.kv_cache_quant_algo: expected {FP8 if fp8_kv_cache else None} ({scales}),"
                f" found {claimed_cache}"
            )
        claim = section.optional("quant_algo", section.text)  # none: only the context cache
        if claim != actual:
            raise CheckpointError(f"{place}.quant_algo: expected {actual} (the tensors), found {claim}")
