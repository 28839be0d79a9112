# SPDX-License-Identifier: Apache-2.0
"""Gated delta nets (Qwen3-Next, Qwen3.5) over a cache of slots: linear attention whose state no crop takes back.

A layer's state is K-1 inputs of its convolution and a matrix for each head, overwritten by every token. So a slot's
state before its last segment stays, with what the segment fed to the recurrence; a rollback feeds the accepted tokens
to the older state again, of all slots at once (`apply_rollbacks`), without the layer's projections.

Legend: B segments, n tokens of each, R rows of a pass, C channels of the convolution, K its width, V value heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers.activations import ACT2FN
from transformers.models.qwen3_next.modeling_qwen3_next import (
    torch_chunk_gated_delta_rule,
    torch_recurrent_gated_delta_rule,
)

from dflash_trt.device.upload import uploaded
from dflash_trt.runtime.targets.packed_pass import CurrentPass, Group, RaggedPass

CLASS_NAMES = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")
CHUNK = 64
"""transformers' chunk of the recurrence, to which it pads; shorter segments take the next power of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _SegmentInputs:
    """Inputs of a slot's last segment, and the layer's state before it."""

    tail: Tensor
    """[C, K-1]"""
    state: Tensor
    """[V, Dk, Dv]"""
    mixed: Tensor
    """[n, C]: q, k and v before the convolution."""
    decay: Tensor
    """[n, V], logarithms."""
    beta: Tensor
    """[n, V]"""


class DeltaNetLayer:
    """One gated delta net for every slot."""

    def __init__(self, module: Any, num_slots: int) -> None:
        """`module` is one of transformers' CLASS_NAMES, which share no base; its `forward` is replaced."""
        self._module = module
        weight = module.conv1d.weight
        shape = (num_slots, module.num_v_heads, module.head_k_dim, module.head_v_dim)
        self.tails = weight.new_zeros(num_slots, len(weight), weight.shape[-1] - 1)
        self.states = torch.zeros(shape, dtype=torch.float32, device=weight.device)
        self._last: dict[int, _SegmentInputs] = {}
        module.forward = self._forward

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of the state and its older copy."""
        return 2 * sum(x[0].numel() * x.element_size() for x in (self.tails, self.states))

    def forget(self, slot: int) -> None:
        """Drops what a rollback would need."""
        self._last.pop(slot, None)

    def clear(self, slot: int) -> None:
        """The state before a sequence's first token."""
        self.forget(slot)
        self.tails[slot].zero_()
        self.states[slot].zero_()

    def replay(self, accepted: dict[int, int]) -> None:
        """Rewinds each slot to its state after `accepted[slot]` tokens of its last segment, in one padded run.

        A padded row has beta 0 and decay exp(0): it leaves the state as it is.
        """
        lasts = [self._last.pop(slot) for slot in accepted]
        counts = list(accepted.values())
        longest = max(1, *counts)
        mixed, decay, beta = (
            torch.stack(
                [F.pad(rows[:count], (0, 0, 0, longest - count)) for rows, count in zip(each, counts, strict=True)]
            )
            for each in ([x.mixed for x in lasts], [x.decay for x in lasts], [x.beta for x in lasts])
        )
        tails, states = torch.stack([x.tail for x in lasts]), torch.stack([x.state for x in lasts])
        slots, width = uploaded(torch.tensor([*accepted]), states.device), tails.shape[-1]
        inputs = torch.cat([tails, mixed.transpose(1, 2)], dim=-1)
        _, self.states[slots] = self._recur(inputs, states, decay, beta)
        self.tails[slots] = torch.stack([row[:, n : n + width] for row, n in zip(inputs, counts, strict=True)])

    def _forward(self, hidden_states: Tensor, *, slot_pass: CurrentPass, **_: object) -> Tensor:
        """hidden_states [1, R, H] of a pass -> [1, R, H]; as the module's own forward, segment by segment."""
        current = slot_pass.value
        assert isinstance(current, RaggedPass), "no recorded pass has recurrent state"
        mixed, z, beta, decay = self._project(hidden_states)
        rows = [self._append(group, mixed, decay, beta) for group in current.groups]
        mixed_values = torch.cat(rows)  # [R, V, Dv]
        module, shape = self._module, z.shape
        mixed_values = F.pad(mixed_values, (0, 0, 0, 0, 0, hidden_states.shape[1] - len(mixed_values)))  # padded rows
        normed: Tensor = module.norm(mixed_values.reshape(-1, shape[-1]), z.reshape(-1, shape[-1]))
        output: Tensor = module.out_proj(normed.reshape(1, len(mixed_values), -1))
        return output

    def _project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """hidden [1, R, H] -> q, k and v [R, C], z [1, R, V, Dv], beta and decay [R, V]."""
        module = self._module
        if hasattr(module, "in_proj_qkvz"):  # Qwen3-Next
            q, k, v, z, b, a = module.fix_query_key_value_ordering(
                module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
            )
            mixed = torch.cat([x.flatten(2) for x in (q, k, v)], dim=-1)
        else:
            mixed, z, b, a = (getattr(module, f"in_proj_{name}")(hidden) for name in ("qkv", "z", "b", "a"))
            z = z.reshape(*z.shape[:-1], -1, module.head_v_dim)
        decay = -module.A_log.float().exp() * F.softplus(a.float() + module.dt_bias)
        return mixed[0], z, b[0].sigmoid(), decay[0]

    def _append(self, group: Group, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """The group's rows of a pass -> [B*n, V, Dv]; its slots' states move on."""
        mixed, decay, beta = (
            x[group.rows].view(group.num_segments, group.num_tokens, -1) for x in (mixed, decay, beta)
        )
        tails, states = self.tails[group.slots].clone(), self.states[group.slots].clone()
        inputs = torch.cat([tails, mixed.transpose(1, 2)], dim=-1)
        values, self.states[group.slots] = self._recur(inputs, states, decay, beta)
        self.tails[group.slots] = inputs[..., inputs.shape[-1] - tails.shape[-1] :]
        for i, slot in enumerate(group.slot_ids):
            self._last[slot] = _SegmentInputs(
                tail=tails[i], state=states[i], mixed=mixed[i], decay=decay[i], beta=beta[i]
            )
        return values.flatten(0, 1)

    def _recur(self, inputs: Tensor, states: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """inputs [B, C, K-1+n], states [B, V, Dk, Dv], decay and beta [B, n, V] -> values [B, n, V, Dv], states."""
        module, weight = self._module, self._module.conv1d.weight
        convolved = ACT2FN[module.activation](F.conv1d(inputs, weight, groups=len(weight))).transpose(1, 2)
        parts = convolved.split([module.key_dim, module.key_dim, module.value_dim], dim=-1)
        heads = (module.num_k_heads, module.num_k_heads, module.num_v_heads)
        q, k, v = (part.reshape(*part.shape[:-1], count, -1) for part, count in zip(parts, heads, strict=True))
        options = {"g": decay, "beta": beta, "initial_state": states, "output_final_state": True}
        options["use_qk_l2norm_in_kernel"] = True
        if (n := decay.shape[1]) == 1:
            values, final = torch_recurrent_gated_delta_rule(q, k, v, **options)
        else:
            chunk = min(CHUNK, 1 << (n - 1).bit_length())
            values, final = torch_chunk_gated_delta_rule(q, k, v, chunk_size=chunk, **options)
        return values, final


class DeltaNets:
    """All gated delta nets of a model, and what is still to be taken back of each slot."""

    def __init__(self, model: PreTrainedModel, num_slots: int) -> None:
        """Replaces the `forward` of each; the model must not be shared afterwards."""
        modules = [module for module in model.modules() if type(module).__name__ in CLASS_NAMES]
        self._layers = [DeltaNetLayer(module, num_slots) for module in modules]
        self._appended: dict[int, int] = {}
        self._accepted: dict[int, int] = {}

    @property
    def bytes_per_slot(self) -> int:
        """Bytes of all layers."""
        return sum(layer.bytes_per_slot for layer in self._layers)

    def appended(self, slot: int, num_tokens: int) -> None:
        """Notes the length of a slot's last segment."""
        self._appended[slot] = num_tokens

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Takes tokens of the slot's last segment back, at `apply_rollbacks`; with 0 its older state is dropped."""
        if num_tokens:
            self._accepted[slot] = self._appended[slot] - num_tokens
        else:
            for layer in self._layers:
                layer.forget(slot)

    def apply_rollbacks(self) -> None:
        """Brings the states of all slots to the tokens that they hold."""
        if self._accepted:
            for layer in self._layers:
                layer.replay(self._accepted)
            self._accepted = {}

    def clear(self, slot: int) -> None:
        """Empties a slot."""
        self._accepted.pop(slot, None)
        for layer in self._layers:
            layer.clear(slot)
