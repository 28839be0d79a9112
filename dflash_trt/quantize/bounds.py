# SPDX-License-Identifier: Apache-2.0
"""Activation ranges, and exact bounds on them from the weights alone, for `--calibration none`.

An RMSNorm's output is x = g * n with |n| <= sqrt(H), n the normalised row and g the norm's weight. Hence, by
Cauchy-Schwarz,

    |x_i|              <= sqrt(H) max |g|                             inputs of q, k, v, gate and up
    |(W x + b)_j|      <= sqrt(H) |g * W_j| + |b_j|                   V, and so o_proj's input, a mean of V
    |silu(a_i) u_i|    <= H/2 (|g * A_i| |g * U_i| + |(g * A_i).(g * U_i)|)      down_proj's input; a = A x, u = U x
    softplus(G x)_j    <= sqrt(H) |g * G_j| + ln 2                    Laguna's gate, on o_proj's input
    |K_i|              <= sqrt(D) max |k_norm| * attention_factor     K after norm and rotation

where the third holds for a_i > 0, and for the rest |silu(a_i)| < 0.2785. Nothing is clipped; the price is resolution
near 0 (docs/quantization.md). fc reads the target's residual stream, which no weight of the draft bounds: no entry.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from dflash_trt.checkpoint.decoded_tensor import as_float32, map_tensor
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.errors import CheckpointError

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROWS = 256  # rows at a time: a few MB of float32
SILU_MINIMUM = 0.2785
CAPTURE = "dflash-trt capture DRAFT --target TARGET --prompts FILE -o features.safetensors"
"""Command that captures the features from which ranges are measured."""


class Ranges(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The largest magnitudes that a draft's activations reached on calibration features."""

    inputs: dict[str, float]
    """max |x| of each linear layer's input, by module name (`fc`, `layers.0.mlp.down_proj`, ...)."""
    k: tuple[float, ...]
    """max |K| of the context as the cache stores it (after norm and rotation), by layer."""
    v: tuple[float, ...]
    """max |V| of the context as the cache stores it, by layer."""


def ranges_from_weights(draft: DraftCheckpoint) -> Ranges:
    """Bounds of every linear layer's input but fc's, and of K and V.

    Raises CheckpointError for a draft with block convolutions, whose coefficients depend on the rows.
    """
    spec = draft.spec
    if spec.block_conv is not None:
        raise CheckpointError(
            f"the weights of {draft.directory} do not bound its activations, because it has block convolutions",
            hint="measure the ranges: dflash-trt capture, then --calibration FEATURES; or quantise weights alone:"
            " --recipe nvfp4-w4a16, with `search` --format W4A16_NVFP4",
        )
    inputs: dict[str, float] = {}
    k: list[float] = []
    v: list[float] = []
    root = math.sqrt(spec.hidden_size)
    context = np.abs(_vector(draft, "hidden_norm.weight"))
    for layer, attention in enumerate(spec.attention_modules()):
        block = np.abs(_vector(draft, f"layers.{layer}.input_layernorm.weight"))
        # k and v read normed features, which this layer's norm may go over once more, and the normed block
        both = block if spec.context_input_layernorm else np.maximum(block, context)
        inputs[f"{attention}.q_proj"] = root * float(block.max())
        inputs[f"{attention}.k_proj"] = inputs[f"{attention}.v_proj"] = root * float(both.max())
        v.append(_projection_bound(draft, f"{attention}.v_proj", both) * spec.value_scale)
        inputs[f"{attention}.o_proj"] = v[-1]
        if spec.attention_gate is not None:
            inputs[f"{attention}.g_proj"] = inputs[f"{attention}.q_proj"]
            inputs[f"{attention}.o_proj"] *= _projection_bound(draft, f"{attention}.g_proj", block) + math.log(2)
        k_norm = np.abs(_vector(draft, f"{attention}.k_norm.weight"))
        turned = (
            max(1, spec.rope.attention_factor) if spec.rope.partial_rotary_factor < 1 else spec.rope.attention_factor
        )
        k.append(math.sqrt(spec.head_dim) * float(k_norm.max()) * turned)

        mlp = f"layers.{layer}.mlp"
        norm = np.abs(_vector(draft, f"layers.{layer}.post_attention_layernorm.weight"))
        inputs[f"{mlp}.gate_proj"] = inputs[f"{mlp}.up_proj"] = root * float(norm.max())
        inputs[f"{mlp}.down_proj"] = _swiglu_bound(draft, mlp, norm)
    return Ranges(inputs=inputs, k=tuple(k), v=tuple(v))


def _vector(draft: DraftCheckpoint, name: str) -> NDArray[np.float32]:
    return as_float32(map_tensor(draft.weights[name]))


def _rows(weights: NDArray[Any]) -> Iterator[NDArray[np.float32]]:
    for begin in range(0, len(weights), ROWS):
        yield as_float32(weights[begin : begin + ROWS])


def _projection_bound(draft: DraftCheckpoint, module: str, norm: NDArray[np.float32]) -> float:
    """max_j sqrt(H) |norm * W_j| + |b_j|."""
    weights = map_tensor(draft.weights[f"{module}.weight"])
    lengths = np.concatenate([np.linalg.norm(rows * norm, axis=1) for rows in _rows(weights)])
    bound = math.sqrt(norm.size) * lengths
    if f"{module}.bias" in draft.weights:
        bound = bound + np.abs(_vector(draft, f"{module}.bias"))
    return float(bound.max())


def _swiglu_bound(draft: DraftCheckpoint, mlp: str, norm: NDArray[np.float32]) -> float:
    """max_i of the bound on |silu(gate_i) up_i|; with biases, of the looser one of two magnitudes."""
    gate, up = (map_tensor(draft.weights[f"{mlp}.{x}_proj.weight"]) for x in ("gate", "up"))
    root = math.sqrt(norm.size)
    if any(f"{mlp}.{x}_proj.bias" in draft.weights for x in ("gate", "up")):
        largest_gate, largest_up = (_projection_bound(draft, f"{mlp}.{x}_proj", norm) for x in ("gate", "up"))
        return max(largest_gate, SILU_MINIMUM) * largest_up
    largest = 0.0
    for a, u in zip(_rows(gate), _rows(up), strict=True):
        a, u = a * norm, u * norm
        a_length, u_length = np.linalg.norm(a, axis=1), np.linalg.norm(u, axis=1)
        # The sign of u is arbitrary, so the magnitude of the dot product counts.
        product = norm.size / 2 * (a_length * u_length + np.abs(np.einsum("ij,ij->i", a, u)))
        negative = SILU_MINIMUM * root * u_length
        largest = max(largest, float(np.maximum(product, negative).max()))
    return largest
