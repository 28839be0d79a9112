# SPDX-License-Identifier: Apache-2.0
"""LiLiCorr: z-lab's layout with a transformer that scores the lattice of candidates, with or without convolutions.

Keys and tensors are those of vLLM 0.33 (models/lilicorr.py, LiLiCorrForCausalLM), which SGLang's pull request 37462 and
TensorRT-LLM 1.4.0rc1 read too (arXiv 2608.20530). These two number the modules of an MLP, as torch's Sequential does;
vLLM 0.33 has names for them.
"""

from __future__ import annotations

import re

import msgspec

from dflash_trt.checkpoint.dialects import dflash2, zlab
from dflash_trt.checkpoint.dialects.dialect import Dialect, renamed
from dflash_trt.checkpoint.dialects.shared_keys import PROJECTOR, Places, named
from dflash_trt.checkpoint.draft_spec import LILICORR, BlockConv, DraftSpec, LatticeCorrelator
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.safetensors_file import Weights

ARCHITECTURE = "LiLiCorrDraftModel"
ENABLED, OWN_HEAD = "lilicorr_enabled", "has_own_lm_head"
NUMBERED = re.compile(rf"{LILICORR}\.(feature_mlp|layers\.\d+\.mlp)\.(\d)\.(weight|bias)")
MODULES = {"0": "up_proj", "2": "down_proj"}
MAX_SIZE, MAX_LAYERS, MAX_TOP_K = 1 << 20, 256, 1024


def read(config: Facts, weights: Weights) -> DraftSpec:
    """The facts of a LiLiCorr draft."""
    places = Places(config)
    of = places.of
    if ENABLED in of(ENABLED) and not of(ENABLED).flag(ENABLED):
        raise of(ENABLED).error(ENABLED, "true, or no key of LiLiCorr")
    of(PROJECTOR).optional(PROJECTOR, lambda key: of(PROJECTOR).text(key, choices=(LILICORR, "dflash", "dflash2")))
    spec = zlab.read(config.replaced(architectures=[zlab.ARCHITECTURE]), weights)
    if spec.sample_from_anchor:
        raise config.error("sample_from_anchor", "false in a LiLiCorr draft, whose first slot follows the anchor")
    if spec.has_d2t:
        raise config.error("draft_vocab_size", "a head of the whole vocabulary in a LiLiCorr draft")
    own_head = of(OWN_HEAD).flag(OWN_HEAD, default=spec.has_own_head)
    if own_head != spec.has_own_head:
        raise of(OWN_HEAD).error(OWN_HEAD, "true with a tensor lm_head.weight, else false")
    return msgspec.structs.replace(
        spec,
        block_conv=_read_conv(places, spec.hidden_size),
        lilicorr=_read_correlator(places, spec.hidden_size, spec.vocab_size),
    )


def _read_correlator(places: Places, draft_hidden_size: int, vocab_size: int | None) -> LatticeCorrelator:
    """The sizes; CheckpointError for a missing one, or one that does not fit the others."""

    def integer(name: str, minimum: int = 1, maximum: int = MAX_SIZE) -> int:
        key = f"{LILICORR}_{name}"
        return places.of(key).integer(key, minimum=minimum, maximum=maximum)

    def number(name: str) -> float:
        return places.of(f"{LILICORR}_{name}").number(f"{LILICORR}_{name}")

    sizes = LatticeCorrelator(
        hidden_size=integer("hidden_size", minimum=0) or draft_hidden_size,  # 0: the draft's own
        num_layers=integer("num_layers", minimum=0, maximum=MAX_LAYERS),
        num_heads=integer("num_heads"),
        mlp_ratio=number("mlp_ratio"),
        top_k=integer("candidate_topk", maximum=min(MAX_TOP_K, vocab_size or MAX_TOP_K)),
        factor_dim=integer("factor_dim"),
        vector_eps=number("vector_eps"),
        logit_scale=number("logit_scale"),
    )
    if sizes.hidden_size % sizes.num_heads:
        key = f"{LILICORR}_num_heads"
        raise places.of(key).error(key, f"a divisor of {LILICORR}_hidden_size {sizes.hidden_size}")
    if not 1 <= sizes.hidden_size * sizes.mlp_ratio <= MAX_SIZE:
        key = f"{LILICORR}_mlp_ratio"
        raise places.of(key).error(key, f"a ratio that gives an MLP of 1 to {MAX_SIZE} channels")
    return sizes


def _read_conv(places: Places, hidden_size: int) -> BlockConv | None:
    """The convolution of DFlash2; None without its two keys, or where both are 0."""
    keys = [key for key in dflash2.CONV_KEYS if key in places.of(key) and not places.of(key).holds(key, 0)]
    return dflash2.read_conv(places.of, hidden_size) if keys else None


def additions_to_config(spec: DraftSpec) -> dict[str, object]:
    """The keys of dflash_config that LiLiCorr adds to z-lab's."""
    assert spec.lilicorr is not None
    names = {"top_k": "candidate_topk"}
    keys = {f"{LILICORR}_{names.get(k, k)}": v for k, v in msgspec.structs.asdict(spec.lilicorr).items()}
    conv = {} if spec.block_conv is None else dflash2.conv_to_config(spec.block_conv)
    return {ENABLED: True, PROJECTOR: LILICORR, **keys, **conv}


def canonical(weights: Weights, spec: DraftSpec) -> Weights:
    """Names the modules of MLPs that are numbered; the first of feature_mlp's is its norm."""

    def name_of(name: str) -> str:
        if (match := NUMBERED.fullmatch(name)) is None:
            return name
        mlp, number, part = match.groups()
        if mlp == "feature_mlp":
            if number == "0":
                return f"{LILICORR}.feature_norm.{part}"
            number = str(int(number) - 1)
        return f"{LILICORR}.{mlp}.{MODULES[number]}.{part}" if number in MODULES else name

    return zlab.canonical(renamed(weights, name_of), spec)


LILICORR_DIALECT = Dialect(name=LILICORR, recognises=named(LILICORR), read=read, is_canonical=True, canonical=canonical)
