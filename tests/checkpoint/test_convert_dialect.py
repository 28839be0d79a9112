# SPDX-License-Identifier: Apache-2.0
"""Conversion from one dialect to another and back keeps facts and bytes, or is refused with the fact's name."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.convert_dialect import Verifier, convert_dialect
from dflash_trt.checkpoint.dialects import own, speculators, zlab
from dflash_trt.checkpoint.dialects.layouts import LAYOUTS
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.errors import BuildError, CheckpointError
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.checkpoint.dialect_samples import (
    write_jetspec,
    write_laguna,
    write_mimo,
    write_modelopt,
    write_muse_glimmer,
    write_nemotron,
    write_specforge,
    write_speculators,
    write_speculators_vocabulary,
)
from tests.checkpoint.samples import edit_config, refusal
from tests.paths import FIXTURES
from tests.quantize.samples import raw
from tests.reference.synthetic import write_random_draft

SOME_SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
VERIFIER = Verifier(name="owner/target", architectures=["Qwen3ForCausalLM"])


def to(draft: DraftCheckpoint | Path, layout: str, output: Path) -> DraftCheckpoint:
    source = draft if isinstance(draft, DraftCheckpoint) else read_draft(draft)
    convert_dialect(source, LAYOUTS[layout], output, verifier=VERIFIER if layout == "speculators" else None)
    return read_draft(output)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ["tiny-qwen3-dflash", "tiny-gpt-oss-dflash"])
def test_there_and_back_are_the_same_bytes(name: str, layout: str, tmp_path: Path) -> None:
    first = to(FIXTURES / name, "zlab", tmp_path / "first")
    assert first.spec == read_draft(FIXTURES / name).spec
    there = to(first, layout, tmp_path / "there")
    back = to(there, "zlab", tmp_path / "back")
    assert back.spec.target_layer_ids == there.spec.target_layer_ids == first.spec.target_layer_ids
    weights = [directory / "model.safetensors" for directory in (tmp_path / "first", tmp_path / "back")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    directories = (FIXTURES / name, tmp_path / "first", tmp_path / "back")
    configs = [json.loads((directory / "config.json").read_text()) for directory in directories]
    for config in configs:
        config["model_type"] = "qwen3"  # modelopt and Speculators call every backbone that
    assert configs[1] == configs[2]
    assert name == "tiny-gpt-oss-dflash" or configs[0] == configs[1]  # gpt-oss spells YaRN in its own way
    original = load_file(FIXTURES / name / "model.safetensors")
    assert {n: t.tolist() for n, t in load_file(weights[1]).items()} == {n: t.tolist() for n, t in original.items()}


def test_dflash2_survives_speculators_layout(tmp_path: Path) -> None:
    source = write_random_draft(
        tmp_path / "draft", dialect="qwen3", layer_types=["sliding_attention"] * 3, sliding_window=9, is_causal=False,
        dflash2=True,
    )  # fmt: skip
    first = to(source, "zlab", tmp_path / "first")
    there = to(first, "speculators", tmp_path / "there")
    config = json.loads((tmp_path / "there" / "config.json").read_text())
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "dflash2"
    assert (config["conv_kernel_size"], config["selector_top_k"], config["sliding_window_non_causal"]) == (2, 5, True)
    back = to(there, "zlab", tmp_path / "back")
    assert there.spec == back.spec == first.spec == read_draft(source).spec
    assert (tmp_path / "first" / "config.json").read_text() == (tmp_path / "back" / "config.json").read_text()
    with pytest.raises(CheckpointError, match=r"block_conv: expected None.*layout modelopt"):
        to(first, "modelopt", tmp_path / "modelopt")


@pytest.mark.parametrize("non_causal", [True, False])
def test_windows_in_speculators(non_causal: bool, tmp_path: Path) -> None:
    directory = write_speculators(tmp_path / "a", sliding_window_non_causal=non_causal)
    if not non_causal:
        edit_config(directory, transformer_layer_config__layer_types=["sliding_attention"] * 3)
    source = read_draft(directory)
    zlab = to(source, "zlab", tmp_path / "zlab")
    assert zlab.spec == source.spec
    back = to(zlab, "speculators", tmp_path / "back")
    assert back.spec == source.spec
    assert speculators.disagreement(back.config, back.spec) is None


def test_a_vocabulary_of_its_own_comes_back_with_t2d(tmp_path: Path) -> None:
    directory = edit_config(write_speculators_vocabulary(tmp_path / "draft"), sliding_window_non_causal=True)
    to(directory, "speculators", tmp_path / "again")
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("write", [write_modelopt, write_nemotron, write_jetspec])
def test_modelopt_round_trips(write: object, tmp_path: Path) -> None:
    assert callable(write)
    source = read_draft(write(tmp_path / "draft"))
    again = to(source, "modelopt", tmp_path / "again")
    assert again.spec == source.spec
    assert load_file(tmp_path / "again" / "model.safetensors").keys() == source.weights.keys()


def test_a_quantised_draft_stays_so_where_that_can_be_said(tmp_path: Path) -> None:
    quantize_checkpoint(read_draft(FIXTURES / "tiny-qwen3-dflash"), load_recipe("nvfp4"), tmp_path / "nvfp4")
    source = read_draft(tmp_path / "nvfp4")
    assert to(source, "modelopt", tmp_path / "modelopt").quantization == source.quantization
    message = refusal(lambda: to(source, "speculators", tmp_path / "speculators"))
    assert "expected an unquantised draft, which is what the layout speculators holds, found NVFP4" in message


UNSAYABLE = [
    (write_laguna, "zlab", "tap_norms: expected False, which is what the layout zlab can represent, found True"),
    (write_laguna, "speculators", "tap_norms: expected False, which is what the layout speculators can represent"),
    (write_laguna, "modelopt", "tap_norms: expected False, which is what the layout modelopt can represent"),
    (write_mimo, "zlab", "value_scale: expected 1, which is what the layout zlab can represent, found 0.612"),
    (write_mimo, "speculators", "value_scale: expected 1"),
    (write_muse_glimmer, "zlab", "model_type: expected one of qwen3, gpt_oss"),
    (write_muse_glimmer, "speculators", "vocab_size: expected the size of the target's vocabulary"),
    (write_nemotron, "zlab", "own_embedding: expected False, which is what the layout zlab can represent, found True"),
    (write_speculators_vocabulary, "zlab", "own_embedding: expected False"),
    (write_speculators_vocabulary, "modelopt", "draft_vocab_size: expected None"),
    (write_speculators, "modelopt", "sliding_window: expected one value for all layers"),
    (write_jetspec, "speculators", "causal: expected one value for all layers, true only if all slide"),
    (write_speculators, "speculators", "causal: expected one value for all layers, true only if all slide"),
]


@pytest.mark.parametrize(("write", "layout", "words"), UNSAYABLE)
def test_what_a_layout_cannot_say_is_refused_by_name(write: object, layout: str, words: str, tmp_path: Path) -> None:
    assert callable(write)
    source = read_draft(write(tmp_path / "draft"))
    assert words in refusal(lambda: to(source, layout, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("key", "value"), [("input_embedding_scale", 7.0), ("partial_rotary_factor", 0.5)])
def test_what_speculators_would_ignore_is_refused(key: str, value: float, tmp_path: Path) -> None:
    directory = edit_config(write_random_draft(tmp_path / "draft", dialect="qwen3"), **{key: value})
    assert f"{key}: expected 1" in refusal(lambda: to(directory, "speculators", tmp_path / "out"))


def test_force_replaces_only_what_is_ours(tmp_path: Path) -> None:
    draft = read_draft(FIXTURES / "tiny-qwen3-dflash")
    to(draft, "zlab", tmp_path / "out")
    message = refusal(lambda: convert_dialect(draft, LAYOUTS["zlab"], tmp_path / "out"), BuildError)
    assert "replace it with --force" in message
    convert_dialect(draft, LAYOUTS["modelopt"], tmp_path / "out", force=True)
    foreign = write_random_draft(tmp_path / "foreign", dialect="qwen3")
    assert "already exists and is not" in refusal(
        lambda: convert_dialect(draft, LAYOUTS["zlab"], foreign, force=True), BuildError
    )
    own = read_draft(tmp_path / "out")
    message = refusal(lambda: convert_dialect(own, LAYOUTS["zlab"], tmp_path / "out", force=True), BuildError)
    assert "would replace the draft itself" in message


def test_every_fact_has_its_place() -> None:
    """A fact that DraftSpec gets and no layout writes would be lost without a word."""
    spelled = {"layers", "rope", "block_size", "mask_token_id", "target_layer_ids"}
    assert set(DraftSpec.__struct_fields__) == {*own.FACTS, *zlab.SAME_KEYS, *zlab.OPTIONAL, *spelled}


DSPARK = [
    ("vanilla", {}, None),
    ("gated", {"sample_from_anchor": False}, None),
    ("none", {}, None),
    ("vanilla", {}, 40),
]


def write_dspark(path: Path, head: str, changed: dict[str, object], rows: int | None) -> Path:
    """A draft of DSpark's layouts; SpecForge's with a smaller vocabulary."""
    if rows is not None:
        return edit_config(write_specforge(path, rows=rows), is_causal=False)
    return edit_config(write_random_draft(path, dialect="qwen3", dspark=head), **changed)


@pytest.mark.parametrize(("head", "changed", "rows"), DSPARK)
def test_dspark_in_speculators_layout(head: str, changed: dict[str, object], rows: int | None, tmp_path: Path) -> None:
    source = read_draft(write_dspark(tmp_path / "draft", head, changed, rows))
    written = to(source, "speculators", tmp_path / "written")
    assert written.spec == msgspec.structs.replace(source.spec, model_type="qwen3")
    assert {n: raw(t) for n, t in written.weights.items()} == {n: raw(t) for n, t in source.weights.items()}
    config = json.loads((tmp_path / "written" / "config.json").read_text())
    assert (config["speculators_model_type"], config["architectures"]) == ("dspark", ["DSparkDraftModel"])
    proposal = config["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == source.spec.num_draft_tokens
    assert config["markov_rank"] == (0 if head == "none" else 12)
    stored = load_file(tmp_path / "written" / "model.safetensors")
    assert ("t2d" in stored) == (rows is not None)


@pytest.mark.parametrize(
    ("types", "said"),
    [(SOME_SLIDING, {"is_causal": False}), (SOME_SLIDING, {"is_causal": True}), (None, {"is_causal": True})],
)
def test_causality_that_dspark_cannot_have_there(
    types: list[str] | None, said: dict[str, object], tmp_path: Path
) -> None:
    draft = write_random_draft(
        tmp_path / "draft", dialect="qwen3", dspark="vanilla", layer_types=types, sliding_window=9
    )
    if types is not None:
        to(draft, "speculators", tmp_path / "by-type")  # sliding layers causal, the full one not
    message = refusal(lambda: to(edit_config(draft, **said), "speculators", tmp_path / "written"))
    assert "causal: expected sliding layers causal and full ones not, in DSpark" in message
    assert not (tmp_path / "written").exists()
