# SPDX-License-Identifier: Apache-2.0
"""Facts of LiLiCorr drafts, from config.json and tensors, and back."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from dflash_trt.checkpoint.dialects import lilicorr, own
from dflash_trt.checkpoint.dialects.layouts import LAYOUTS
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import BlockConv, DraftSpec, LatticeCorrelator
from dflash_trt.checkpoint.draft_tensors import tensor_shapes
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.errors import CheckpointError
from dflash_trt.runtime.drafter.open import open_drafter
from tests.checkpoint.samples import edit_config, edit_tensors, refusal
from tests.engines import build
from tests.reference.synthetic import CONV_GROUP, CONV_TAPS, CORRELATOR, write_random_draft

SIZES = LatticeCorrelator(
    hidden_size=24, num_layers=2, num_heads=3, mlp_ratio=1.5, top_k=4, factor_dim=6, vector_eps=1e-6, logit_scale=7.5
)


@pytest.fixture
def draft_dir(tmp_path: Path) -> Path:
    return write_random_draft(tmp_path / "draft", dialect="qwen3", lilicorr="plain")


@pytest.mark.parametrize(
    ("kind", "conv", "num_tensors"),
    [("plain", None, 82), ("convolved", BlockConv(kernel_size=CONV_TAPS, group_size=CONV_GROUP), 94)],
)
def test_facts_and_tensors(kind: str, conv: BlockConv | None, num_tensors: int, tmp_path: Path) -> None:
    draft = read_draft(write_random_draft(tmp_path, dialect="qwen3", lilicorr=kind))  # type: ignore[arg-type]
    assert (draft.dialect.name, draft.spec.kind) == ("lilicorr", "LiLiCorr")
    assert (draft.spec.lilicorr, draft.spec.block_conv) == (SIZES, conv)
    assert draft.spec.num_candidates == SIZES.top_k
    assert len(draft.weights) == len(tensor_shapes(draft.spec)) == num_tensors
    assert not any("lilicorr" in name for name in draft.spec.linear_modules())


@pytest.mark.parametrize(
    "said",
    [
        {"architectures": ["LiLiCorrDraftModel"]},
        {"architectures": ["DFlashDraftModel"]},
        {"architectures": ["DFlash2DraftModel"], "dflash_config__projector_type": "lilicorr"},
        {"dflash_config__conv_kernel_size": 0, "dflash_config__conv_group_size": 0},
        {"dflash_config__lilicorr_mlp_ratio": 1.53},
        {"has_own_lm_head": False},
    ],
    ids=str,
)
def test_spellings_of_the_same_facts(said: dict[str, object], draft_dir: Path) -> None:
    spec = read_draft(edit_config(draft_dir, **said)).spec
    assert spec.lilicorr is not None
    assert spec.block_conv is None
    assert spec.lilicorr.mlp_hidden_size == 36


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"lilicorr_num_heads": 5}, "lilicorr_num_heads: expected a divisor of lilicorr_hidden_size 24, found 5"),
        ({"lilicorr_candidate_topk": 97}, "lilicorr_candidate_topk: expected an integer from 1 to 96, found 97"),
        ({"lilicorr_candidate_topk": 5}, "tensor 'lilicorr.rank_embedding': expected shape [1, 1, 1, 5, 24]"),
        ({"lilicorr_num_layers": 3}, "missing tensor 'lilicorr.layers.2."),
        ({"lilicorr_num_layers": 1}, "lilicorr.layers.1."),
        ({"lilicorr_mlp_ratio": 0.01}, "lilicorr_mlp_ratio: expected a ratio that gives an MLP of 1 to"),
        ({"lilicorr_mlp_ratio": "2"}, "lilicorr_mlp_ratio: expected a number > 0"),
        ({"lilicorr_vector_eps": 0}, "lilicorr_vector_eps: expected a number > 0"),
        ({"lilicorr_factor_dim": None}, "missing key lilicorr_factor_dim: expected an integer"),
        ({"lilicorr_enabled": False}, "lilicorr_enabled: expected true, or no key of LiLiCorr"),
        ({"lilicorr_temperature": 2}, "lilicorr_temperature: expected only keys that are computed"),
        ({"projector_type": "domino"}, "found a Domino draft"),
        ({"selector_rank": 12}, "selector_rank: expected only keys that are computed"),
        ({"conv_kernel_size": 2}, "missing key conv_group_size"),
        ({"sample_from_anchor": True}, "sample_from_anchor: expected false in a LiLiCorr draft"),
        ({"has_own_lm_head": True}, "has_own_lm_head: expected true with a tensor lm_head.weight, else false"),
    ],
    ids=str,
)
def test_what_does_not_fit_is_named(said: dict[str, object], message: str, draft_dir: Path) -> None:
    edit_config(draft_dir, **{f"dflash_config__{key}": value for key, value in said.items()})
    assert message in refusal(lambda: read_draft(draft_dir))


@pytest.mark.parametrize(
    "name", ["slot_embedding", "layers.1.attn.in_proj_bias", "context_proj.bias", "same_slot_bias"]
)
def test_tensors_are_all_there_and_fit(name: str, draft_dir: Path) -> None:
    full = f"lilicorr.{name}"
    edit_tensors(draft_dir, lambda tensors: tensors.update({full: torch.zeros(7)}))
    assert f"tensor '{full}': expected shape" in refusal(lambda: read_draft(draft_dir))
    edit_tensors(draft_dir, lambda tensors: tensors.pop(full))
    assert f"missing tensor '{full}'" in refusal(lambda: read_draft(draft_dir))


def numbered(tensors: dict[str, torch.Tensor]) -> None:
    """The spelling of SGLang and TensorRT-LLM."""
    spelled = {
        "feature_norm": "feature_mlp.0",
        "feature_mlp.up_proj": "feature_mlp.1",
        "feature_mlp.down_proj": "feature_mlp.3",
        ".mlp.up_proj": ".mlp.0",
        ".mlp.down_proj": ".mlp.2",
    }
    for name in [name for name in tensors if name.startswith("lilicorr.")]:
        new = name
        for ours, theirs in spelled.items():
            new = new.replace(ours, theirs)
        tensors[new] = tensors.pop(name)


def test_modules_may_be_numbered(draft_dir: Path) -> None:
    named = read_draft(draft_dir).weights
    shapes = {name: tensor.shape for name, tensor in named.items()}
    edit_tensors(draft_dir, numbered)
    assert {name: tensor.shape for name, tensor in read_draft(draft_dir).weights.items()} == shapes
    edit_tensors(draft_dir, lambda tensors: tensors.update({"lilicorr.layers.0.mlp.1.weight": torch.zeros(7)}))
    assert "lilicorr.layers.0.mlp.1.weight" in refusal(lambda: read_draft(draft_dir))
    edit_tensors(draft_dir, lambda tensors: tensors.pop("lilicorr.layers.0.mlp.1.weight"))
    edit_tensors(draft_dir, lambda tensors: tensors.update({"lilicorr.feature_norm.bias": torch.zeros(5)}))
    assert "expected no other 'lilicorr.feature_norm.bias'" in refusal(lambda: read_draft(draft_dir))


@pytest.mark.parametrize("kind", ["plain", "convolved"])
def test_written_configurations_are_read_again(kind: str, tmp_path: Path) -> None:
    """In z-lab's layout, which other runtimes read, and in ours; others cannot say it."""
    spec = read_draft(write_random_draft(tmp_path, dialect="qwen3", lilicorr=kind)).spec  # type: ignore[arg-type]
    for config in (LAYOUTS["zlab"].to_config(spec, "bfloat16"), own.to_config(spec, "bfloat16")):
        assert config["architectures"] == ["LiLiCorrDraftModel"]
        assert lilicorr.read(Facts(config, tmp_path / "config.json"), {}) == spec
    owning = read_draft(
        write_random_draft(tmp_path, dialect="qwen3", lilicorr="plain", own_vocabulary=True, dtype=torch.float32)
    )
    assert own.read(Facts(own.to_config(owning.spec, "float32"), tmp_path / "config.json"), {}) == owning.spec
    for layout in ("speculators", "modelopt"):
        with pytest.raises(CheckpointError, match=r"(lilicorr|block_conv): expected None, which is what the layout"):
            LAYOUTS[layout].to_config(spec, "bfloat16")


VALUES: tuple[object, ...] = (
    None,
    True,
    -1,
    0,
    1,
    2,
    3.5,
    2**40,
    1e300,
    "",
    "2",
    [],
    [2],
    {},
    {"a": 1},
    24,
    1e-9,
    5e-324,
)


def damaged(config: dict[str, Any], count: int) -> Iterator[dict[str, Any]]:
    """Configurations with one or two wrong values, or keys that are left out, of LiLiCorr's section and around it."""
    chance, section = Random(0), "dflash_config"
    for index in range(count):
        changed = config | {section: dict(config[section])}
        for _ in range(1 + index % 2):
            is_inner = chance.random() < 0.7
            part = changed[section] if is_inner and isinstance(changed[section], dict) else changed
            key = chance.choice([*CORRELATOR, *config[section]] if part is not changed else [*config])
            if chance.random() < 0.1:
                part.pop(key, None)
            else:
                part[key] = chance.choice(VALUES)
        yield changed


@pytest.mark.full
def test_thousand_damaged_configurations_are_refused_or_computed(draft_dir: Path, tmp_path: Path) -> None:
    """Each ends in a CheckpointError, or in a draft of which an engine is built and run."""
    file = draft_dir / "config.json"
    specs: dict[DraftSpec, dict[str, Any]] = {}
    refused = 0
    for changed in damaged(json.loads(file.read_text()), 1000):
        file.write_text(json.dumps(changed))
        try:
            specs[read_draft(draft_dir).spec] = changed
        except CheckpointError:
            refused += 1
    assert refused > 500
    assert len(specs) > 10
    for index, changed in enumerate(specs.values()):
        file.write_text(json.dumps(changed))
        manifest = build(draft_dir, tmp_path / f"engine {index}")
        drafter = open_drafter(tmp_path / f"engine {index}", manifest)
        assert drafter.scorer is not None or manifest.draft.lilicorr is None
        drafter.close()


def test_damaged_keys_are_refused_or_computed(draft_dir: Path) -> None:
    """No key of the section ends in anything but facts or a CheckpointError, whatever its value."""
    file = draft_dir / "config.json"
    config = json.loads(file.read_text())
    for key in CORRELATOR:
        for value in VALUES:
            changed = config | {"dflash_config": config["dflash_config"] | {key: value}}
            file.write_text(json.dumps(changed))
            with suppress(CheckpointError):
                assert read_draft(draft_dir).spec.lilicorr is not None
