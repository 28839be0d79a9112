# SPDX-License-Identifier: Apache-2.0
"""Reads weights that llm-compressor quantised as BF16, and checks a module's tensors against its scheme.

The package compressed-tensors is the tests' oracle, not a dependency: it imports torch and transformers, which `build`
does not need, and vLLM pins one release of it.
"""

from __future__ import annotations

import re
from math import ceil, prod
from typing import NoReturn

import numpy as np

from dflash_trt.checkpoint.compressed_codes import decoder, grid, has_packed_points
from dflash_trt.checkpoint.compressed_scheme import HINT, NVFP4, PACKED, Scheme, read_claims, refusal, scheme_of
from dflash_trt.checkpoint.decoded_tensor import DecodedTensor, decoded
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.quantization import COMPRESSED, DENSE_DTYPES
from dflash_trt.checkpoint.safetensors_file import StoredTensor, Weights
from dflash_trt.errors import CheckpointError, human_bytes

IDLE = ("input_scale", "input_zero_point", "input_global_scale", "output_scale", "output_zero_point")
"""Tensors of quantised activations, which are ignored: activations are BF16 here."""
CACHE_SCALES = re.compile(r".*\.self_attn\.(.*\.)?[qkv]_(scale|zero_point)")


def read_compressed(config: Facts, tensors: Weights) -> tuple[Weights, str]:
    """The tensors, every packed weight as a DecodedTensor, and a description of how they are stored.

    Raises CheckpointError, naming format and scheme, for unsupported schemes and tensors that do not fit theirs.
    """
    claims = read_claims(config)
    left, dense = dict(tensors), Weights()
    schemes: set[str] = set()
    for module in sorted(_packed_modules(tensors)):
        scheme = scheme_of(config, claims, module)
        own = {name: left.pop(f"{module}.{name}") for name in _parts(module, left)}
        dense[f"{module}.weight"] = _dense_weight(module, scheme, own)
        schemes.add(str(scheme))
    if not dense:
        raise refusal(config, claims.format, "packed weights", "none")
    left = {name: tensor for name, tensor in left.items() if not CACHE_SCALES.fullmatch(name)}
    is_unused = any(name.endswith(IDLE) or CACHE_SCALES.fullmatch(name) is not None for name in tensors)
    size = human_bytes(sum(tensor.stored_bytes for tensor in dense.values() if isinstance(tensor, DecodedTensor)))
    stored_as = f"{COMPRESSED} {' and '.join(sorted(schemes))}: {len(dense)} layers, {size}, read as BF16"
    return left | dense, stored_as + "; scales of activations and context are not used" * is_unused


def _packed_modules(tensors: Weights) -> set[str]:
    modules = {name.removesuffix(".weight_packed") for name in tensors if name.endswith(".weight_packed")}
    codes = ("I8", "F8_E4M3")
    return modules | {
        n.removesuffix(".weight") for n, t in tensors.items() if n.endswith(".weight") and t.dtype in codes
    }


def _parts(module: str, tensors: Weights) -> list[str]:
    names = [name.removeprefix(f"{module}.") for name in tensors if name.startswith(f"{module}.")]
    return [name for name in names if name.startswith("weight") or name in IDLE]


def _dense_weight(module: str, scheme: Scheme, own: Weights) -> DecodedTensor:
    """`module`.weight, decoded on read; `own` are all tensors of the module's weights and activations."""
    packed = own.get("weight_packed") or own["weight"]
    shape = _shape(module, scheme, own, packed)
    expected = _expected(scheme, shape, packed)
    for name, (dtypes, sizes) in expected.items():
        tensor = own.get(name) or _missing(packed, f"{module}.{name}")
        if tensor.dtype not in dtypes or tensor.shape not in sizes:
            raise tensor.error(f"{' or '.join(dtypes)} {list(sizes[0])} for {scheme}")
    if surplus := sorted(own.keys() - expected.keys() - set(IDLE)):
        what = " (groups in the order of activations)" if surplus[0] == "weight_g_idx" else ""
        raise CheckpointError(
            f"{packed.file}: {scheme}: expected no {surplus[0]}, found tensor {own[surplus[0]].name!r}{what}", hint=HINT
        )
    stored = sum(tensor.num_bytes for tensor in own.values())
    return decoded(packed.file, f"{module}.weight", shape, decoder(scheme, own, shape), scheme.format, stored)


def _missing(packed: StoredTensor, name: str) -> NoReturn:
    raise CheckpointError(f"{packed.file}: missing tensor {name!r}, without which {packed.name!r} cannot be read")


def _shape(module: str, scheme: Scheme, own: Weights, packed: StoredTensor) -> tuple[int, int]:
    """Rows and columns of the dense weight."""
    if len(packed.shape) != 2 or 0 in packed.shape:
        raise packed.error("a matrix", str(list(packed.shape)))
    rows, columns = packed.shape
    if scheme.format == NVFP4:
        return rows, 2 * columns
    if scheme.format != PACKED:
        return rows, columns
    tensor = own.get("weight_shape") or _missing(packed, f"{module}.weight_shape")
    if tensor.dtype not in ("I64", "I32") or tensor.shape != (2,):
        raise tensor.error("I64 [2]")
    kind = "<i8" if tensor.dtype == "I64" else "<i4"
    claimed = np.memmap(tensor.file, kind, mode="r", offset=tensor.offset, shape=(2,)).tolist()
    words = -(-claimed[1] * scheme.weights.num_bits // 32)
    if claimed[0] != rows or words != columns or claimed[1] < 1:
        raise tensor.error(f"the shape of {packed.name!r}, {rows} rows of {columns} words", str(claimed))
    return rows, claimed[1]


Expected = dict[str, tuple[tuple[str, ...], list[tuple[int, ...]]]]


def _expected(scheme: Scheme, shape: tuple[int, int], packed: StoredTensor) -> Expected:
    """The dtypes and shapes that each tensor of a module may have, the usual shape first."""
    (rows, columns), bits, sizes = shape, scheme.weights.num_bits, grid(scheme, shape)
    group = scheme.weights.block[1]
    if scheme.weights.block[0] == 1 and group and columns % group:
        raise packed.error("columns in whole groups", f"{columns} columns for groups of {group}")
    flat: list[tuple[int, ...]] = [(1,), ()] if prod(sizes) == 1 else [sizes[:1]] if sizes[1] == 1 else []
    expected: Expected
    if scheme.format == PACKED:
        words = ceil(columns * bits / 32)
        expected = {"weight_packed": (("I32",), [(rows, words)]), "weight_shape": (("I64", "I32"), [(2,)])}
    elif scheme.format == NVFP4:
        expected = {"weight_packed": (("U8",), [(rows, columns // 2)]), "weight_global_scale": (("F32",), [(1,), ()])}
    else:
        expected = {"weight": (("F8_E4M3" if scheme.weights.type == "float" else "I8",), [shape])}
    expected["weight_scale"] = (("F8_E4M3",) if scheme.format == NVFP4 else DENSE_DTYPES, [sizes, *flat])
    if has_packed_points(scheme):
        expected["weight_zero_point"] = (("I32",), [(ceil(sizes[0] * bits / 32), sizes[1])])
    elif not scheme.weights.symmetric:
        expected["weight_zero_point"] = (("I8",), [sizes, *flat])
    return expected
