# SPDX-License-Identifier: Apache-2.0
"""Drafts other than DFlash's and EAGLE-3's: the target's own MTP layer, and n-grams of the request's text.

An MTP pass is a projection of hidden state and embedding, one layer of the target and the target's lm_head. Its
acceptance is published for some targets. N-grams cost the GPU nothing, and their acceptance is the prompts'.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from dflash_trt.deploy.resolved_deployment import ResolvedDeployment
from dflash_trt.deploy.target_shape import TargetShape
from dflash_trt.errors import ConfigError
from dflash_trt.observe.diagnosis.published_tau import published_mtp_tau
from dflash_trt.observe.estimate.acceptance_profile import AcceptanceProfile, from_tau
from dflash_trt.observe.estimate.shapes import DraftShape, Gemm, Method, System

MEASURE = (
    "serve it (dflash-trt serve-config {0} --method {1}), and give what dflash-trt doctor URL prints as --{1}-tau X"
)


class OtherDrafts(msgspec.Struct, frozen=True):
    system: System
    """With the drafts that are compared."""
    acceptances: dict[Method, AcceptanceProfile]
    sources: tuple[str, ...]
    """Where each acceptance is from."""


def with_other_drafts(
    deployment: ResolvedDeployment, system: System, methods: Collection[str], mtp_tau: float | None,
    ngram_tau: float | None,
) -> OtherDrafts:  # fmt: skip
    """Adds n-grams if asked for, and MTP if asked for or its acceptance is published for the target.

    Raises ConfigError for one of `methods` whose draft or acceptance is not known.
    """
    acceptances: dict[Method, AcceptanceProfile] = {}
    sources = []
    published = published_mtp_tau(system.target.target)
    if mtp_tau is not None or "mtp" in methods or published is not None:
        if system.target.num_mtp_layers == 0:
            raise ConfigError(
                f"{deployment.name}: target: expected MTP layers, found none in {deployment.target}",
                hint="leave out --method mtp and --mtp-tau",
            )
        length = deployment.draft_length("mtp")
        if mtp_tau is not None:
            sources.append(f"MTP: tau {mtp_tau:g} at {length} drafts")
        elif published is not None:
            mtp_tau, length = published.mean, published.num_draft_tokens
            sources.append(f"MTP: tau {mtp_tau:g}, the mean of {published}")
        else:
            raise ConfigError(
                f"{deployment.name}: expected the acceptance of {system.target.target}'s MTP layers, found none"
                " published",
                hint=MEASURE.format(deployment.name, "mtp"),
            )
        system = msgspec.structs.replace(system, mtp=mtp_shape(system.target, length))
        acceptances["mtp"] = from_tau(mtp_tau, length)
    if ngram_tau is not None:
        length = deployment.draft_length("ngram")
        system = msgspec.structs.replace(system, ngram=ngram_shape(length))
        acceptances["ngram"] = from_tau(ngram_tau, length)
        sources.append(f"n-gram: tau {ngram_tau:g} at {length} drafts")
    elif "ngram" in methods:
        raise ConfigError(
            f"{deployment.name}: the acceptance of n-grams is that of your prompts, and is not published",
            hint=MEASURE.format(deployment.name, "ngram"),
        )
    return OtherDrafts(system, acceptances, tuple(sources))


def mtp_shape(target: TargetShape, num_draft_tokens: int) -> DraftShape:
    """The target's MTP layer: full attention and the MLP, or experts, of its other layers, in their formats."""
    cache = msgspec.structs.replace(target.cache, num_full_layers=1, num_sliding_layers=0, recurrent=None)
    layer = msgspec.structs.replace(target, num_layers=1, num_dense_layers=0, cache=cache)
    heads, head_dim = cache.full_key_value_heads or cache.num_key_value_heads, cache.full_head_dim or cache.head_dim
    kernels = 5 if target.latent is None else 7  # the projection, attention's two or four, the MLP's two
    if target.latent is not None:  # one latent row in place of K and V, on every rank
        heads, head_dim = 1, (target.latent.kv_lora_rank + target.latent.qk_rope_head_dim) // 2
    params = 2 * target.hidden_size**2 + layer.dense_params
    return DraftShape(
        name="MTP", num_layers=1, hidden_size=target.hidden_size, num_key_value_heads=heads, head_dim=head_dim,
        num_taps=1, max_draft_tokens=num_draft_tokens, is_chain=True, num_expert_layers=layer.num_expert_layers,
        gemms={"layers": (Gemm(params, target.weight_bits, kernels),)},
    )  # fmt: skip


def ngram_shape(num_draft_tokens: int) -> DraftShape:
    """A draft without layers: the host looks it up."""
    return DraftShape(
        name="n-gram", num_layers=0, hidden_size=0, num_key_value_heads=0, head_dim=0, num_taps=0,
        max_draft_tokens=num_draft_tokens, gemms={},
    )  # fmt: skip
