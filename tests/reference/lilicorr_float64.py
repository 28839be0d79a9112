"""LiLiCorr's correlator as float64 equations, one block at a time: no import from dflash_trt.

Candidate c = (slot s, rank j) of K slots with k candidates each, the best first; C is the correlator's width.

    features = layer_norm([log p, p, log p - log p of the best, j / (k - 1), j == 0])
    x[c]     = token_proj(embedding) + pass_hidden_proj(hidden[s]) + mlp(features)
               + slot_embedding[s] + rank_embedding[j]
    layers   : x += attention(rms(x)) over all candidates, bias by distance of slots;  x += mlp(rms(x))
    a        = rms(context_proj(context row of the last verified token))
    z        = silu(factor_input_proj([x, a, x * a]))
    score    = scale * unit(out_head(z[before])) . unit(in_head(z[after])); unit(anchor_out_head(a)) before slot 0
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.reference.dflash_float64 import Array, rms_norm, silu, softmax


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceCorrelator:
    """One correlator, every tensor widened to float64."""

    tensors: dict[str, Array]
    """Without the prefix `lilicorr.`"""
    config: dict[str, Any]
    """dflash_config."""
    eps: float
    """rms_norm_eps."""

    def scores(self, embeds: Array, log_probs: Array, hidden: Array, anchor: Array) -> Array:
        """embeds [K, k, H], log_probs [K, k], hidden [K, H], anchor [H] -> [K, k, k]: after, candidate."""
        K, k = log_probs.shape
        x = embeds if "token_proj.weight" not in self.tensors else self.linear("token_proj", embeds)
        x = x + self.linear("pass_hidden_proj", hidden)[:, None] + self.mlp("feature_mlp", self.features(log_probs))
        x = x + self.tensors["slot_embedding"][0, 0, :K] + self.tensors["rank_embedding"][0, 0]
        x = x.reshape(K * k, -1)
        for layer in range(self.config["lilicorr_num_layers"]):
            x = x + self.attention(f"layers.{layer}.attn", self.norm(f"layers.{layer}.attn_norm", x), k)
            x = x + self.mlp(f"layers.{layer}.mlp", self.norm(f"layers.{layer}.mlp_norm", x))
        x = self.norm("output_norm", x).reshape(K, k, -1)
        a = self.norm("anchor_norm", self.linear("context_proj", anchor))
        z = silu(self.linear("factor_input_proj", np.concatenate([x, np.broadcast_to(a, x.shape), x * a], axis=-1)))
        leaving, arriving = self.unit("out_head", z), self.unit("in_head", z)
        first = np.broadcast_to(self.unit("anchor_out_head", a), leaving[:1].shape)
        before = np.concatenate([first, leaving[:-1]])
        scores: Array = self.config["lilicorr_logit_scale"] * before @ arriving.swapaxes(1, 2)
        return scores

    def features(self, log_probs: Array) -> Array:
        """[K, k] -> [K, k, 5]."""
        k = log_probs.shape[1]
        ranks = np.broadcast_to(np.arange(k, dtype=np.float64), log_probs.shape)
        below = log_probs - log_probs.max(-1, keepdims=True)
        x = np.stack([log_probs, np.exp(log_probs), below, ranks / max(k - 1, 1), ranks == 0], axis=-1)
        x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
        normed: Array = x * self.tensors["feature_norm.weight"] + self.tensors["feature_norm.bias"]
        return normed

    def attention(self, name: str, x: Array, k: int) -> Array:
        """x [K*k, C] -> [K*k, C]."""
        heads = self.config["lilicorr_num_heads"]
        qkv = x @ self.tensors[f"{name}.in_proj_weight"].T + self.tensors[f"{name}.in_proj_bias"]
        q, key, v = (part.reshape(len(x), heads, -1).swapaxes(0, 1) for part in np.split(qkv, 3, axis=-1))
        relative, slots = self.tensors["relative_slot_bias"], np.arange(len(x)) // k
        distance = slots[:, None] - slots
        bias = relative[:, distance + relative.shape[1] // 2]
        bias = bias + (distance == 0) * self.tensors["same_slot_bias"][:, None, None]
        weights = softmax(q @ key.swapaxes(1, 2) / np.sqrt(q.shape[-1]) + bias)
        return self.linear(f"{name}.out_proj", (weights @ v).swapaxes(0, 1).reshape(x.shape))

    def linear(self, name: str, x: Array) -> Array:
        y: Array = x @ self.tensors[f"{name}.weight"].T + self.tensors[f"{name}.bias"]
        return y

    def mlp(self, name: str, x: Array) -> Array:
        return self.linear(f"{name}.down_proj", silu(self.linear(f"{name}.up_proj", x)))

    def norm(self, name: str, x: Array) -> Array:
        return rms_norm(x, self.tensors[f"{name}.weight"], self.eps)

    def unit(self, name: str, x: Array) -> Array:
        y = self.linear(name, x)
        unit: Array = y / np.maximum(np.linalg.norm(y, axis=-1, keepdims=True), self.config["lilicorr_vector_eps"])
        return unit
