# SPDX-License-Identifier: Apache-2.0
"""The two graphs in PyTorch, for gradients: dense or with fake quantisation where the graphs quantise.

Shape letters as everywhere; one sequence at a time, so B is the number of its blocks. Equal to the float64 equations
and to the graphs that are built from a packed checkpoint, to the rounding of float32.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import msgspec
import torch
from torch.nn import functional as F

from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.errors import CheckpointError
from dflash_trt.quantize.recovery.fake_quantization import quantised_input, quantised_rows
from dflash_trt.quantize.recovery.numerics import Numerics

COMPUTED = {
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "layers", "attention_bias", "rms_norm_eps", "rope", "max_position_embeddings", "vocab_size", "block_size",
    "mask_token_id", "target_layer_ids", "num_target_layers", "input_embedding_scale", "output_multiplier",
    "final_logit_softcapping",
}  # fmt: skip
"""Fields of DraftSpec that are computed, or that change nothing here."""


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """Injected rows of one sequence."""

    k: list[torch.Tensor]
    """By layer, [T, G, D]: normed and rotated."""
    v: list[torch.Tensor]


def refuse_untrainable(spec: DraftSpec) -> None:
    """Raises CheckpointError for the first fact of `spec` that this model does not compute."""
    plain = {field.name: field.default for field in msgspec.structs.fields(spec)}
    unknown = [name for name in plain if name not in COMPUTED and getattr(spec, name) != plain[name]]
    unknown += ["layers.sinks"] if any(layer.sinks for layer in spec.layers) else []
    unknown += ["rope.partial_rotary_factor"] if spec.rope.partial_rotary_factor != 1 else []
    if unknown:
        raise CheckpointError(
            f"{unknown[0]}: expected a draft that does without, found one that needs it: --recover does not compute it",
            hint="quantise without --recover",
        )


class TorchDraft:
    """A draft whose linear layers have these weights; biases and norms are the checkpoint's."""

    def __init__(
        self, spec: DraftSpec, numerics: Numerics, tensors: Mapping[str, torch.Tensor], device: str = "cpu"
    ) -> None:
        """`tensors`: all tensors by checkpoint name; what has one axis is kept, in FLOAT."""
        refuse_untrainable(spec)
        self._spec = spec
        self._numerics = numerics
        self._vectors = {n: t.float().to(device) for n, t in tensors.items() if t.ndim == 1}
        self.weights: dict[str, torch.Tensor] = {}
        """[out, in] FLOAT by module, as they are multiplied: who calls sets them, packed and read back."""
        frequencies = spec.rope.inverse_frequencies(spec.head_dim)
        self._frequencies = torch.from_numpy(frequencies).to(device)  # float64: positions reach 1e5

    def context(self, taps: torch.Tensor) -> Context:
        """taps [T, A*H] at positions 0..T-1."""
        spec, modules = self._spec, self._spec.context_modules()
        h = self._norm(self._linear(taps.float(), ["fc"])[0], "hidden_norm")
        projected = dict(zip(modules, self._linear(h, modules), strict=True))
        cos, sin = self._rotary(torch.arange(len(taps), device=taps.device))
        context = Context([], [])
        for attention in spec.attention_modules():
            k = self._norm(self._heads(projected[f"{attention}.k_proj"]), f"{attention}.k_norm")
            context.k.append(self._cached(_rotate(k, cos, sin), attention, "k"))
            context.v.append(self._cached(self._heads(projected[f"{attention}.v_proj"]), attention, "v"))
        return context

    def blocks(self, noise: torch.Tensor, anchors: torch.Tensor, context: Context) -> torch.Tensor:
        """noise [B, S, H], the embedded blocks at token indices anchors [B] -> hidden [B, S, H].

        Each block sees the context before its anchor, and itself.
        """
        spec = self._spec
        positions = (anchors[:, None] + torch.arange(spec.block_size, device=anchors.device)).flatten()  # [B*S]
        rotary = self._rotary(positions)
        h = noise.float().flatten(0, 1) * spec.input_embedding_scale
        for i, attention in enumerate(spec.attention_modules()):
            visible = self._visible(i, anchors, positions, len(context.k[i]))
            normed = self._norm(h, f"layers.{i}.input_layernorm")
            h = h + self._attention(normed, attention, (context.k[i], context.v[i]), rotary, visible)
            h = h + self._mlp(self._norm(h, f"layers.{i}.post_attention_layernorm"), f"layers.{i}.mlp")
        return self._norm(h, "norm").view(noise.shape)

    def _attention(
        self,
        h: torch.Tensor,
        attention: str,
        context: tuple[torch.Tensor, torch.Tensor],
        rotary: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v = map(self._heads, self._linear(h, [f"{attention}.{x}_proj" for x in "qkv"]))
        q = _rotate(self._norm(q, f"{attention}.q_norm"), *rotary)
        k = _rotate(self._norm(k, f"{attention}.k_norm"), *rotary)
        k, v = torch.cat([context[0], k]), torch.cat([context[1], v])
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, rows, D]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, enable_gqa=True)
        return self._linear(mixed[0].transpose(0, 1).flatten(1), [f"{attention}.o_proj"])[0]

    def _mlp(self, h: torch.Tensor, mlp: str) -> torch.Tensor:
        gate, up = self._linear(h, [f"{mlp}.gate_proj", f"{mlp}.up_proj"])
        return self._linear(F.silu(gate) * up, [f"{mlp}.down_proj"])[0]

    def _linear(self, x: torch.Tensor, stack: Sequence[str]) -> list[torch.Tensor]:
        """x [rows, in] through the modules that share its GEMM, each [rows, out] with its bias."""
        inputs: dict[float | None, torch.Tensor] = {None: x}
        outputs = []
        for module in stack:
            scale = self._numerics.input_scale(module, stack)
            if scale is not None and scale not in inputs:
                inputs[scale] = quantised_input(x, self._numerics.algorithms[module], scale)
            outputs.append(F.linear(inputs[scale], self.weights[module], self._vectors.get(f"{module}.bias")))
        return outputs

    def _cached(self, rows: torch.Tensor, attention: str, kv: str) -> torch.Tensor:
        scale = self._numerics.cache.get(f"{attention}.{kv}_proj.{kv}_scale")
        return rows if scale is None else quantised_rows(rows, scale)

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self._vectors[f"{name}.weight"], self._spec.rms_norm_eps)

    def _heads(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1, self._spec.head_dim)

    def _rotary(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin [rows, 1, D/2]."""
        angles = positions.double()[:, None, None] * self._frequencies
        factor = self._spec.rope.attention_factor
        return (angles.cos() * factor).float(), (angles.sin() * factor).float()

    def _visible(self, layer: int, anchors: torch.Tensor, positions: torch.Tensor, num_context: int) -> torch.Tensor:
        """[B*S, T + B*S]: what each row of each block sees of the context and of all blocks' rows."""
        S, rule = self._spec.block_size, self._spec.layers[layer]
        starts = anchors.repeat_interleave(S)
        context = torch.arange(num_context, device=anchors.device)
        keys = torch.cat([context, positions])
        block = torch.arange(len(anchors), device=anchors.device).repeat_interleave(S)
        visible = torch.cat([context < starts[:, None], block == block[:, None]], dim=1)
        distance = positions[:, None] - keys
        if rule.sliding_window is not None:
            visible &= distance.abs() < rule.sliding_window
        return visible & (distance >= 0) if rule.causal else visible


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate-half of x [rows, heads, D] by cos, sin [rows, 1, D/2]."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
