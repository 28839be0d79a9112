# SPDX-License-Identifier: Apache-2.0
"""Servers with one thing wrong, as peers have had it; the switches are here, and nowhere in the product."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.llm import LLM
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from tests.engines import build
from tests.paths import FIXTURES

PAIR = "qwen3"
TARGET = FIXTURES / f"tiny-{PAIR}"
WINDOW = 128
"""Tokens that a prompt must share with an earlier one to be known."""
Weights = dict[str, torch.Tensor]
Config = dict[str, Any]


def engine(
    directory: Path, *, window: int | None = WINDOW, edit: Callable[[Weights], None] | None = None, **facts: object
) -> Path:
    """The fixture's drafter as an engine, with a window on all layers, and k_norms that differ among layers.

    Without `edit` its proposals are the fixture's own wherever the context is shorter than the window; `facts` stand in
    its config.json, true or not.
    """
    draft, output = directory / "draft", directory / "engine"
    shutil.copytree(FIXTURES / f"tiny-{PAIR}-dflash", draft)
    config = json.loads((draft / "config.json").read_text())
    if window is not None:
        layers = config["num_hidden_layers"]
        config |= {"layer_types": ["sliding_attention"] * layers, "sliding_window": window, "is_causal": False}
        config |= {"use_sliding_window": True, "max_window_layers": 0}
    (draft / "config.json").write_text(json.dumps(config | facts))
    weights = load_file(draft / "model.safetensors")
    spread_k_norms(weights)
    if edit is not None:
        edit(weights)
    save_file(weights, draft / "model.safetensors", metadata={"format": "pt"})
    build(draft, output, TARGET)
    return output


def spread_k_norms(weights: Weights) -> None:
    """Multiplies the k_norm of layers 1, 2, ... by powers of 2 and divides their q_norm: q * k stays to the bit.

    Both channels that RoPE turns into each other have the same factor.
    """
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith("k_norm.weight") and not name.startswith("layers.0.")]:
        half = weights[name].numel() // 2
        factor = 2.0 ** torch.randint(-1, 2, (half,), generator=generator).repeat(2)
        query = name.replace("k_norm", "q_norm")
        weights[name] = (weights[name] * factor).to(weights[name].dtype)
        weights[query] = (weights[query] / factor).to(weights[query].dtype)


def first_k_norm_for_all(weights: Weights) -> None:
    for name in [name for name in weights if name.endswith("k_norm.weight")]:
        weights[name] = weights["layers.0.self_attn.k_norm.weight"].clone()


def reverse_fc(weights: Weights) -> None:
    """Rows of fc in the other order: every context row is another's."""
    weights["fc.weight"] = weights["fc.weight"].flip(0)


def misread_projections(weights: Weights) -> None:
    """q, k and v as if their quantised values were the weights: without the scales of their rows."""
    for name in [name for name in weights if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))]:
        weights[name] = (weights[name] / weights[name].abs().amax(-1, keepdim=True)).to(weights[name].dtype)


def fc_of_another_target(weights: Weights) -> None:
    """Taps are mixed as the draft of another target does."""
    other = load_file(FIXTURES / "tiny-gpt-oss-dflash" / "model.safetensors")["fc.weight"]
    assert other.shape == weights["fc.weight"].shape
    weights["fc.weight"] = other


def shift_taps(llm: LLM) -> None:
    """Each tap is what goes into its layer, and not what comes out of it."""
    target = pair(llm)._target
    assert isinstance(target, HuggingFaceTarget)
    # index into hidden_states, embeddings first
    target._catcher, target._taps = None, [tap - 1 for tap in target._taps]


def scale_v(llm: LLM) -> None:
    """V of the context is four times what it should be: as from an FP8 cache whose scale got lost."""
    executor = drafter(llm).executor
    context = executor.context

    def scaled(taps: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return context(taps, positions) * torch.tensor([1.0, 4.0]).view(2, 1, 1, 1)  # kv [T, 2, L, G, D]

    executor.context = scaled  # type: ignore[method-assign]


def lose_prefix_features(llm: LLM) -> None:
    """A prefix cache that spares the target a known prompt, and so the drafter its features: rows are never written."""
    running, drafting = pair(llm), drafter(llm)
    reserve = running.reserve
    noise = torch.Generator().manual_seed(0)  # contents of memory that was never written

    @torch.inference_mode()
    def starving(slot: int, pages: Sequence[int], num_tokens: int) -> None:
        reserve(slot, pages, num_tokens)
        for page in pages[: num_tokens // TOKENS_PER_PAGE]:
            for rows in (drafting.cache.k, drafting.cache.v):
                rows[page].normal_(0, 4, generator=noise)

    running.reserve = starving  # type: ignore[method-assign]


def ignore_temperature(llm: LLM) -> None:
    """Decodes greedily, regardless of the request."""
    backend = llm.backend
    request = backend.request

    def greedy(prompt: Any, params: SamplingParams, *arguments: Any, **named: Any) -> Any:
        return request(prompt, msgspec.structs.replace(params, temperature=0.0), *arguments, **named)

    backend.request = greedy  # type: ignore[method-assign]


def pair(llm: LLM) -> ModelRunner:
    return llm.backend.decoder.runner


def drafter(llm: LLM) -> Drafter:
    return pair(llm)._drafter
