"""The DFlash drafter as float64 equations: no cache, no fusion, no import from dflash_trt.

Legend of the shape comments (one request at a time, so there is no B axis):
    S block slots    T new context rows    C cached context rows    L draft layers    A taps
    N q-heads        G kv-heads            D head_dim               H hidden          F MLP inner
Context row j stands at position j.

    context = rms(fc @ target_features) * hidden_norm             once, shared by all layers
    k, v    = k_proj(context), v_proj(context)                    per layer; no input_layernorm here
    k       = rope(rms_per_head(k) * k_norm)                      v is neither normed nor rotated
    block   = Qwen3 layers over S rows, keys [context; block]
"""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.torch import load_file

Array = npt.NDArray[np.float64]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x^2) + eps) * weight, over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    """x * sigmoid(x), with sigmoid as a tanh so that no exponential overflows."""
    return x * 0.5 * (1.0 + np.tanh(0.5 * x))


def softmax(scores: Array) -> Array:
    """exp(x) / sum(exp(x)) over the last axis; -inf becomes 0."""
    weights = np.exp(scores - np.max(scores, axis=-1, keepdims=True))
    return weights / np.sum(weights, axis=-1, keepdims=True)


def rotate_half(x: Array) -> Array:
    """[.., D] -> [.., D]: (first half, second half) becomes (-second half, first half)."""
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate([-second, first], axis=-1)


def convolution(x: Array, base: Array, change: Array) -> Array:
    """Rows x [S, H] and those before them in their block, times base [taps, H] + change [S, taps, groups]."""
    kernel = base + np.repeat(change, x.shape[1] // change.shape[-1], axis=-1)  # [S, taps, H]
    out = np.zeros_like(x)
    for tap in range(len(base)):
        out[tap:] += kernel[tap:, tap] * x[: len(x) - tap]
    return out


@dataclass(frozen=True, kw_only=True, slots=True)
class RotaryEmbedding:
    """Angles and the factor on cos and sin."""

    inverse_frequencies: Array
    """[D/2], radians per position."""
    attention_factor: float
    """Multiplies cos and sin, so a score gets its square."""
    interleaved: bool = False
    """Whether pair i is (x[2i], x[2i + 1]) and not (x[i], x[i + D/2])."""

    def rotate(self, x: Array, positions: npt.NDArray[np.int64]) -> Array:
        """x [rows, heads, D] at positions [rows] -> x * cos + rotate_half(x) * sin."""
        half = positions[:, None].astype(np.float64) * self.inverse_frequencies  # [rows, D/2]
        if self.interleaved:  # a pair is a complex number that is multiplied by e^(i angle)
            pairs = x[..., 0::2] + 1j * x[..., 1::2]
            turned = pairs * (self.attention_factor * np.exp(1j * half))[:, None]
            return np.stack([turned.real, turned.imag], axis=-1).reshape(x.shape)
        angles = np.concatenate([half, half], axis=-1)[:, None, :]  # [rows, 1, D]
        cos = np.cos(angles) * self.attention_factor
        sin = np.sin(angles) * self.attention_factor
        return x * cos + rotate_half(x) * sin


def yarn(rope: dict[str, Any], theta: float, head_dim: int) -> RotaryEmbedding:
    """YaRN (arXiv 2309.00071, section 3): slow dimensions are interpolated, fast ones kept.

    A dimension pair i turns `original / wavelength_i` times over the trained length. The pair that turns
    r times is i(r) = D ln(original / (2 pi r)) / (2 ln theta); between i(beta_fast) and i(beta_slow) the
    two frequencies are mixed linearly in i (as every implementation does; the paper's gamma is linear
    in r). `truncate` widens that range to whole dimensions: default true, gpt-oss says false.
    """
    factor = float(rope["factor"])
    original = float(rope["original_max_position_embeddings"])

    def pair_turning(rotations: float) -> float:
        return head_dim * math.log(original / (2 * math.pi * rotations)) / (2 * math.log(theta))

    low = pair_turning(float(rope.get("beta_fast") or 32.0))
    high = pair_turning(float(rope.get("beta_slow") or 1.0))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    pairs = np.arange(head_dim // 2, dtype=np.float64)
    interpolated = np.clip((pairs - low) / max(high - low, 1e-3), 0.0, 1.0)  # [D/2], 0 keep .. 1 stretch
    kept = theta ** (-2.0 * pairs / head_dim)  # [D/2]
    frequencies = kept * (1.0 - interpolated) + kept / factor * interpolated

    attention_factor = rope.get("attention_factor")
    if attention_factor is None:
        attention_factor = 0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0
    return RotaryEmbedding(inverse_frequencies=frequencies, attention_factor=float(attention_factor))


def llama3(rope: dict[str, Any], theta: float, head_dim: int) -> RotaryEmbedding:
    """Llama 3.1: wavelengths above original/low_freq_factor are stretched by `factor`, below original/high kept.

    Between them the two are mixed linearly in original/wavelength (transformers 5.23, modeling_rope_utils).
    """
    original, factor = float(rope["original_max_position_embeddings"]), float(rope["factor"])
    low, high = float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    frequencies = []
    for pair in range(head_dim // 2):
        frequency = theta ** (-2.0 * pair / head_dim)
        turns = original * frequency / (2 * math.pi)
        if turns < low:
            frequencies.append(frequency / factor)
        elif turns > high:
            frequencies.append(frequency)
        else:
            smooth = (turns - low) / (high - low)
            frequencies.append((1 - smooth) * frequency / factor + smooth * frequency)
    return RotaryEmbedding(inverse_frequencies=np.array(frequencies), attention_factor=1.0)


def read_rotary(config: dict[str, Any], head_dim: int) -> RotaryEmbedding:
    """The rotary embedding of a config.json, spelled rope_parameters (new) or rope_scaling + rope_theta."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"])
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "llama3":
        return llama3(rope, theta, head_dim)
    if kind == "yarn":
        if "mscale" in rope or "mscale_all_dim" in rope:
            raise NotImplementedError("the reference has no mscale variant of YaRN")
        return yarn(rope, theta, head_dim)
    if kind != "default":
        raise NotImplementedError(f"the reference has no rope_type {kind!r}")
    pairs = np.arange(head_dim // 2, dtype=np.float64)
    return RotaryEmbedding(inverse_frequencies=theta ** (-2.0 * pairs / head_dim), attention_factor=1.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionRule:
    """Mask of the keys that one layer's queries see."""

    causal: bool
    """No key after the query; only matters inside the block, for context always lies before it."""
    window: int | None
    """Keys nearer than this many positions; both ways if not causal. None: all keys."""

    def visible(self, query: npt.NDArray[np.int64], key: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Positions [S], [C+S] -> [S, C+S]."""
        distance = query[:, None] - key[None, :]
        seen = np.ones(distance.shape, dtype=np.bool_)
        if self.causal:
            seen &= distance >= 0
        if self.window is not None:
            seen &= (distance if self.causal else np.abs(distance)) < self.window
        return seen


def read_attention_rules(config: dict[str, Any]) -> list[AttentionRule]:
    """Per layer: is_causal, else dflash_config.causal, else causal exactly if the layer slides."""
    dflash = config.get("dflash_config") or {}
    forced = dflash.get("is_causal", config.get("is_causal"))
    if forced is None:
        forced = dflash.get("causal")
    layer_types = config.get("layer_types") or ["full_attention"] * config["num_hidden_layers"]
    rules = []
    for layer_type in layer_types:
        sliding = layer_type == "sliding_attention"
        window = int(config["sliding_window"]) if sliding else None
        rules.append(AttentionRule(causal=sliding if forced is None else bool(forced), window=window))
    return rules


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceDrafter:
    """One drafter checkpoint, every tensor widened to float64."""

    tensors: dict[str, Array]
    rules: list[AttentionRule]
    rotary: RotaryEmbedding
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    embedding_scale: float = 1.0
    value_scale: float = 1.0
    """On V of context and block: MiMo's attention_value_scale (vLLM 0.32, qwen3_dflash.py)."""
    tap_norms: bool = False
    context_input_layernorm: bool = False
    """Both Laguna's: laguna_dflash.py, combine_hidden_states and _project_context_kv (vLLM 0.32)."""
    gate: int = 0
    """Laguna's g_proj: factors of softplus(g_proj(h)) by layer and row, num_heads or num_heads * head_dim of them."""
    rotary_dim: int | None = None
    """The first dimensions of a head, which turn among themselves; None: all."""
    output_multiplier: float = 1.0
    softcap: float | None = None

    @staticmethod
    def load(checkpoint_dir: Path | str, features: dict[str, Any] | None = None) -> "ReferenceDrafter":
        """Reads config.json and model.safetensors of a z-lab v1 checkpoint (qwen3 or gpt_oss).

        `features` are fields of this class, for drafts of other dialects.
        """
        path = Path(checkpoint_dir)
        config = json.loads((path / "config.json").read_text())
        stored = load_file(path / "model.safetensors")
        num_heads = config["num_attention_heads"]
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        fields: dict[str, Any] = {
            "tensors": {name: tensor.double().numpy() for name, tensor in stored.items()},
            "rules": read_attention_rules(config),
            "rotary": read_rotary(config, head_dim),
            "num_heads": num_heads,
            "num_kv_heads": config["num_key_value_heads"],
            "head_dim": head_dim,
            "eps": config["rms_norm_eps"],
        }
        return ReferenceDrafter(**(fields | (features or {})))

    def norm(self, name: str, x: Array) -> Array:
        """RMSNorm over the last axis with the weight `name`."""
        return rms_norm(x, self.tensors[f"{name}.weight"], self.eps)

    def linear(self, name: str, x: Array) -> Array:
        """x @ weight.T, plus the bias where the checkpoint has one."""
        y = x @ self.tensors[f"{name}.weight"].T
        bias = self.tensors.get(f"{name}.bias")
        return y if bias is None else y + bias

    def heads(self, name: str, x: Array, num_heads: int) -> Array:
        """The projection `name` of x [rows, H], split: [rows, heads, D]."""
        return self.linear(name, x).reshape(len(x), num_heads, self.head_dim)

    def keys_values(self, layer: int, x: Array, positions: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """x [rows, H] -> k, v [rows, G, D]: k normed per head, then rotated; v neither."""
        attention = f"layers.{layer}.self_attn"
        k = self.norm(f"{attention}.k_norm", self.heads(f"{attention}.k_proj", x, self.num_kv_heads))
        v = self.heads(f"{attention}.v_proj", x, self.num_kv_heads) * self.value_scale
        return self.rotate(k, positions), v

    def rotate(self, x: Array, positions: npt.NDArray[np.int64]) -> Array:
        """RoPE of x [rows, heads, D] on the dimensions that turn (transformers: partial_rotary_factor)."""
        dims = self.rotary_dim or self.head_dim
        return np.concatenate([self.rotary.rotate(x[..., :dims], positions), x[..., dims:]], axis=-1)

    def context(self, target_hidden: Array) -> Array:
        """Target features [T, A*H] -> context rows [T, H], before K and V."""
        if self.tap_norms:
            norms = [name for name in self.tensors if name.startswith("aux_hidden_norms.")]
            taps = np.split(target_hidden, len(norms), axis=-1)
            normed = [self.norm(f"aux_hidden_norms.{i}", tap) for i, tap in enumerate(taps)]
            target_hidden = np.concatenate(normed, axis=-1)
        return self.norm("hidden_norm", self.linear("fc", target_hidden))

    def context_kv(self, target_hidden: Array, positions: npt.NDArray[np.int64]) -> tuple[Array, Array]:
        """Target features [T, A*H] at positions [T] -> k, v, each [T, L, G, D]."""
        context = self.context(target_hidden)
        rows = [context] * len(self.rules)
        if self.context_input_layernorm:
            rows = [self.norm(f"layers.{layer}.input_layernorm", context) for layer in range(len(self.rules))]
        pairs = [self.keys_values(layer, rows[layer], positions) for layer in range(len(self.rules))]
        return np.stack([k for k, _ in pairs], axis=1), np.stack([v for _, v in pairs], axis=1)

    def attention(self, layer: int, h: Array, context: tuple[Array, Array], positions: npt.NDArray[np.int64]) -> Array:
        """Normed block rows h [S, H] over context k, v [C, G, D] and themselves -> [S, H]."""
        name = f"layers.{layer}.self_attn"
        q = self.norm(f"{name}.q_norm", self.heads(f"{name}.q_proj", h, self.num_heads))  # [S, N, D]
        q = self.rotate(q, positions)
        block_k, block_v = self.keys_values(layer, h, positions)  # [S, G, D]
        queries_per_kv = self.num_heads // self.num_kv_heads
        k = np.repeat(np.concatenate([context[0], block_k]), queries_per_kv, axis=1)  # [C+S, N, D]
        v = np.repeat(np.concatenate([context[1], block_v]), queries_per_kv, axis=1)  # [C+S, N, D]

        key_positions = np.concatenate([np.arange(len(context[0])), positions])  # [C+S]
        scores = np.einsum("snd,knd->nsk", q, k) / math.sqrt(self.head_dim)  # [N, S, C+S]
        scores = np.where(self.rules[layer].visible(positions, key_positions), scores, -np.inf)
        if f"{name}.sinks" in self.tensors:  # one more column of the softmax, which brings no value
            sinks = np.broadcast_to(self.tensors[f"{name}.sinks"][:, None, None], (*scores.shape[:2], 1))
            weights = softmax(np.concatenate([scores, sinks], axis=-1))[..., :-1]
        else:
            weights = softmax(scores)
        mixed = np.einsum("nsk,knd->snd", weights, v)  # [S, N, D]
        if self.gate:
            gate = np.logaddexp(0.0, self.linear(f"{name}.g_proj", h))  # [S, gate]
            mixed = (mixed.reshape(len(h), self.gate, -1) * gate[..., None]).reshape(mixed.shape)
        return self.linear(f"{name}.o_proj", mixed.reshape(len(h), -1))

    def mlp(self, layer: int, h: Array) -> Array:
        """down(silu(gate(h)) * up(h)): [S, H] -> [S, H] through [S, F]."""
        name = f"layers.{layer}.mlp"
        return self.linear(
            f"{name}.down_proj", silu(self.linear(f"{name}.gate_proj", h)) * self.linear(f"{name}.up_proj", h)
        )

    def convolved(self, name: str, h: Array, sublayer: Callable[[Array], Array]) -> Array:
        """`sublayer` of h [S, H], between DFlash2's convolutions where the checkpoint has them (dflash 0.1.0)."""
        base = self.tensors.get(f"{name}.base_kernel")  # [2, taps, H]
        if base is None:
            return sublayer(h)
        change = self.linear(f"{name}.kernel_projection", h).reshape(len(h), 2, base.shape[1], -1)
        return convolution(sublayer(convolution(h, base[0], change[:, 0])), base[1], change[:, 1])

    def layer_outputs(
        self, noise_embeds: Array, context_k: Array, context_v: Array, positions: npt.NDArray[np.int64]
    ) -> list[Array]:
        """The residual stream [S, H] after each of the L layers, before the final norm."""
        x = np.asarray(noise_embeds, dtype=np.float64) * self.embedding_scale  # [S, H]
        outputs = []
        for layer in range(len(self.rules)):
            context = context_k[:, layer], context_v[:, layer]  # [C, G, D] each
            h = self.norm(f"layers.{layer}.input_layernorm", x)
            attention = partial(self.attention, layer, context=context, positions=positions)
            x = x + self.convolved(f"layers.{layer}.attention_conv", h, attention)
            h = self.norm(f"layers.{layer}.post_attention_layernorm", x)
            x = x + self.convolved(f"layers.{layer}.mlp_conv", h, partial(self.mlp, layer))
            outputs.append(x)
        return outputs

    def proposals(self, hidden: Array) -> list[int]:
        """The S-1 tokens that the draft's own head proposes after rows 1.. of hidden [S, H], in the target's count.

        logits_processor.py of vLLM 0.32: multiplier, then cap; qwen3_dflash.py compute_logits: row i is i + d2t[i].
        """
        logits = hidden[1:] @ self.tensors["lm_head.weight"].T * self.output_multiplier
        if self.softcap is not None:
            logits = self.softcap * np.tanh(logits / self.softcap)
        best = logits.argmax(axis=-1)
        return (best + self.tensors["d2t"][best].astype(int) if "d2t" in self.tensors else best).tolist()

    def embeddings(self, block: list[int], mask: int, borrowed: Array) -> Array:
        """[S, H] of a block's tokens: the draft's own table, else the target's `borrowed`; then its own mask row."""
        rows = self.tensors.get("embed_tokens.weight", borrowed)[block]
        if "mask_embedding" in self.tensors:
            rows = np.where(np.array(block)[:, None] == mask, self.tensors["mask_embedding"], rows)
        return rows

    def draft(self, noise_embeds: Array, context_k: Array, context_v: Array, positions: npt.NDArray[np.int64]) -> Array:
        """Block embeddings [S, H] at positions [S] over context k, v [C, L, G, D] -> final-normed [S, H]."""
        return self.norm("norm", self.layer_outputs(noise_embeds, context_k, context_v, positions)[-1])
