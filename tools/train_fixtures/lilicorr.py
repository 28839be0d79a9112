"""LiLiCorr's correlator in plain PyTorch, under the names of vLLM 0.33's lilicorr.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

FEATURES = 5


class LatticeAttention(nn.Module):
    """Attention of all candidates to all, with an additive bias."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.in_proj_weight = nn.Parameter(torch.randn(3 * hidden, hidden) * hidden**-0.5)
        self.in_proj_bias = nn.Parameter(torch.zeros(3 * hidden))
        self.out_proj = nn.Linear(hidden, hidden)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Map x [N, C', C] with bias [heads, C', C'] to [N, C', C]."""
        qkv = F.linear(x, self.in_proj_weight, self.in_proj_bias).unflatten(-1, (3, self.heads, -1))
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=bias)
        projected: torch.Tensor = self.out_proj(mixed.transpose(1, 2).flatten(2))
        return projected


class PlainMLP(nn.Module):
    """SiLU between two linear layers."""

    def __init__(self, size: int, inner: int, output: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(size, inner)
        self.down_proj = nn.Linear(inner, output)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map [..., size] to [..., output]."""
        projected: torch.Tensor = self.down_proj(F.silu(self.up_proj(x)))
        return projected


class CorrelatorLayer(nn.Module):
    """A pre-norm layer."""

    def __init__(self, hidden: int, heads: int, ratio: float, eps: float) -> None:
        super().__init__()
        self.attn_norm, self.mlp_norm = nn.RMSNorm(hidden, eps=eps), nn.RMSNorm(hidden, eps=eps)
        self.attn = LatticeAttention(hidden, heads)
        self.mlp = PlainMLP(hidden, int(hidden * ratio), hidden)

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        """Map [N, C', C] to [N, C', C]."""
        x = x + self.attn(self.attn_norm(x), bias)
        output: torch.Tensor = x + self.mlp(self.mlp_norm(x))
        return output


class Correlator(nn.Module):
    """Scores of each candidate after each of the slot before."""

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        section, eps = config["dflash_config"], config["rms_norm_eps"]
        size, self.block_size = config["hidden_size"], section["block_size"]
        hidden, heads = section["lilicorr_hidden_size"], section["lilicorr_num_heads"]
        self.top_k, factors = section["lilicorr_candidate_topk"], section["lilicorr_factor_dim"]
        self.logit_scale, self.vector_eps = section["lilicorr_logit_scale"], section["lilicorr_vector_eps"]
        self.token_proj = nn.Linear(size, hidden)
        self.pass_hidden_proj = nn.Linear(size, hidden)
        self.context_proj = nn.Linear(size, hidden)
        self.feature_norm = nn.LayerNorm(FEATURES)
        self.feature_mlp = PlainMLP(FEATURES, hidden, hidden)
        self.slot_embedding = nn.Parameter(torch.randn(1, 1, self.block_size - 1, 1, hidden) * 0.02)
        self.rank_embedding = nn.Parameter(torch.randn(1, 1, 1, self.top_k, hidden) * 0.02)
        self.relative_slot_bias = nn.Parameter(torch.zeros(heads, 2 * self.block_size - 1))
        self.same_slot_bias = nn.Parameter(torch.zeros(heads))
        ratio, count = section["lilicorr_mlp_ratio"], section["lilicorr_num_layers"]
        self.layers = nn.ModuleList(CorrelatorLayer(hidden, heads, ratio, eps) for _ in range(count))
        self.output_norm, self.anchor_norm = nn.RMSNorm(hidden, eps=eps), nn.RMSNorm(hidden, eps=eps)
        self.factor_input_proj = nn.Linear(3 * hidden, hidden)
        self.out_head, self.in_head = nn.Linear(hidden, factors), nn.Linear(hidden, factors)
        self.anchor_out_head = nn.Linear(hidden, factors)

    def scores(
        self, embeds: torch.Tensor, log_probs: torch.Tensor, hidden: torch.Tensor, context: torch.Tensor
    ) -> torch.Tensor:
        """Scores [N, K, k, k] of candidates, embeds [N, K, k, H] in blocks hidden [N, K, H] after context [N, H]."""
        slots, k = log_probs.shape[1:]
        rank = torch.arange(k).expand_as(log_probs)
        below = log_probs - log_probs.amax(-1, keepdim=True)
        features = torch.stack((log_probs, log_probs.exp(), below, rank / (k - 1), (rank == 0).float()), dim=-1)
        x = self.token_proj(embeds) + self.pass_hidden_proj(hidden)[:, :, None]
        x = x + self.feature_mlp(self.feature_norm(features))
        x = (x + self.slot_embedding[0, :, :slots] + self.rank_embedding[0]).flatten(1, 2)
        slot = torch.arange(slots).repeat_interleave(k)
        distance = slot[:, None] - slot
        bias = self.relative_slot_bias[:, distance + self.block_size - 1]
        bias = bias + (distance == 0) * self.same_slot_bias[:, None, None]
        for layer in self.layers:
            x = layer(x, bias)
        rows = self.output_norm(x).unflatten(1, (slots, k))
        anchor = self.anchor_norm(self.context_proj(context))[:, None, None].expand_as(rows)
        factors = F.silu(self.factor_input_proj(torch.cat((rows, anchor, rows * anchor), dim=-1)))
        start = self.unit(self.anchor_out_head(anchor[:, :1]))
        leaving = torch.cat((start, self.unit(self.out_head(factors[:, :-1]))), dim=1)
        result: torch.Tensor = self.logit_scale * leaving @ self.unit(self.in_head(factors)).mT
        return result

    def unit(self, x: torch.Tensor) -> torch.Tensor:
        """Vectors of length one."""
        return F.normalize(x, dim=-1, eps=self.vector_eps)

    def walk(self, embedding: nn.Module, hidden: torch.Tensor, logits: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        """Greedy tokens [K] of slots with hidden [K, H] and logits [K, V] after the context row [H]."""
        log_probs, candidates = logits.log_softmax(-1).topk(self.top_k)
        scores = self.scores(embedding(candidates)[None], log_probs[None], hidden[None], row[None])[0]
        taken, path = 0, []
        for slot, ids in enumerate(candidates):
            taken = int(scores[slot, taken].argmax())
            path.append(ids[taken])
        return torch.stack(path)
