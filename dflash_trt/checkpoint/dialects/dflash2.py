# SPDX-License-Identifier: Apache-2.0
"""DFlash2: z-lab's layout with block convolutions and a candidate selector.

Keys and tensors are those of z-lab's dflash 0.1.0 (dflash/model.py, DFlash2DraftModel), vLLM 0.33 and SGLang 0.5.23.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec

from dflash_trt.checkpoint.dialects import zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect, unrepresentable
from dflash_trt.checkpoint.dialects.shared_keys import Places, recognised_by
from dflash_trt.checkpoint.draft_spec import BlockConv, DraftSpec, SelectorSizes
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import Weights

ARCHITECTURES = (
    "DFlash2DraftModel", "MiniMaxDFlash2DraftModel", "DFlash2BeamDraftModel", "Qwen3DFlash2Model",
    "DFlash2Qwen3ForCausalLM", "Qwen3DFlash2DraftModel",
)  # fmt: skip
"""Names under which the same keys and tensors were published; the first is written."""
CONV_KEYS = {"conv_kernel_size": "kernel_size", "conv_group_size": "group_size"}
SELECTOR_KEYS = {"selector_rank": "rank", "selector_top_k": "top_k"}
KEYS = frozenset(CONV_KEYS) | frozenset(SELECTOR_KEYS)
MAX_KERNEL_SIZE, MAX_RANK, MAX_TOP_K = 16, 8192, 1024


def read(config: Facts, weights: Weights) -> DraftSpec:
    """The facts of a DFlash2 draft."""
    if not set(config.texts("architectures")) & set(ARCHITECTURES):
        raise config.error("architectures", f"one of {', '.join(ARCHITECTURES)}, which have {', '.join(sorted(KEYS))}")
    spec = zlab.read(config.replaced(architectures=[zlab.ARCHITECTURE]), weights)
    if spec.sample_from_anchor:
        raise config.error("sample_from_anchor", "a DFlash2 draft, whose selector begins after the anchor")
    return msgspec.structs.replace(spec, **read_additions(Places(config).of, spec.hidden_size, spec.vocab_size))


def read_additions(of: Callable[[str], Facts], hidden_size: int, vocab_size: int | None) -> dict[str, Any]:
    """Convolution and selector, read where `of` says that a key stands; CheckpointError where they do not fit."""
    conv = read_conv(of, hidden_size)
    most = min(MAX_TOP_K, vocab_size or MAX_TOP_K)
    rank = of("selector_rank").integer("selector_rank", minimum=0, maximum=MAX_RANK)  # 0: convolutions alone
    top_k = (place := of("selector_top_k")).optional("selector_top_k", lambda key: place.integer(key, maximum=most))
    if rank and top_k is None:
        raise place.error("selector_top_k", f"an integer from 1 to {most}")
    return {
        "block_conv": conv,
        "candidate_selector": SelectorSizes(rank=rank, top_k=top_k) if rank and top_k else None,
    }


def read_conv(of: Callable[[str], Facts], hidden_size: int) -> BlockConv:
    """The convolution; CheckpointError where its groups do not divide `hidden_size`."""
    taps = of("conv_kernel_size").integer("conv_kernel_size", maximum=MAX_KERNEL_SIZE)
    group_size = (place := of("conv_group_size")).integer("conv_group_size")
    if hidden_size % group_size:
        raise place.error("conv_group_size", f"a divisor of hidden_size {hidden_size}")
    return BlockConv(kernel_size=taps, group_size=group_size)


def additions_to_config(spec: DraftSpec, layout: str) -> dict[str, object]:
    """The keys of convolution and selector; CheckpointError for a draft that has not both."""
    if spec.block_conv is None or spec.candidate_selector is None:
        raise unrepresentable(layout, "block_conv, candidate_selector", "both", "one alone")
    return conv_to_config(spec.block_conv) | {
        key: getattr(spec.candidate_selector, name) for key, name in SELECTOR_KEYS.items()
    }


def conv_to_config(conv: BlockConv) -> dict[str, object]:
    """The keys that `read_conv` reads."""
    return {key: getattr(conv, name) for key, name in CONV_KEYS.items()}


DFLASH2 = Dialect(
    name="dflash2",
    recognises=recognised_by(architectures=ARCHITECTURES, section=KEYS),
    read=read,
    is_canonical=True,
    canonical=zlab.canonical,
)
