# SPDX-License-Identifier: Apache-2.0
"""Why it goes wrong: what each cause is, who documented it, and what to change, in the words of each runtime."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from dflash_trt.observe.endpoints.identify import ServerKind

GITHUB = "https://github.com"


class Cause(msgspec.Struct, frozen=True, kw_only=True):
    """A likely cause, for the runtime that was asked."""

    name: str
    what: str
    source: str
    setting: str


@dataclass(frozen=True, kw_only=True)
class CauseEntry:
    """A cause, for every runtime."""

    what: str
    source: str
    setting: str
    """For runtimes that are not in `settings`."""
    settings: Mapping[ServerKind, str] = field(default_factory=dict)

    def at(self, name: str, kind: ServerKind) -> Cause:
        """In the words of one runtime."""
        return Cause(name=name, what=self.what, source=self.source, setting=self.settings.get(kind, self.setting))


REBUILD = "dflash-trt build again from the published draft; compare with dflash-trt verify ENGINE --target TARGET"
CAUSES: dict[str, CauseEntry] = {
    "no drafter": CauseEntry(
        what="it was started without a drafter, or its schedule says none at this load",
        source=f"{GITHUB}/vllm-project/vllm/pull/36847",
        setting="dflash-trt serve-config DEPLOYMENT writes the arguments",
        settings={
            "dflash-trt": "serve --draft-length K; auto drafts nothing where that is faster",
            "vllm": '--speculative-config \'{"method": "dflash", "model": DRAFT, "num_speculative_tokens": K}\';'
            " look at num_speculative_tokens_per_batch_size",
            "sglang": "--speculative-algorithm DFLASH --speculative-draft-model-path DRAFT",
            "tensorrt-llm": "speculative_config: {decoding_type: DFlash, speculative_model: DRAFT, max_draft_len: K};"
            " look at draft_len_schedule and acceptance_rate_threshold",
        },
    ),
    "metrics": CauseEntry(
        what="/metrics is not in Prometheus's text format, or a proxy before the server answers in its place",
        source="https://prometheus.io/docs/instrumenting/exposition_formats/",
        setting="curl URL/metrics shows what comes; give the server's own address",
    ),
    "slow": CauseEntry(
        what="the server is overloaded, or something between does not pass its answers on",
        source=f"{GITHUB}/vllm-project/vllm/blob/main/docs/usage/troubleshooting.md",
        setting="doctor URL --seconds with more time, while nobody else asks it",
    ),
    "taps": CauseEntry(
        what="the target's hidden states come from other layers than the draft was trained on: shifted by one, or"
        " resolved to none",
        source=f"{GITHUB}/vllm-project/vllm/issues/40727",
        setting="give the draft's own target_layer_ids; a tap is the output of that layer",
        settings={
            "dflash-trt": f"target_layer_ids of manifest.json against the draft's config.json; {REBUILD}",
            "vllm": "dflash_config.target_layer_ids in the draft's config.json (speculators' aux_hidden_state_layer_ids"
            " count one more); vLLM with #42704",
            "sglang": "dflash_config.target_layer_ids in the draft's config.json",
            "tensorrt-llm": "write target_layer_ids and mask_token_id into speculative_config: a repository id as"
            " speculative_model leaves them unresolved (PR #18155)",
        },
    ),
    "scales": CauseEntry(
        what="K or V of the draft's context is scaled wrongly: scales lost on the way to the quantised draft or its"
        " FP8 KV cache, or another KV layout",
        source=f"{GITHUB}/vllm-project/vllm/issues/45343",
        setting="run the unquantised draft with a BF16 KV cache: if acceptance comes back, it is the scales",
        settings={
            "dflash-trt": f"serve an engine of the unquantised draft; {REBUILD} --reference BF16_ENGINE",
            "vllm": '"kv_cache_dtype": "auto" in --speculative-config, and the unquantised draft (#53116)',
            "sglang": "--speculative-draft-kv-cache-dtype bf16, and no --speculative-draft-model-quantization (#27924)",
            "tensorrt-llm": "kv_cache_config.dtype: auto, which the draft inherits, and the unquantised draft",
        },
    ),
    "k_norm": CauseEntry(
        what="one layer's k_norm is used for all layers of the draft's context",
        source=f"{GITHUB}/vllm-project/vllm/issues/56431",
        setting="try another attention or norm kernel for the draft",
        settings={
            "dflash-trt": REBUILD,
            "vllm": "a release after #56431 (CPU and XPU kernels read only the first row of the stacked weights);"
            ' --enforce-eager with --compilation-config \'{"custom_ops": ["none"]}\' as a check',
        },
    ),
    "head": CauseEntry(
        what="tensors of the draft were dropped without a word: biases, its own lm_head or embedding, the mask token's"
        " row",
        source=f"{GITHUB}/vllm-project/vllm/issues/46435",
        setting="dflash-trt inspect DRAFT --target TARGET lists what the draft has",
        settings={"dflash-trt": f"dflash-trt inspect ENGINE; {REBUILD}"},
    ),
    "pair": CauseEntry(
        what="the draft belongs to another target, or to another quantisation of it",
        source=f"{GITHUB}/z-lab/dflash/issues/152",
        setting="dflash-trt inspect DRAFT --target TARGET; serve the target that the draft's card names",
    ),
    "template": CauseEntry(
        what="prompts look different from what the draft was trained on: chat template, system prompt, thinking mode",
        source=f"{GITHUB}/z-lab/dflash/issues/133",
        setting="ask by /v1/chat/completions, in the template and thinking mode of the draft's card",
    ),
    "window": CauseEntry(
        what="sliding-window layers of the draft run as full attention",
        source=f"{GITHUB}/vllm-project/vllm/issues/40898",
        setting="layer_types and sliding_window in the draft's config.json must reach the runtime",
        settings={
            "dflash-trt": "sliding_window of the attention nodes: dflash-trt inspect ENGINE; build again from a draft"
            " whose config.json has layer_types and sliding_window",
            "vllm": "the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1), which alone mixes windows and full attention",
            "sglang": "--speculative-draft-window-size W with the draft's window",
            "tensorrt-llm": "layer_types and sliding_window in the draft's config.json, or dflash_config.use_swa and"
            " swa_window_size",
        },
    ),
    "rope": CauseEntry(
        what="the draft's RoPE scaling (YaRN, with its attention factor) was lost, or it was never trained on such"
        " lengths",
        source="https://arxiv.org/abs/2602.06036",  # tau 3.61 at 16k tokens, 6.05 once trained on such lengths
        setting="rope_scaling in the draft's config.json; serve shorter contexts, or a draft that was trained on them",
    ),
    "prefix": CauseEntry(
        what="tokens that a prefix cache spares the target bring the draft no hidden states: it drafts without them",
        source=f"{GITHUB}/vllm-project/vllm/issues/47930",
        setting="switch the prefix cache off, as a check",
        settings={
            "vllm": "--no-enable-prefix-caching (also #51250)",
            "sglang": "--disable-radix-cache",
            "tensorrt-llm": "kv_cache_config.enable_block_reuse: false, or context_recompute_tail in"
            " speculative_config",
        },
    ),
    "prefix hits": CauseEntry(
        what="the prefix cache is on and finds nothing, or its pages are longer than these prompts",
        source=f"{GITHUB}/vllm-project/vllm/issues/54360",
        setting="the runtime's prefix cache with this draft",
        settings={"vllm": "a release after #54360; until then --no-enable-prefix-caching saves its bookkeeping"},
    ),
    "temperature": CauseEntry(
        what="temperature is ignored: everything is decoded greedily",
        source="https://platform.openai.com/docs/api-reference/completions/create",
        setting="sampling in the runtime's speculative decoding",
        settings={
            "vllm": "temperature of the server's --override-generation-config, or of a proxy before it",
            "sglang": "temperature of --preferred-sampling-params, or of a proxy before it",
            "tensorrt-llm": "speculative_config.allow_advanced_sampling: true",
        },
    ),
    "independent": CauseEntry(
        what="at temperature 1 drafts are drawn from each position's own distribution: take the most likely token",
        source=f"{GITHUB}/z-lab/dflash/pull/169",
        setting="greedy proposals",
        settings={
            "vllm": '"draft_sample_method": "greedy" in --speculative-config',
            "tensorrt-llm": "speculative_config.use_rejection_sampling: false",
        },
    ),
    "numerics": CauseEntry(
        what="verifying a block and decoding token by token disagree: a race, a wrong roll-back, or rounding near ties",
        source=f"{GITHUB}/vllm-project/vllm/issues/54928",
        setting="compare with a target in higher precision",
        settings={"dflash-trt": "dflash-trt verify ENGINE --target TARGET shows the first token that differs"},
    ),
    "batch": CauseEntry(
        what="at this batch verifying drafts costs more than they bring: experts of a mixture, or no idle arithmetic",
        source=f"{GITHUB}/vllm-project/vllm/issues/42505",
        setting="fewer drafts at larger batches",
        settings={
            "dflash-trt": "serve --draft-length auto, or a schedule by batch size",
            "vllm": '"num_speculative_tokens_per_batch_size" or "enable_adaptive_verification" in --speculative-config',
            "sglang": "--speculative-num-draft-tokens with a smaller number",
            "tensorrt-llm": "draft_len_schedule or max_concurrency in speculative_config",
        },
    ),
    "language": CauseEntry(
        what="the draft was trained on little of it",
        source=f"{GITHUB}/z-lab/dflash/issues/7",
        setting="a draft that was trained on the language",
    ),
    "thinking": CauseEntry(
        what="the draft was trained on answers of the other mode",
        source=f"{GITHUB}/z-lab/dflash/issues/60",
        setting="the thinking mode of the draft's card, or a draft trained on this one",
    ),
    "length": CauseEntry(
        what="later drafts are seldom accepted, and each is verified",
        source=f"{GITHUB}/vllm-project/recipes/issues/839",
        setting="a smaller number of drafts",
        settings={
            "dflash-trt": "serve --draft-length, or draft_length of a request",
            "vllm": '"num_speculative_tokens" in --speculative-config',
            "sglang": "--speculative-num-draft-tokens",
            "tensorrt-llm": "max_draft_len in speculative_config",
        },
    ),
}


def causes(kind: ServerKind, *names: str) -> list[Cause]:
    """Likely causes, in this order."""
    return [CAUSES[name].at(name, kind) for name in names]
