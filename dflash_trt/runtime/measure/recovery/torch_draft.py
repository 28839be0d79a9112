# SPDX-License-Identifier: Apache-2.0
"""The two graphs in PyTorch, for gradients: dense or with fake quantisation where the graphs quantise.

One sequence at a time: B is the number of its blocks.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch.nn import functional as F

from dflash_trt.checkpoint.decoded_tensor import map_tensor
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.draft_spec import CONVOLVED, D2T, DraftSpec
from dflash_trt.checkpoint.draft_tensors import Shapes, added_shapes, linear_shapes, tensor_shapes
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.runtime.measure.recovery.fake_quantization import Numerics, quantised_input, quantised_rows

TORCH_TYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}


@dataclasses.dataclass(frozen=True, slots=True)
class Context:
    """Injected rows of one sequence."""

    hidden: torch.Tensor
    """[T, H]: what K and V are projected from, and LiLiCorr's anchors."""
    k: list[torch.Tensor]
    """K by layer, [T, G, D], normed and rotated."""
    v: list[torch.Tensor]


def trained_shapes(spec: DraftSpec) -> Shapes:
    """Shapes of the tensors that are trained, by name without `.weight`: linear layers, and what LiLiCorr adds."""
    added = {name.removesuffix(".weight"): shape for name, shape in added_shapes(spec).items()}
    return linear_shapes(spec) | added


def computed_tensors(draft: DraftCheckpoint) -> dict[str, torch.Tensor]:
    """Tensors that the graphs read of a checkpoint, except embedding and head, by name, in their own dtypes."""
    shapes = tensor_shapes(draft.spec)
    linear = [f"{module}.weight" for module in draft.spec.linear_modules()]
    vectors = [name for name, shape in shapes.items() if len(shape) == 1 and name != D2T]
    names = dict.fromkeys([*linear, *vectors, *added_shapes(draft.spec)])
    return {name: _load(draft.weights[name]) for name in names}


def _load(tensor: StoredTensor) -> torch.Tensor:
    """Copies a tensor that map_tensor reads; BF16 comes as its bits."""
    values = torch.from_numpy(map_tensor(tensor).copy())
    return values.view(TORCH_TYPES[tensor.dtype]).reshape(tensor.shape)


class TorchDraft:
    """A draft whose trained tensors are these `weights`; other biases and norms are the checkpoint's."""

    def __init__(self, spec: DraftSpec, numerics: Numerics, tensors: Mapping[str, torch.Tensor]) -> None:
        """`tensors`: those of `computed_tensors`, on one device; what has one axis is kept, in FLOAT."""
        self._spec = spec
        self._numerics = numerics
        self._vectors = {n: t.float() for n, t in tensors.items() if t.ndim == 1}
        self.device = next(iter(self._vectors.values())).device
        self.weights: dict[str, torch.Tensor] = {}
        """FLOAT by name, as in `trained_shapes`. Set by the caller: packed and read back."""
        # float64: positions reach 1e5
        self._frequencies = torch.from_numpy(spec.rope.inverse_frequencies(spec.head_dim)).to(self.device)

    def context(self, taps: torch.Tensor) -> Context:
        """taps [T, A*H] at positions 0..T-1."""
        h = self._norm(self._linear(self._normed_taps(taps.to(self.device).float()), ["fc"])[0], "hidden_norm")
        projected = self._keys_values(h)
        rotary = self._rotary(torch.arange(len(taps), device=self.device))
        context = Context(h, [], [])
        for attention in self._spec.attention_modules():
            k = self._norm(self._heads(projected[f"{attention}.k_proj"]), f"{attention}.k_norm")
            v = self._heads(projected[f"{attention}.v_proj"]) * self._spec.value_scale
            context.k.append(self._cached(self._rotate(k, rotary), attention, "k"))
            context.v.append(self._cached(v, attention, "v"))
        return context

    def _normed_taps(self, taps: torch.Tensor) -> torch.Tensor:
        if not self._spec.tap_norms:
            return taps
        parts = taps.chunk(len(self._spec.target_layer_ids), dim=-1)
        return torch.cat([self._norm(part, f"aux_hidden_norms.{i}") for i, part in enumerate(parts)], dim=-1)

    def _keys_values(self, h: torch.Tensor) -> dict[str, torch.Tensor]:
        """Every layer's K and V [T, G*D] of h [T, H], by module, before norm and rotation."""
        stacks = [self._spec.context_modules()]
        rows = [h]
        if self._spec.context_input_layernorm:
            stacks = [[f"{attention}.{kv}_proj" for kv in "kv"] for attention in self._spec.attention_modules()]
            rows = [self._norm(h, f"layers.{i}.input_layernorm") for i in range(len(stacks))]
        pairs = zip(stacks, rows, strict=True)
        return {m: y for stack, x in pairs for m, y in zip(stack, self._linear(x, stack), strict=True)}

    def blocks(self, noise: torch.Tensor, anchors: torch.Tensor, context: Context) -> torch.Tensor:
        """noise [B, S, H] at token indices anchors [B] -> hidden [B, S, H]; a block sees the context before it."""
        spec, anchors = self._spec, anchors.to(self.device)
        positions = (anchors[:, None] + torch.arange(spec.block_size, device=self.device)).flatten()  # [B*S]
        rotary = self._rotary(positions)
        h = noise.to(self.device).float().flatten(0, 1) * spec.input_embedding_scale
        for i, attention in enumerate(spec.attention_modules()):
            visible = self._visible(i, anchors, positions, len(context.k[i]))
            injected = context.k[i], context.v[i]
            mixed = partial(self._attention, attention=attention, context=injected, rotary=rotary, visible=visible)
            normed = self._norm(h, f"layers.{i}.input_layernorm")
            h = h + self._convolved(normed, f"layers.{i}.{CONVOLVED['self_attn']}", mixed)
            normed = self._norm(h, f"layers.{i}.post_attention_layernorm")
            mlp = partial(self._mlp, mlp=f"layers.{i}.mlp")
            h = h + self._convolved(normed, f"layers.{i}.{CONVOLVED['mlp']}", mlp)
        return self._norm(h, "norm").view(noise.shape)

    def _convolved(self, h: torch.Tensor, name: str, sublayer: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`sublayer` of h [B*S, H] between the two sides of DFlash2's convolution `name`, if there is one."""
        if self._spec.block_conv is None:
            return sublayer(h)
        before, after = self._linear(h, [f"{name}.kernel_projection"])[0].chunk(2, dim=-1)
        first, second = self.weights[f"{name}.base_kernel"]
        return self._convolution(sublayer(self._convolution(h, before, first)), after, second)

    def _convolution(self, x: torch.Tensor, change: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
        """One side: x [B*S, H], change [B*S, taps*H/group], base [taps, H] -> [B*S, H]; blocks begin with zeros."""
        assert self._spec.block_conv is not None
        S, width = self._spec.block_size, self._spec.block_conv.group_size
        rows = x.view(-1, S, x.shape[-1] // width, width)
        taps = base.view(len(base), -1, width) + change.view(*rows.shape[:2], len(base), -1, 1)  # [B, S, taps, G, g]
        terms = [taps[:, :, tap] * F.pad(rows[:, : S - tap], (0, 0, 0, 0, tap, 0)) for tap in range(min(len(base), S))]
        return torch.stack(terms).sum(0).view_as(x)

    def _attention(
        self,
        h: torch.Tensor,
        attention: str,
        context: tuple[torch.Tensor, torch.Tensor],
        rotary: tuple[torch.Tensor, torch.Tensor],
        visible: torch.Tensor,
    ) -> torch.Tensor:
        q, k, v = map(self._heads, self._linear(h, [f"{attention}.{x}_proj" for x in "qkv"]))
        q = self._rotate(self._norm(q, f"{attention}.q_norm"), rotary)
        k = self._rotate(self._norm(k, f"{attention}.k_norm"), rotary)
        k, v = torch.cat([context[0], k]), torch.cat([context[1], v * self._spec.value_scale])
        mixed = _mix(q, k, v, visible, self._vectors.get(f"{attention}.sinks"))
        if self._spec.attention_gate is not None:
            gate = F.softplus(self._linear(h, [f"{attention}.g_proj"])[0])  # a factor a head or an element
            mixed = (mixed.view(*gate.shape, -1) * gate[..., None]).flatten(1)
        return self._linear(mixed, [f"{attention}.o_proj"])[0]

    def _mlp(self, h: torch.Tensor, mlp: str) -> torch.Tensor:
        gate, up = self._linear(h, [f"{mlp}.gate_proj", f"{mlp}.up_proj"])
        return self._linear(F.silu(gate) * up, [f"{mlp}.down_proj"])[0]

    def _linear(self, x: torch.Tensor, stack: Sequence[str]) -> list[torch.Tensor]:
        """x [rows, in] through the modules that share its GEMM, each [rows, out] with its bias."""
        inputs: dict[float | None, torch.Tensor] = {None: x}
        outputs = []
        for module in stack:
            scale = self._numerics.inputs.get(module)
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
        """cos and sin [rows, 1, rotary_dim/2]."""
        angles = positions.double()[:, None, None] * self._frequencies
        factor = self._spec.rope.attention_factor
        return (angles.cos() * factor).float(), (angles.sin() * factor).float()

    def _rotate(self, x: torch.Tensor, rotary: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        """Turns the first dimensions of x [rows, heads, D] by cos, sin [rows, 1, rotary_dim/2]."""
        cos, sin = rotary
        turning, still = x.tensor_split([2 * cos.shape[-1]], dim=-1)
        is_paired = self._spec.rope.interleaved
        first, second = turning.reshape(*x.shape[:2], -1, 2).unbind(-1) if is_paired else turning.chunk(2, dim=-1)
        turned = first * cos - second * sin, second * cos + first * sin
        return torch.cat(
            [torch.stack(turned, dim=-1).flatten(-2) if is_paired else torch.cat(turned, dim=-1), still], -1
        )

    def _visible(self, layer: int, anchors: torch.Tensor, positions: torch.Tensor, num_context: int) -> torch.Tensor:
        """[B*S, T + B*S]: what each row of each block sees of the context and of all blocks' rows."""
        S, rule = self._spec.block_size, self._spec.layers[layer]
        starts = anchors.repeat_interleave(S)
        context = torch.arange(num_context, device=self.device)
        keys = torch.cat([context, positions])
        block = torch.arange(len(anchors), device=self.device).repeat_interleave(S)
        visible = torch.cat([context < starts[:, None], block == block[:, None]], dim=1)
        distance = positions[:, None] - keys
        if rule.sliding_window is not None:
            visible &= distance.abs() < rule.sliding_window
        return visible & (distance >= 0) if rule.causal else visible


def _mix(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Attention of q [rows, N, D] over k, v [keys, G, D] where `visible` [rows, keys], sinks [N]: [rows, N*D]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))  # [1, heads, rows, D]
    mask = visible
    if sinks is not None:
        k, v = (F.pad(x, (0, 0, 0, 1)) for x in (k, v))
        logits = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, -torch.inf).expand(len(sinks), -1, -1)
        mask = torch.cat([logits, sinks[:, None, None].expand(-1, len(visible), 1)], dim=-1)[None]
    mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    return mixed[0].transpose(0, 1).flatten(1)
