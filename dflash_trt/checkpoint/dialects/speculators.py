# SPDX-License-Identifier: Apache-2.0
"""vLLM's Speculators library (github.com/vllm-project/speculators 0.9, speculators/models/dflash).

The backbone's facts stand in transformer_layer_config, a Qwen3Config; tap i of z-lab is i + 1 here. Sliding layers are
causal unless sliding_window_non_causal says otherwise (create_anchor_block_mask_mod), which is true for dflash2. vLLM
0.33 takes the key for all layers, full ones included, and leaves it out for dspark (update_dflash in algos.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dflash_trt.checkpoint.dialects import dflash2, dspark, zlab
from dflash_trt.checkpoint.dialects.dialect import (
    MAX_BLOCK_SIZE,
    Dialect,
    LayerType,
    Layout,
    Weights,
    layer_types,
    layers,
    mask_token,
    read_backbone,
    refuse_unless,
    taps,
    unrepresentable,
    windows_of,
)
from dflash_trt.checkpoint.draft_spec import EMBEDDING, HEAD, DraftSpec
from dflash_trt.checkpoint.facts import Facts

KEY = "speculators_model_type"
VERSION = "0.9.0"
WORDS = {
    "own_embedding", "draft_vocab_size", "block_conv", "candidate_selector", "num_target_layers", "markov_head",
    "sample_from_anchor",
}  # fmt: skip
"""Facts that z-lab's layout need not, or cannot, say and the library can."""
PLAIN = {fact: plain for fact, plain in (zlab.PLAIN | zlab.OPTIONAL).items() if fact not in WORDS}
"""Facts for which the library has no words, and what they are for every draft of it."""
TRAINING_ONLY = ("verifier_lm_head.weight", "verifier_norm.weight")
"""Copies of the target's tensors that only the training loss reads; the library itself leaves them out on save."""


def recognises(config: Facts) -> bool:
    """Whether the file is Speculators'."""
    return KEY in config


def read(config: Facts, weights: Weights) -> DraftSpec:
    """The facts of a Speculators checkpoint; its tensors say whether embedding and lm_head are its own."""
    algorithm = config.text(KEY, choices=("dflash", "dflash2", "dspark"))
    is_dflash2, is_dspark = algorithm == "dflash2", algorithm == "dspark"
    backbone = config.section("transformer_layer_config")
    # Left out, it is true for speculators' own DSpark and false for vLLM 0.33.
    from_anchor = config.flag("sample_from_anchor", default=None if is_dspark else False)
    if from_anchor and is_dflash2:
        raise config.error("sample_from_anchor", "false in a DFlash2 draft, whose selector begins behind the anchor")
    vocab_size, rows = backbone.integer("vocab_size"), config.integer("draft_vocab_size")
    if rows > vocab_size:
        raise config.conflict("draft_vocab_size", f"at most transformer_layer_config.vocab_size {vocab_size}")
    tap_width = config.optional("target_hidden_size", config.integer)
    causal_where_sliding = not config.flag("sliding_window_non_causal", default=is_dflash2)
    if is_dflash2 and rows != vocab_size:
        raise config.conflict("draft_vocab_size", f"transformer_layer_config.vocab_size {vocab_size}")
    backbone.text("model_type", choices=("qwen3", "llama"))  # of the sizes: its layers are Qwen3's in any case
    spec = DraftSpec(
        **read_backbone(backbone),
        model_type="qwen3",
        attention_bias=backbone.flag("attention_bias"),
        layers=layers(layer_types(backbone), None if causal_where_sliding else False),
        vocab_size=vocab_size,
        block_size=config.integer("block_size", minimum=2, maximum=MAX_BLOCK_SIZE),
        mask_token_id=mask_token(config, vocab_size),
        target_layer_ids=taps(config, "aux_hidden_state_layer_ids", first=1),
        num_target_layers=config.optional("num_target_layers", config.integer),
        input_embedding_scale=1,
        tap_hidden_size=None if tap_width == backbone.integer("hidden_size") else tap_width,
        own_embedding=EMBEDDING in weights,
        sample_from_anchor=from_anchor,
        draft_vocab_size=rows if rows != vocab_size or f"{HEAD}.weight" in weights else None,
    )
    if is_dspark:
        return dspark.with_head(spec, dspark.read_head(lambda _: config))
    if not is_dflash2:
        return spec
    return msgspec.structs.replace(spec, **dflash2.read_additions(lambda _: config, spec.hidden_size, vocab_size))


def disagreement(config: Facts, spec: DraftSpec) -> str | None:
    """Why vLLM 0.33 computes something else of a Speculators draft, if it does."""
    if config.values().get(KEY) not in ("dflash", "dflash2"):
        return None
    theirs = config.holds("sliding_window_non_causal", value=False)
    if all(layer.causal == theirs for layer in spec.layers):
        return None
    return (
        f"vLLM 0.33 computes all layers {'causal' if theirs else 'not causal'}: sliding_window_non_causal, "
        f"{'false' if theirs else 'true where it is left out'}, holds for full layers, too, and drafts get worse"
    )


def canonical(weights: Weights, spec: DraftSpec) -> Weights:
    """Without what only training reads."""
    return zlab.canonical({name: tensor for name, tensor in weights.items() if name not in TRAINING_ONLY}, spec)


SPECULATORS = Dialect(name="speculators", recognises=recognises, read=read, is_canonical=False, canonical=canonical)


def to_config(spec: DraftSpec, dtype: str) -> dict[str, object]:
    """config.json as speculators 0.9 writes it, but for the verifier's name; num_target_layers is ours."""
    refuse_unless("speculators", spec, PLAIN)
    if len(windows_of(spec)) > 1:
        raise unrepresentable(
            "speculators", "sliding_window", "one window for all sliding layers", sorted(windows_of(spec))
        )
    _refuse_causality(spec)
    if any(layer.sinks for layer in spec.layers):
        raise unrepresentable("speculators", "layers.sinks", "no sinks", [layer.sinks for layer in spec.layers])
    if spec.rope.partial_rotary_factor != 1:
        raise unrepresentable("speculators", "partial_rotary_factor", "1", spec.rope.partial_rotary_factor)
    if spec.rope.interleaved:
        raise unrepresentable("speculators", "rope.interleaved", "False", True)
    plain = msgspec.structs.replace(
        spec,
        model_type="qwen3",
        layers=layers(
            [LayerType(layer.sliding_window is not None, layer.sliding_window) for layer in spec.layers], None
        ),
        own_embedding=False,
        draft_vocab_size=None,
        num_target_layers=None,
        block_conv=None,
        candidate_selector=None,
        markov_head=None,
        sample_from_anchor=False,
    )
    backbone = zlab.to_config(plain, dtype)
    for key in ("architectures", "block_size", "dflash_config"):
        del backbone[key]
    algorithm, architecture, more = "dflash", zlab.ARCHITECTURE, dict[str, object]()
    if spec.block_conv is not None or spec.candidate_selector is not None:
        algorithm, architecture = "dflash2", dflash2.ARCHITECTURES[0]
        more = dflash2.additions_to_config(spec, "speculators")
    elif spec.is_dspark:
        algorithm, architecture, more = "dspark", dspark.ARCHITECTURES[1], dspark.head_to_config(spec.markov_head)
    count = {} if spec.num_target_layers is None else {"num_target_layers": spec.num_target_layers}
    return {
        "architectures": [architecture],
        "aux_hidden_state_layer_ids": [tap + 1 for tap in spec.target_layer_ids],
        "block_size": spec.block_size,
        "draft_vocab_size": spec.draft_vocab_size or spec.vocab_size,
        "dtype": dtype,
        "mask_token_id": spec.mask_token_id,
        **count,
        "sample_from_anchor": spec.sample_from_anchor,
        "sliding_window_non_causal": not any(layer.causal for layer in spec.layers),
        **more,
        "speculators_model_type": algorithm,
        "speculators_version": VERSION,
        "target_hidden_size": None,
        "transformer_layer_config": backbone,
    }


def _refuse_causality(spec: DraftSpec) -> None:
    """Raises CheckpointError where the library, or vLLM 0.33, would compute another causality than that of `spec`."""
    found = [layer.causal for layer in spec.layers]
    if spec.is_dspark:
        if not zlab.follow_rule(spec.layers):
            raise unrepresentable("speculators", "causal", "sliding layers causal and full ones not, in DSpark", found)
    elif len(set(found)) > 1 or any(layer.causal for layer in spec.layers if layer.sliding_window is None):
        raise unrepresentable("speculators", "causal", "one value for all layers, true only if all slide", found)


def name_verifier(config: dict[str, object], name: str, architectures: Sequence[str]) -> dict[str, object]:
    """`config` with the target, which Speculators' readers load as the verifier of this draft."""
    block_size = config["block_size"]
    assert isinstance(block_size, int)
    num_draft_tokens = block_size if config["sample_from_anchor"] else block_size - 1
    proposal = {"proposal_type": "greedy", "speculative_tokens": num_draft_tokens}
    return config | {
        "speculators_config": {
            "algorithm": config["speculators_model_type"],
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": name, "architectures": list(architectures)},
        }
    }


LAYOUT = Layout(name="speculators", to_config=to_config, holds_quantised=False)
