# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr's correlator, a small transformer over all candidates of a block, whose cosines score the lattice's edges.

Each of the K * k candidates attends to all others. Afterwards it has two unit vectors, outgoing and incoming, and the
score of candidate b after candidate a is scale * out[a] . in[b]; the last verified token's outgoing vector starts the
path. The head's logits enter as features and are not added (vLLM 0.33, models/lilicorr.py; arXiv 2608.20530).
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor
from torch.nn import functional as F

from dflash_trt.checkpoint.draft_spec import LILICORR, DraftSpec
from dflash_trt.checkpoint.draft_tensors import lilicorr_shapes
from dflash_trt.checkpoint.weights import SINGLE
from dflash_trt.engine.candidate_lattice import CandidateLattice
from dflash_trt.engine.candidate_scorer import CandidateScorer, DraftedBlock


class LilicorrScorer(CandidateScorer):
    """The correlator of an engine directory: in FLOAT on a CPU, in the stored dtype on a GPU."""

    def __init__(self, spec: DraftSpec, tensors: dict[str, Tensor]) -> None:
        """`tensors` are those of `lilicorr_shapes`, all of one floating dtype, in which it computes."""
        super().__init__(spec)
        assert spec.lilicorr is not None
        self._sizes = spec.lilicorr
        self._norm_eps = spec.rms_norm_eps
        self._tensors = {name.removeprefix(f"{LILICORR}."): tensor for name, tensor in tensors.items()}
        self._dtype = self._tensors["slot_embedding"].dtype
        self._bias = self._attention_bias(spec.block_size, spec.num_draft_tokens)

    @classmethod
    def read(cls, engine: Path, spec: DraftSpec, device: torch.device) -> LilicorrScorer:
        """The correlator of the directory `engine`."""
        with safe_open(engine / SINGLE, framework="pt") as stored:
            tensors = {name: stored.get_tensor(name) for name in lilicorr_shapes(spec)}
        dtype = torch.float32 if device.type == "cpu" else tensors[f"{LILICORR}.slot_embedding"].dtype
        return cls(spec, {name: tensor.to(device, dtype) for name, tensor in tensors.items()})

    def from_logits(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The k best ids of logits [B, K, V], and their log probabilities FLOAT, without multiplier and cap."""
        top, ids = logits.topk(self.top_k, dim=-1)
        return ids, top.float() - logits.float().logsumexp(-1, keepdim=True)

    def lattice(self, block: DraftedBlock, ids: Tensor, logits: Tensor) -> CandidateLattice:
        """Lattice of candidates `ids` int64 with log probabilities `logits` FLOAT [B, K, k].

        K may be smaller than the draft's: the correlator then sees the first slots alone, as in vLLM 0.33.
        """
        assert block.context_hidden is not None
        anchor = self._linear("context_proj", block.context_hidden.to(self._dtype))
        anchor = self._rms_norm("anchor_norm", anchor)
        rows = self._correlated(self._candidates(block, ids, logits)).view(*ids.shape, -1)  # [B, K, k, C]
        start = anchor[:, None, None]
        joined = torch.cat([rows, start.expand_as(rows), rows * start], dim=-1)
        vectors = F.silu(self._linear("factor_input_proj", joined))
        first = self._unit("anchor_out_head", anchor)[:, None, None].expand(-1, 1, ids.shape[-1], -1)
        leaving = torch.cat([first, self._unit("out_head", vectors[:, :-1])], dim=1)
        scores = leaving @ self._unit("in_head", vectors).mT
        return CandidateLattice(ids, self._sizes.logit_scale * scores.float())

    def _candidates(self, block: DraftedBlock, ids: Tensor, log_probs: Tensor) -> Tensor:
        """States [B, K*k, C] that the correlator begins with."""
        tensors, (K, k) = self._tensors, ids.shape[1:]
        ranks = torch.arange(k, device=ids.device)
        below_best = log_probs - log_probs.amax(-1, keepdim=True)
        columns = (log_probs, log_probs.exp(), below_best, ranks / max(k - 1, 1), (ranks == 0).float())
        features = torch.stack([column.expand_as(log_probs) for column in columns], dim=-1).to(self._dtype)
        norm = tensors["feature_norm.weight"], tensors["feature_norm.bias"]
        states = block.embed(ids).to(self._dtype)
        states = self._linear("token_proj", states) if "token_proj.weight" in tensors else states
        states = states + self._linear("pass_hidden_proj", block.hidden.to(self._dtype))[:, :, None]
        states = states + self._mlp("feature_mlp", F.layer_norm(features, norm[0].shape, *norm))
        states = states + tensors["slot_embedding"][0, :, :K] + tensors["rank_embedding"][0]
        return states.flatten(1, 2)

    def _correlated(self, states: Tensor) -> Tensor:
        """The candidates' states [B, K*k, C] after all layers and the last norm."""
        for i in range(self._sizes.num_layers):
            layer = f"layers.{i}"
            states = states + self._attention(f"{layer}.attn", self._rms_norm(f"{layer}.attn_norm", states))
            states = states + self._mlp(f"{layer}.mlp", self._rms_norm(f"{layer}.mlp_norm", states))
        return self._rms_norm("output_norm", states)

    def _attention(self, name: str, states: Tensor) -> Tensor:
        """Attention of every candidate to all candidates of its block, with a learned bias by distance of slots."""
        weight, bias = (self._tensors[f"{name}.in_proj_{kind}"] for kind in ("weight", "bias"))
        qkv = F.linear(states, weight, bias).view(*states.shape[:2], 3, self._sizes.num_heads, -1)
        q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
        count = states.shape[1]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=self._bias[:, :count, :count])
        return self._linear(f"{name}.out_proj", mixed.transpose(1, 2).flatten(2))

    def _attention_bias(self, block_size: int, num_slots: int) -> Tensor:
        """[heads, K*k, K*k]: relative_slot_bias[slot(q) - slot(k) + S - 1], and same_slot_bias within a slot."""
        relative, same = self._tensors["relative_slot_bias"], self._tensors["same_slot_bias"]
        slots = torch.arange(num_slots, device=relative.device).repeat_interleave(self.top_k)
        distance = slots[:, None] - slots
        return relative[:, distance + block_size - 1] + (distance == 0).to(same) * same[:, None, None]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors[f"{name}.bias"])

    def _mlp(self, name: str, x: Tensor) -> Tensor:
        return self._linear(f"{name}.down_proj", F.silu(self._linear(f"{name}.up_proj", x)))

    def _rms_norm(self, name: str, x: Tensor) -> Tensor:
        weight = self._tensors[f"{name}.weight"]
        return F.rms_norm(x, weight.shape, weight, self._norm_eps)

    def _unit(self, name: str, x: Tensor) -> Tensor:
        return F.normalize(self._linear(name, x), dim=-1, eps=self._sizes.vector_eps)
