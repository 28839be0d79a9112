# SPDX-License-Identifier: Apache-2.0
"""Facts of DFlash2 and DSpark drafts, from config.json and tensors of every layout."""

import json
from pathlib import Path

import pytest
import torch

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import BlockConv, DraftLayer, MarkovHead, SelectorSizes
from dflash_trt.checkpoint.draft_tensors import tensor_shapes
from dflash_trt.quantize.recipe import load_recipe
from tests.checkpoint.dialect_samples import add_random, write_dspark, write_speculators
from tests.checkpoint.samples import edit_config, edit_tensors, refusal
from tests.reference.synthetic import MARKOV_RANK, Markov, write_random_draft


@pytest.mark.parametrize(
    ("head", "facts", "num_tensors"),
    [
        ("none", None, 36),
        ("vanilla", MarkovHead(rank=MARKOV_RANK, confidence=True), 40),
        ("gated", MarkovHead(rank=MARKOV_RANK, is_gated=True, confidence=True), 42),
    ],
)
def test_dspark_facts_and_tensors(head: Markov, facts: MarkovHead | None, num_tensors: int, tmp_path: Path) -> None:
    draft = read_draft(write_random_draft(tmp_path, dialect="qwen3", dspark=head))
    assert draft.dialect.name == "dspark"
    assert (draft.spec.markov_head, draft.spec.sample_from_anchor) == (facts, True)
    assert draft.spec.num_draft_tokens == draft.spec.block_size
    assert not any(layer.causal for layer in draft.spec.layers)
    assert len(draft.weights) == len(tensor_shapes(draft.spec)) == num_tensors
    assert not any("markov" in name or "confidence" in name for name in draft.spec.linear_modules())


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"markov_head_type": "rnn"}, "markov_head_type: expected vanilla or gated"),
        ({"markov_rank": -1}, "markov_rank: expected an integer from 0"),
        ({"markov_rank": 0}, "enable_confidence_head: expected false, or true with confidence_head_with_markov"),
        ({"confidence_head_with_markov": False}, "enable_confidence_head: expected false, or true with"),
        ({"markov_rank": 13}, "tensor 'markov_head.markov_w1.weight': expected shape [96, 13], found [96, 12]"),
        ({"logit_scale": 0.5}, "logit_scale: expected 1"),
        (
            {"sample_from_anchor": False, "query_zero_predicts_next": True},
            "query_zero_predicts_next: expected what sample_from_anchor says, found true",
        ),
        ({"dflash_config": {"shift_label": False}}, "shift_label: expected true, whether row 0 proposes, found false"),
        ({"dflash_config": {"attention_mode": "mla"}}, 'attention_mode: expected "gqa" or "mha", which is what'),
        (
            {"dspark_config": {"markov_rank": 3}, "dflash_config": {"markov_rank": 12}},
            "dspark_config.markov_rank: expected the same value as in dflash_config.markov_rank, found 3",
        ),
        ({"dflash_config": {"markov_rank": 3}}, "markov_rank: expected the same value as in dflash_config.markov_rank"),
    ],
)
def test_what_does_not_fit_dspark_is_named(changed: dict[str, object], message: str, tmp_path: Path) -> None:
    edit_config(write_dspark(tmp_path), **changed)
    assert message in refusal(lambda: read_draft(tmp_path))


@pytest.mark.parametrize(
    "said",
    [{"sample_from_anchor": False}, {"query_zero_predicts_next": False}, {"dspark_bonus_anchor": True},
     {"dflash_config": {"sample_from_anchor": False}}, {"dspark_config": {"sample_from_anchor": False}}],
    ids=str,
)  # fmt: skip
def test_row_0_may_propose_nothing(said: dict[str, object], tmp_path: Path) -> None:
    """RedHat's drafts have S - 1 proposals: the anchor's row proposes nothing."""
    spec = read_draft(edit_config(write_dspark(tmp_path), **said)).spec
    assert (spec.sample_from_anchor, spec.num_draft_tokens) == (False, spec.block_size - 1)
    assert spec.is_dspark


def test_windows_and_causality_are_dflashs(tmp_path: Path) -> None:
    sliding = {"layer_types": ["sliding_attention", "full_attention", "full_attention"], "sliding_window": 7}
    draft = edit_config(write_dspark(tmp_path), **sliding, use_sliding_window=True)
    assert [(each.sliding_window, each.causal) for each in read_draft(draft).spec.layers] == [
        (7, True), (None, False), (None, False)
    ]  # fmt: skip
    edit_config(draft, is_causal=True)
    assert [each.causal for each in read_draft(draft).spec.layers] == [True] * 3


def test_heads_that_are_switched_off(tmp_path: Path) -> None:
    """SpecForge's qwen3-8b-dspark-causal-noconf has keys of a confidence head without having one."""
    draft = write_random_draft(tmp_path, dialect="qwen3", dspark="vanilla")
    edit_config(draft, enable_confidence_head=False, confidence_head_with_markov=False)
    edit_tensors(draft, lambda tensors: [tensors.pop(f"confidence_head.proj.{x}") for x in ("weight", "bias")])
    assert read_draft(draft).spec.markov_head == MarkovHead(rank=MARKOV_RANK)
    section = {"markov_head_type": "vanilla", "confidence_head_with_markov": False, "enable_confidence_head": False}
    names = [f"markov_head.markov_{w}.weight" for w in ("w1", "w2")]
    edit_config(draft, "markov_head_type", "confidence_head_with_markov", "enable_confidence_head", markov_rank=0)
    edit_config(edit_tensors(draft, lambda tensors: [tensors.pop(n) for n in names]), dflash_config=section)
    assert read_draft(draft).spec.markov_head is None


def test_what_specforge_publishes(tmp_path: Path) -> None:
    """Keys in dflash_config, weights of losses among them, under z-lab's architecture or its own."""
    expected = read_draft(write_dspark(tmp_path)).spec
    config = json.loads((tmp_path / "config.json").read_text())
    moved = [key for key in config if "markov" in key or key in ("mask_token_id", "target_layer_ids", "num_anchors")]
    section = {key: config[key] for key in moved} | {"projector_type": "dspark", "attention_mode": "gqa"}
    section["confidence_head_alpha"] = 1.0
    for architecture in ("DSparkDraftModel", "DFlashDraftModel"):
        edit_config(tmp_path, architectures=[architecture], dflash_config=section)
        assert read_draft(tmp_path).spec == expected


@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_what_model_optimizer_exports(kind: str, tmp_path: Path) -> None:
    """DSparkExporter (0.47) writes z-lab's architecture, keys in dflash_config, and heads without a parent."""
    expected = read_draft(write_random_draft(tmp_path, dialect="qwen3", dspark=kind))
    config = json.loads((tmp_path / "config.json").read_text())
    moved = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type")
    section = {key: config.pop(key) for key in moved}
    section |= {"projector_type": "dspark", "shift_label": True, "use_confidence_head": True, "causal": False}
    for key in ("enable_confidence_head", "confidence_head_with_markov"):
        assert config.pop(key) is True
    config |= {"architectures": ["DFlashDraftModel"], "dflash_config": section}
    (tmp_path / "config.json").write_text(json.dumps(config))

    def flat(tensors: dict[str, torch.Tensor]) -> None:
        for name in [*tensors]:
            new = name.removeprefix("markov_head.").replace("confidence_head.proj", "confidence_proj")
            tensors[new] = tensors.pop(name)

    edit_tensors(tmp_path, flat)
    draft = read_draft(tmp_path)
    assert (draft.spec.markov_head, draft.spec.sample_from_anchor) == (expected.spec.markov_head, True)
    assert draft.weights.keys() == expected.weights.keys()


@pytest.mark.parametrize("from_anchor", [True, False])
def test_speculators_layout(from_anchor: bool, tmp_path: Path) -> None:
    """In Speculators' layout, row 0 may propose or not."""
    heads = {"markov_rank": 8, "markov_head_type": "vanilla", "enable_confidence_head": False}
    edit_config(
        write_speculators(tmp_path), speculators_model_type="dspark", sample_from_anchor=from_anchor, **heads
    )  # fmt: skip
    add_random(tmp_path, {f"markov_head.markov_{w}.weight": (96, 8) for w in ("w1", "w2")})
    spec = read_draft(tmp_path).spec
    assert (spec.markov_head, spec.sample_from_anchor) == (MarkovHead(rank=8), from_anchor)
    assert spec.num_draft_tokens == spec.block_size - 1 + from_anchor
    assert read_draft(edit_config(tmp_path, "sample_from_anchor")).spec.sample_from_anchor


@pytest.fixture
def dflash2_dir(tmp_path: Path) -> Path:
    return write_random_draft(
        tmp_path / "draft", dialect="qwen3", layer_types=["sliding_attention"] * 3, sliding_window=9, is_causal=False,
        dflash2=True,
    )  # fmt: skip


def test_dflash2_facts_and_tensors(dflash2_dir: Path) -> None:
    draft = read_draft(dflash2_dir)
    assert draft.spec.block_conv == BlockConv(kernel_size=2, group_size=8)
    assert draft.spec.candidate_selector == SelectorSizes(rank=12, top_k=5)
    assert set(draft.spec.layers) == {DraftLayer(sliding_window=9, causal=False)}
    assert draft.spec.block_size == 6
    assert len(draft.weights) == 15 * 3 + 6
    assert draft.weights["layers.0.mlp_conv.kernel_projection.weight"].shape == (2 * 2 * 48 // 8, 48)


@pytest.mark.parametrize("name", ["MiniMaxDFlash2DraftModel", "DFlash2BeamDraftModel", "DFlash2Qwen3ForCausalLM"])
def test_other_names_of_the_same(name: str, dflash2_dir: Path) -> None:
    assert read_draft(edit_config(dflash2_dir, architectures=[name])).spec.candidate_selector is not None


def test_what_trainers_write_otherwise(dflash2_dir: Path) -> None:
    """Model Optimizer repeats windows and projector, transformers adds .weight to codebooks, NeMo has another name."""
    expected = read_draft(dflash2_dir)
    section = {"projector_type": "dflash2", "use_swa": True, "swa_window_size": 9}
    edit_config(dflash2_dir, **{f"dflash_config__{key}": value for key, value in section.items()})
    edit_config(dflash2_dir, architectures=["Qwen3DFlash2DraftModel"])

    def rename(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_codebook")]:
            tensors[f"{name}.weight"] = tensors.pop(name)

    found = read_draft(edit_tensors(dflash2_dir, rename))
    assert (found.spec, found.weights.keys()) == (expected.spec, expected.weights.keys())


def test_convolutions_without_a_selector(dflash2_dir: Path) -> None:
    edit_config(dflash2_dir, "dflash_config__selector_top_k", dflash_config__selector_rank=0)

    def drop(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.startswith("candidate_selector.")]:
            del tensors[name]

    spec = read_draft(edit_tensors(dflash2_dir, drop)).spec
    assert spec.block_conv is not None
    assert (spec.candidate_selector, spec.num_candidates, spec.kind) == (None, None, "DFlash2")


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_no_recipe_touches_convolution_and_selector(recipe: str, dflash2_dir: Path) -> None:
    algorithms = load_recipe(recipe).algorithms(read_draft(dflash2_dir).spec.linear_modules())
    assert algorithms
    assert not [name for name in algorithms if "conv" in name or "selector" in name]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"dflash_config__conv_group_size": 7}, "conv_group_size: expected a divisor of hidden_size 48, found 7"),
        ({"dflash_config__conv_kernel_size": 0}, "conv_kernel_size: expected an integer from 1 to 16, found 0"),
        ({"dflash_config__selector_top_k": 97}, "selector_top_k: expected an integer from 1 to 96, found 97"),
        ({"dflash_config__selector_rank": None}, "selector_rank: expected an integer from 0 to 8192"),
        ({"architectures": ["DFlashDraftModel"]}, "architectures: expected one of DFlash2DraftModel, "),
        ({"dflash_config__selector_rank": 13}, "predecessor_codebook': expected shape [96, 13], found [96, 12]"),
    ],
)
def test_what_does_not_fit_dflash2_is_named(changed: dict[str, object], message: str, dflash2_dir: Path) -> None:
    edit_config(dflash2_dir, **changed)
    assert message in refusal(lambda: read_draft(dflash2_dir))
