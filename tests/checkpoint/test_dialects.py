# SPDX-License-Identifier: Apache-2.0
"""Every dialect yields the same facts and tensor names, and unsupported descendants are refused by name."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.dialects import mimo, own, speculators, zlab
from dflash_trt.checkpoint.dialects.recognise import DIALECTS, is_draft, recognise
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import DraftLayer
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.checkpoint.dialect_samples import (
    MIXED,
    WRITERS,
    write_jetspec,
    write_laguna,
    write_mimo,
    write_muse_glimmer,
    write_nemotron,
    write_speculators,
    write_speculators_vocabulary,
)
from tests.checkpoint.samples import edit_config, edit_tensors, refusal
from tests.cli.commands import run
from tests.paths import FIXTURES
from tests.quantize.samples import raw
from tests.reference.synthetic import write_random_draft

# Samples that are named after their dialect; the others are variants of one.
NAMES = [name for name in WRITERS if name in {dialect.name for dialect in DIALECTS}]


def causal(directory: Path) -> list[bool]:
    return [layer.causal for layer in read_draft(directory).spec.layers]


@pytest.mark.parametrize("name", NAMES)
def test_each_is_recognised_as_itself(name: str, tmp_path: Path) -> None:
    config = Facts.load(WRITERS[name](tmp_path / name) / "config.json")
    assert is_draft(config)
    assert recognise(config).name == name
    assert len({dialect.name for dialect in DIALECTS}) == len(DIALECTS)


@pytest.mark.parametrize("name", WRITERS)
def test_each_is_read_and_its_facts_survive_our_own_layout(name: str, tmp_path: Path) -> None:
    draft = read_draft(WRITERS[name](tmp_path / name))
    config = Facts(own.to_config(draft.spec, "bfloat16"), tmp_path / "config.json")
    assert recognise(config).read(config, {}) == draft.spec


@pytest.mark.parametrize("name", WRITERS)
def test_each_is_quantised_without_a_fact_or_a_tensor_lost(name: str, tmp_path: Path) -> None:
    source = read_draft(WRITERS[name](tmp_path / name))
    quantize_checkpoint(source, load_recipe("fp8"), tmp_path / "fp8")
    quantised = read_draft(tmp_path / "fp8")
    assert msgspec.structs.replace(quantised.spec, model_type=source.spec.model_type) == source.spec
    assert source.weights.keys() <= quantised.weights.keys()


def test_speculators_facts_are_those_of_the_same_draft_in_zlabs_layout(tmp_path: Path) -> None:
    """The spec does not depend on Speculators' shifted ids, nested facts and rope_parameters."""
    original = read_draft(write_random_draft(tmp_path / "a", dialect="qwen3", layer_types=MIXED, sliding_window=7))
    draft = read_draft(write_speculators(tmp_path / "b"))
    assert draft.spec == msgspec.structs.replace(original.spec, num_target_layers=None)
    assert draft.spec.target_layer_ids == (1, 2, 3)
    assert draft.weights.keys() == original.weights.keys()


def test_speculators_sliding_layers_are_causal_unless_it_says_otherwise(tmp_path: Path) -> None:
    directory = write_speculators(tmp_path / "draft")
    assert causal(directory) == [True, False, True]
    edit_config(directory, "sliding_window_non_causal")
    assert causal(directory) == [True, False, True]
    assert causal(edit_config(directory, sliding_window_non_causal=True)) == [False] * 3


WRONG: list[tuple[str, object, str]] = [
    ("speculators_model_type", "dfly", "speculators_model_type: expected one of dflash"),
    ("aux_hidden_state_layer_ids", [0, 2, 3], "expected ids from 1 on"),
    ("aux_hidden_state_layer_ids", None, "expected a list of integers >= 0, found null"),
    ("mask_token_id", None, "mask_token_id: expected an integer from 0"),
    ("mask_token_id", 96, "mask_token_id: expected a token id below vocab_size 96, found 96"),
    ("is_causal", True, "config.json: is_causal: expected only keys that are computed"),
    ("norm_before_fc", True, "config.json: norm_before_fc: expected false, which is what is computed"),
    ("transformer_layer_config__is_neox", True, "transformer_layer_config.is_neox: expected only keys that are"),
    ("transformer_layer_config__mlp_bias", True, "transformer_layer_config.mlp_bias: expected false"),
    ("draft_vocab_size", 97, "draft_vocab_size: expected at most transformer_layer_config.vocab_size 96, found 97"),
    ("target_hidden_size", 64, "tensor 'fc.weight': expected shape [48, 192], found [48, 144]"),
    ("transformer_layer_config__model_type", "mistral", "transformer_layer_config.model_type: expected one of qwen3"),
    ("transformer_layer_config__sliding_window", None, "transformer_layer_config.sliding_window: expected an integer"),
]


@pytest.mark.parametrize("non_causal", [True, False, None])
@pytest.mark.parametrize("windows", [MIXED, ["full_attention"] * 3, ["sliding_attention"] * 3])
def test_where_vllm_computes_something_else(windows: list[str], non_causal: bool | None, tmp_path: Path) -> None:
    """It takes the key for all layers, and true where it is left out."""
    directory = edit_config(write_speculators(tmp_path / "draft"), sliding_window_non_causal=non_causal)
    edit_config(directory, transformer_layer_config__layer_types=windows)
    draft = read_draft(directory)
    theirs = non_causal is False
    is_same = causal(directory) == [theirs] * 3
    assert (speculators.disagreement(draft.config, draft.spec) is None) == is_same


def test_speculators_defaults(tmp_path: Path) -> None:
    """A file may leave out every key that the library's configuration has a default for; `inspect` lists them."""
    directory = write_speculators(tmp_path / "draft")
    expected = read_draft(directory).spec
    edit_config(directory, "sample_from_anchor", "sliding_window_non_causal")
    assert read_draft(directory).spec == expected
    found = json.loads(run("inspect", directory, "--json").stdout)["defaults"]
    assert found == {"sample_from_anchor": False, "sliding_window_non_causal": False}
    edit_config(directory, "block_size", "draft_vocab_size", transformer_layer_config__vocab_size=32000)
    spec = read_draft(directory).spec
    assert (spec.block_size, spec.draft_vocab_size) == (8, None)
    assert "missing key mask_token_id" in refusal(lambda: read_draft(edit_config(directory, "mask_token_id")))


def test_speculators_first_row_may_propose_and_its_sizes_be_llamas(tmp_path: Path) -> None:
    directory = edit_config(write_speculators(tmp_path / "draft"), sample_from_anchor=True)
    spec = read_draft(edit_config(directory, transformer_layer_config__model_type="llama")).spec
    assert (spec.model_type, spec.num_draft_tokens) == ("qwen3", spec.block_size)


@pytest.mark.parametrize(("key", "value", "words"), WRONG)
def test_speculators_refuses_what_it_does_not_understand(key: str, value: object, words: str, tmp_path: Path) -> None:
    directory = edit_config(write_speculators(tmp_path / "draft"), **{key: value})
    assert words in refusal(lambda: read_draft(directory))


def test_speculators_training_copies_of_the_target_are_not_the_drafts(tmp_path: Path) -> None:
    directory = write_speculators(tmp_path / "draft")
    names = read_draft(directory).weights.keys()
    extra = {"verifier_norm.weight": torch.ones(48), "verifier_lm_head.weight": torch.ones(96, 48)}
    assert read_draft(edit_tensors(directory, lambda tensors: tensors.update(extra))).weights.keys() == names


def test_the_layout_of_a_quantised_draft(tmp_path: Path) -> None:
    """The layout is z-lab's where it can express the draft, else ours, which other runtimes refuse."""
    for write, architecture in ((write_speculators, "DFlashDraftModel"), (write_laguna, "DFlashTrtDraftModel")):
        output = tmp_path / f"{architecture}-fp8"
        quantize_checkpoint(read_draft(write(tmp_path / architecture)), load_recipe("fp8"), output)
        config = json.loads((output / "config.json").read_text())
        assert config["architectures"] == [architecture]
        if write is write_speculators:
            assert read_draft(output).dialect.name == "zlab"
            assert config["dtype"] == "bfloat16"


def test_own_embedding_and_head_are_facts(tmp_path: Path) -> None:
    draft = read_draft(write_speculators_vocabulary(tmp_path / "a"))
    assert (draft.spec.own_embedding, draft.spec.draft_vocab_size, draft.spec.has_d2t) == (True, 40, True)
    assert draft.weights["lm_head.weight"].shape == (40, 48)
    assert "t2d" not in draft.weights
    draft = read_draft(write_nemotron(tmp_path / "b"))
    assert (draft.spec.own_embedding, draft.spec.draft_vocab_size) == (True, None)


def test_d2t_and_t2d_say_the_same(tmp_path: Path) -> None:
    directory = write_speculators_vocabulary(tmp_path / "draft")
    edit_tensors(directory, lambda tensors: tensors["t2d"].logical_not_())
    assert "tensor 't2d': expected the 40 tokens that d2t names, found 56" in refusal(lambda: read_draft(directory))
    edit_tensors(directory, lambda tensors: tensors.pop("d2t"))
    assert "missing tensor 'd2t' [40]" in refusal(lambda: read_draft(directory))


def test_own_embedding_and_head_are_there_as_promised(tmp_path: Path) -> None:
    directory = write_speculators_vocabulary(tmp_path / "a")
    edit_tensors(directory, lambda tensors: tensors.pop("lm_head.weight"))
    assert "missing tensor 'lm_head.weight' [40, 48]" in refusal(lambda: read_draft(directory))
    directory = write_nemotron(tmp_path / "b")
    edit_config(directory, has_embed_tokens=False)
    assert "found tensor 'embed_tokens.weight' besides" in refusal(lambda: read_draft(directory))
    edit_config(directory, has_embed_tokens=True)
    edit_tensors(directory, lambda tensors: tensors.pop("embed_tokens.weight"))
    assert "missing tensor 'embed_tokens.weight' [96, 48]" in refusal(lambda: read_draft(directory))


def test_lagunas_fused_projection_is_three_tensors_of_the_same_bytes(tmp_path: Path) -> None:
    directory = write_laguna(tmp_path / "draft")
    original = load_file(write_random_draft(tmp_path / "plain", dialect="qwen3") / "model.safetensors")
    draft = read_draft(directory)
    for name in (f"layers.{i}.self_attn.{x}_proj.weight" for i in range(3) for x in "qkv"):
        tensor = draft.weights[name]
        assert tensor.shape == tuple(original[name].shape)
        assert raw(tensor) == original[name].view(torch.uint8).numpy().tobytes()
    spec = draft.spec
    assert (spec.tap_norms, spec.context_input_layernorm, spec.attention_gate) == (True, True, "per_head")
    assert causal(directory) == [True] * 3
    edit_config(directory, eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    assert "but the other keys of this fact mean [2, 3, 4] there" in refusal(lambda: read_draft(directory))


def test_mimos_facts(tmp_path: Path) -> None:
    directory = write_mimo(tmp_path / "draft")
    draft = read_draft(directory)
    assert draft.spec.layers == (DraftLayer(sliding_window=7, causal=False, sinks=True),) * 3
    assert (draft.spec.value_scale, draft.spec.rope.partial_rotary_factor) == (0.612, 0.5)
    assert (draft.weights["mask_embedding"].shape, draft.weights["layers.2.self_attn.sinks"].shape) == ((48,), (4,))
    edit_config(directory, add_swa_attention_sink_bias=False)
    assert "attention_sink_bias: expected what add_swa_attention_sink_bias" in refusal(lambda: read_draft(directory))


def test_mimos_mask_row_is_not_lost(tmp_path: Path) -> None:
    """A pickle is not read, but not passed over either."""
    directory = write_mimo(tmp_path / "draft")
    (directory / "mask_embedding.safetensors").unlink()
    assert "missing mask_embedding.safetensors, the trained embedding" in refusal(lambda: read_draft(directory))
    (directory / "mask_embedding.pt").write_bytes(b"a pickle")
    message = refusal(lambda: read_draft(directory))
    assert "found mask_embedding.pt (pickle)" in message
    assert "torch.load('mask_embedding.pt', weights_only=True)" in message


@pytest.mark.full
def test_the_hint_for_mimos_mask_row_works(tmp_path: Path) -> None:
    directory = write_mimo(tmp_path / "draft")
    row = load_file(directory / "mask_embedding.safetensors")["mask_embedding"]
    (directory / "mask_embedding.safetensors").unlink()
    torch.save({"mask_token_id": 95, "embedding": row}, directory / "mask_embedding.pt")
    program = mimo.CONVERSION.split(" -c ")[1].strip('"')
    subprocess.run([sys.executable, "-c", program], cwd=directory, check=True)
    assert read_draft(directory).weights["mask_embedding"].shape == (48,)
    assert torch.equal(load_file(directory / "mask_embedding.safetensors")["mask_embedding"], row)


def test_muse_glimmers_window_is_inclusive_and_no_layer_is_causal(tmp_path: Path) -> None:
    directory = write_muse_glimmer(tmp_path / "draft")
    spec = read_draft(directory).spec
    assert [(layer.sliding_window, layer.causal) for layer in spec.layers] == [(8, False), (None, False), (8, False)]
    assert spec.vocab_size is None
    assert spec.target_layer_ids == (1, 2, 3)


def test_jetspec_is_causal(tmp_path: Path) -> None:
    directory = write_jetspec(tmp_path / "draft")
    assert causal(directory) == [True] * 3
    assert causal(edit_config(directory, dflash_config__causal_head=False)) == [False] * 3
    edit_config(directory, dflash_config__causal_head=True, is_causal=False)
    assert "is_causal: expected true, as dflash_config.causal_head says" in refusal(lambda: read_draft(directory))


DESCENDANTS: list[tuple[str, dict[str, object]]] = [
    ("XPress", {"architectures": ["DFlashQwen3XPressModel"]}),
    ("XPress", {"xpress_topc": 512}),
    ("FlashMap", {"architectures": ["FlashMapDraftModel"]}),
    ("DFlare", {"architectures": ["DFlareDraftModel"]}),
    ("DSpark", {"architectures": ["Gemma4DSparkModel"], "markov_rank": 0}),
    ("DSpark", {"architectures": ["Qwen3DSparkModel"]}),
    ("DSpark", {"dspark_config": {"block_size": 7}}),
    ("DSpark", {"speculators_model_type": "dflash", "markov_rank": 8}),
    ("Domino", {"dflash_config__projector_type": "domino"}),
    ("Domino", {"dflash_config__projector_type": "domino", "architectures": ["LiLiCorrDraftModel"]}),
    ("Domino", {"dflash_config__gru_hidden_dim": 64, "dflash_config__emb_dim": 32}),
    ("Domino", {"architectures": ["DominoDraftModel"]}),
    ("Domino", {"speculators_model_type": "domino"}),
]


@pytest.mark.parametrize(("name", "changed"), DESCENDANTS)
def test_descendants_are_refused_by_name(name: str, changed: dict[str, object], draft_dir: Path) -> None:
    edit_config(draft_dir, **changed)
    assert is_draft(Facts.load(draft_dir / "config.json"))
    assert f"config.json: expected a DFlash draft, found a {name} draft (" in refusal(lambda: read_draft(draft_dir))


@pytest.mark.parametrize("rope", ["llama3", "yarn"])
@pytest.mark.parametrize("causal", [True, False, None])
def test_windows_causality_and_rotation_survive_spelling(rope: str, causal: bool | None, tmp_path: Path) -> None:
    directory = write_random_draft(tmp_path / "draft", dialect="gpt_oss", layer_types=MIXED, sliding_window=7)
    if rope == "llama3":
        scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
        edit_config(directory, rope_scaling=scaling | {"original_max_position_embeddings": 256})
    else:
        edit_config(directory, rope_scaling__attention_factor=1.5)  # not what the factor gives
    edit_config(directory, is_causal=causal, input_embedding_scale=3.5)
    spec = read_draft(directory).spec
    assert zlab.read(Facts(zlab.to_config(spec, "bfloat16"), tmp_path / "config.json"), {}) == spec


def plain(sliding_window: int | None = None, *, causal: bool = False, sinks: bool = False) -> DraftLayer:
    return DraftLayer(sliding_window=sliding_window, causal=causal, sinks=sinks)


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"layers": (plain(sinks=True), plain(), plain())}, "layers.sinks: expected no sinks"),
        ({"layers": tuple(plain(window, causal=True) for window in (3, 4, 4))},
         "sliding_window: expected one window for all sliding layers"),
        ({"layers": (plain(causal=True), plain(), plain())}, "is_causal: expected one causality for all layers"),
    ],
)  # fmt: skip
def test_what_zlabs_layout_cannot_say_is_refused_by_name(facts: dict[str, Any], words: str) -> None:
    spec = msgspec.structs.replace(read_draft(FIXTURES / "tiny-qwen3-dflash").spec, **facts)
    assert words in refusal(lambda: zlab.to_config(spec, "bfloat16"))
