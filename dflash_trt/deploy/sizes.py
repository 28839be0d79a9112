# SPDX-License-Identifier: Apache-2.0
"""What a deployment must know of its two models: sizes, cache rows and how the weights divide among ranks."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.quantization import FP8
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.deploy.published import PublishedTarget, published_drafts, published_targets

CHECKPOINT, PUBLISHED = "checkpoint", "published facts"
BF16_BITS = 16.0
# Bits of a stored weight, scales included: NVFP4 has one FP8 scale per block of 16.
WEIGHT_BITS = {FP8: 8.0, "NVFP4": 4.5, "W4A16_NVFP4": 4.5}
# Every rank keeps these whole; the projections of the layers are divided among tensor-parallel ranks.
REPLICATED = ("fc",)


class DraftFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A draft checkpoint, seen or published."""

    name: str
    origin: str
    """CHECKPOINT or PUBLISHED."""
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int | None
    num_target_layers: int | None
    max_position_embeddings: int | None
    model_type: str | None
    architectures: tuple[str, ...] | None
    quantized: dict[str, str]
    """Algorithm by module of the checkpoint as it is."""

    def linear_shapes(self) -> dict[str, tuple[int, int]]:
        """Rows and columns of every linear layer, in the order of the checkpoint."""
        H, F, D = self.hidden_size, self.intermediate_size, self.head_dim
        q, kv = self.num_attention_heads * D, self.num_key_value_heads * D
        attention = {"q_proj": (q, H), "k_proj": (kv, H), "v_proj": (kv, H), "o_proj": (H, q)}
        mlp = {"gate_proj": (F, H), "up_proj": (F, H), "down_proj": (H, F)}
        shapes = {"fc": (H, len(self.target_layer_ids) * H)}
        for layer in range(self.num_layers):
            shapes |= {f"layers.{layer}.self_attn.{name}": shape for name, shape in attention.items()}
            shapes |= {f"layers.{layer}.mlp.{name}": shape for name, shape in mlp.items()}
        return shapes

    def weight_bytes(self, algorithms: dict[str, str], ranks: int) -> int:
        """Bytes of the linear layers on one of `ranks` tensor-parallel ranks; norms and biases are not counted."""
        total = 0.0
        for module, (rows, columns) in self.linear_shapes().items():
            bits = WEIGHT_BITS.get(algorithms.get(module, ""), BF16_BITS)
            total += rows * columns * bits / 8 / (1 if module in REPLICATED else ranks)
        return round(total)

    def context_bytes_per_token(self, ranks: int, element_bytes: int) -> int:
        """Bytes of one token's injected K and V of all layers, on one of `ranks` ranks."""
        heads = -(-self.num_key_value_heads // ranks)
        return self.num_layers * 2 * heads * self.head_dim * element_bytes


class TargetFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A target checkpoint, seen or published."""

    name: str
    origin: str
    expert_bytes: int
    """Weights of the experts, all ranks together."""
    dense_bytes: int
    """Weights of everything but experts: attention, dense MLPs, embedding and lm_head."""
    num_layers: int
    num_full_layers: int | None
    """Layers whose cache grows with the sequence; None where the layers keep another state than K and V."""
    sliding_window: int
    num_key_value_heads: int
    head_dim: int

    def weight_bytes(self, ranks: int) -> int:
        """Bytes on one of `ranks` ranks: experts divide by tensor or expert parallelism alike."""
        return (self.expert_bytes + self.dense_bytes) // ranks

    def cache_bytes(self, ranks: int, element_bytes: int, tokens: int) -> int | None:
        """Bytes of one request's cache on one of `ranks` ranks; None where the layers keep another state."""
        if self.num_full_layers is None:
            return None
        row = 2 * -(-self.num_key_value_heads // ranks) * self.head_dim * element_bytes
        windowed = (self.num_layers - self.num_full_layers) * min(tokens, self.sliding_window)
        return row * (self.num_full_layers * tokens + windowed)


def read_draft_facts(name: str) -> DraftFacts | None:
    """The facts of a draft: from the directory `name`, else as published; None for an unknown repository id."""
    if name and Path(name).is_dir():
        return _draft_of(Path(name))
    known = published_drafts().get(name)
    if known is None:
        return None
    return DraftFacts(
        name=name,
        origin=PUBLISHED,
        num_layers=known.num_layers,
        hidden_size=known.hidden_size,
        intermediate_size=known.intermediate_size,
        num_attention_heads=known.num_attention_heads,
        num_key_value_heads=known.num_key_value_heads,
        head_dim=known.head_dim,
        block_size=known.block_size,
        target_layer_ids=known.target_layer_ids,
        mask_token_id=None,
        num_target_layers=known.num_target_layers,
        max_position_embeddings=known.max_position_embeddings,
        model_type=known.model_type,
        architectures=None,
        quantized={},
    )


def _draft_of(directory: Path) -> DraftFacts:
    checkpoint = read_draft(directory)
    spec = checkpoint.spec
    return DraftFacts(
        name=str(directory),
        origin=CHECKPOINT,
        num_layers=len(spec.layers),
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_attention_heads=spec.num_attention_heads,
        num_key_value_heads=spec.num_key_value_heads,
        head_dim=spec.head_dim,
        block_size=spec.block_size,
        target_layer_ids=spec.target_layer_ids,
        mask_token_id=spec.mask_token_id,
        num_target_layers=spec.num_target_layers,
        max_position_embeddings=spec.max_position_embeddings,
        model_type=spec.model_type,
        architectures=Facts.load(checkpoint.config_file).texts("architectures"),
        quantized=checkpoint.quantization.modules,
    )


def read_target_facts(name: str) -> TargetFacts | None:
    """The facts of a target: from the directory `name`, else as published; None where neither knows its weights."""
    if name and Path(name).is_dir():
        return _target_of(Path(name))
    known = published_targets().get(name)
    return None if known is None else _published_target(known)


def _published_target(known: PublishedTarget) -> TargetFacts:
    H, D = known.hidden_size, known.head_dim
    expert = 3 * H * known.expert_intermediate_size
    attention = 2 * H * D * (known.num_attention_heads + known.num_key_value_heads)
    vocabulary = 2 * known.vocab_size * H
    return TargetFacts(
        name=known.target,
        origin=PUBLISHED,
        expert_bytes=round(known.num_layers * known.num_experts * expert * known.expert_bits / 8),
        dense_bytes=round((known.num_layers * attention + vocabulary) * BF16_BITS / 8),
        num_layers=known.num_layers,
        num_full_layers=known.num_full_layers,
        sliding_window=known.sliding_window,
        num_key_value_heads=known.num_key_value_heads,
        head_dim=D,
    )


def _target_of(directory: Path) -> TargetFacts:
    spec = read_target(directory).spec
    weights = read_weights(directory)
    experts = sum(tensor.num_bytes for name, tensor in weights.items() if ".experts." in name)
    config = Facts.load(directory / "config.json")
    text = config.section("text_config") if "text_config" in config else config
    types = text.texts("layer_types") if "layer_types" in text else ("full_attention",) * spec.num_hidden_layers
    # Latent and linear attention keep another state than rows of K and V: its size is not known here.
    is_plain = set(types) <= {"full_attention", "sliding_attention"} and "kv_lora_rank" not in text
    return TargetFacts(
        name=str(directory),
        origin=CHECKPOINT,
        expert_bytes=experts,
        dense_bytes=sum(tensor.num_bytes for tensor in weights.values()) - experts,
        num_layers=spec.num_hidden_layers,
        num_full_layers=types.count("full_attention") if is_plain else None,
        sliding_window=text.integer("sliding_window") if "sliding_attention" in types else 0,
        num_key_value_heads=text.integer("num_key_value_heads") if is_plain else 0,
        head_dim=_head_dim(text, spec.hidden_size) if is_plain else 0,
    )


def _head_dim(text: Facts, hidden_size: int) -> int:
    return text.integer("head_dim") if "head_dim" in text else hidden_size // text.integer("num_attention_heads")
