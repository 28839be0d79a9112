# SPDX-License-Identifier: Apache-2.0
"""Quantised checkpoints: what is in them, and which drafts are refused."""

import json
import tracemalloc
from pathlib import Path
from typing import Any

import ml_dtypes
import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.errors import CheckpointError
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe, recipe_names
from dflash_trt.quantize.scales import scale_groups
from tests.paths import FIXTURES, REPOSITORY
from tests.quantize.modelopt_export import WHOLE_BLOCKS
from tests.quantize.samples import Case, arrays, convert, dequantised, raw, rounded_fp8, rounded_int4, rounded_nvfp4
from tests.reference.synthetic import DraftSizes, write_random_draft

GOLDEN = REPOSITORY / "tests" / "golden" / "quantize"
RECIPES = [*recipe_names(), "nvfp4+fp8-kv", "nvfp4-w4a16+fp8-kv", "bf16+fp8-kv"]


@pytest.fixture(scope="module", params=["gpt_oss", pytest.param("tiny-qwen3-dflash", marks=pytest.mark.full)])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param.startswith("tiny"):
        return FIXTURES / request.param
    return write_random_draft(tmp_path_factory.mktemp("draft"), dialect=request.param, sizes=WHOLE_BLOCKS)


@pytest.fixture(scope="module", params=RECIPES)
def case(request: pytest.FixtureRequest, source: Path, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return convert(source, tmp_path_factory.mktemp("out") / "q", request.param)


def test_reads_back_with_what_the_recipe_says(case: Case, request: pytest.FixtureRequest) -> None:
    recipe = load_recipe(request.node.callspec.params["case"])
    algorithms = recipe.algorithms(case.draft.spec.linear_modules())
    assert case.quantised.quantization.modules == algorithms
    assert case.quantised.quantization.fp8_kv_cache == recipe.fp8_kv_cache
    assert case.quantised.spec == msgspec.structs.replace(case.draft.spec, model_type="qwen3")
    summary = case.summary
    assert sum(summary.layers.values()) == len(algorithms)
    assert summary.dense_layers == len(case.draft.spec.linear_modules()) - len(algorithms)
    assert summary.source_bytes == sum(t.num_bytes for t in case.draft.weights.values())
    assert summary.output_bytes == sum(t.num_bytes for t in case.quantised.weights.values())


def test_every_other_tensor_survives_byte_for_byte(case: Case) -> None:
    quantised = case.quantised.quantization.modules
    kept = [name for name in case.draft.weights if name.removesuffix(".weight") not in quantised]
    dense_layers = case.summary.dense_layers
    assert len(kept) == case.summary.copied_tensors + dense_layers
    for name in kept:
        assert raw(case.quantised.weights[name]) == raw(case.draft.weights[name]), name
        assert case.quantised.weights[name].dtype == case.draft.weights[name].dtype
    for tensor in case.quantised.weights.values():
        width = {"F32": 4, "BF16": 2}.get(tensor.dtype, 1)
        assert tensor.offset % width == 0, f"{tensor.name} is not aligned to its elements"


def test_weights_are_the_nearest_codes(case: Case) -> None:
    source, result = arrays(case.draft.directory), arrays(case.quantised.directory)
    for module, algorithm in case.quantised.quantization.modules.items():
        weights, actual = source[f"{module}.weight"], dequantised(result, module)
        if algorithm == "FP8":
            scale = result[f"{module}.weight_scale"]
            expected, steps = rounded_fp8(weights, scale), 2**-4
            smallest = 2**-10 * np.float64(scale)
        elif algorithm == "W4A16_AWQ":
            expected, steps = rounded_int4(weights), 0.0
            largest = np.abs(weights.astype(np.float64)).reshape(len(weights), -1, 32).max(-1)
            smallest = np.repeat(largest, 32, axis=1) * (1 / 8 + 2**-8)  # 8 of a scale are one too many above 0
        else:
            scale = result[f"{module}.weight_scale_2"]
            expected, steps = rounded_nvfp4(weights, scale), 2**-2
            largest = np.abs(weights.astype(np.float64)).reshape(len(weights), -1, 16).max(-1)
            smallest = np.repeat(largest, 16, axis=1) / 6 * (1 + 2**-4) / 4  # half of code 0.5
        np.testing.assert_array_equal(actual, expected)
        exact = weights.astype(np.float64)
        # Half a step of the format; a block scale that rounds down clips its largest weight by 1/16.
        assert (np.abs(actual - exact) <= np.abs(exact) * (steps + 2**-8) + smallest).all(), module


def test_modelopt_rounds_fp8_twice(tmp_path: Path) -> None:
    """Model Optimizer's quotients are BF16 before they are E4M3: some codes are a step off, and never nearer."""
    source = write_random_draft(tmp_path / "draft", dialect="qwen3", dtype=torch.bfloat16, sizes=WHOLE_BLOCKS)
    cases = [convert(source, tmp_path / str(like), "fp8", like_modelopt=like) for like in (False, True)]
    dense, *packed = [arrays(directory) for directory in (source, *(case.quantised.directory for case in cases))]
    codes, twice = (
        np.concatenate([each[f"{m}.weight"].ravel() for m in cases[0].quantised.quantization.modules])
        for each in packed
    )
    assert 0.005 < (codes != twice).mean() < 0.05
    for module in cases[0].quantised.quantization.modules:
        exact, scale = dense[f"{module}.weight"].astype(np.float64), packed[0][f"{module}.weight_scale"]
        assert scale == packed[1][f"{module}.weight_scale"]
        quotient = (dense[f"{module}.weight"].astype(np.float32) / scale).astype(ml_dtypes.bfloat16)
        np.testing.assert_array_equal(packed[1][f"{module}.weight"], quotient.astype(ml_dtypes.float8_e4m3fn))
        nearest, other = (np.abs(dequantised(each, module) - exact) for each in packed)
        assert (nearest <= other * (1 + 1e-6)).all()


def test_fused_layers_have_one_scale(case: Case) -> None:
    tensors, algorithms = arrays(case.quantised.directory), case.quantised.quantization.modules
    source = arrays(case.draft.directory)
    for group in scale_groups(case.draft.spec):
        for algorithm in {algorithms[m] for m in group if m in algorithms}:
            members = [m for m in group if algorithms.get(m) == algorithm]
            if algorithm == "W4A16_AWQ":
                assert not any(f"{m}.weight_scale_2" in tensors for m in members)
                continue
            name = "weight_scale" if algorithm == "FP8" else "weight_scale_2"
            largest = np.float32(max(np.abs(source[f"{m}.weight"].astype(np.float32)).max() for m in members))
            expected = largest / np.float32(448 if algorithm == "FP8" else 2688)
            assert {float(tensors[f"{m}.{name}"]) for m in members} == {float(expected)}


def test_config_keeps_every_key(case: Case) -> None:
    """All but model_type, which for TensorRT-LLM names the class of the layers: those are Qwen3's, biases and all."""
    before = json.loads((case.draft.directory / "config.json").read_text())
    after = json.loads((case.quantised.directory / "config.json").read_text())
    section = after.pop("quantization_config", None)
    assert after == before | {"model_type": "qwen3"}
    assert after["attention_bias"] == before["attention_bias"] == case.draft.spec.attention_bias
    assert list(after) == list(before)
    is_quantised = bool(case.summary.layers) or case.quantised.quantization.fp8_kv_cache
    assert (section is not None) == is_quantised
    assert (case.quantised.directory / "hf_quant_config.json").exists() == is_quantised


@pytest.mark.parametrize("golden", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_configuration_is_modelopts(golden: Path, tmp_path: Path) -> None:
    """Equal to modelopt 0.47's own, but for who wrote it and the names that engines give to dense layers."""
    expected = json.loads(golden.read_text())
    layers = ["full_attention"] * 2
    source = write_random_draft(tmp_path / "draft", dialect="gpt_oss", layer_types=layers, sizes=WHOLE_BLOCKS)
    quantize_checkpoint(read_draft(source), load_recipe(golden.stem), tmp_path / "q")
    written = json.loads((tmp_path / "q" / "hf_quant_config.json").read_text())
    section = json.loads((tmp_path / "q" / "config.json").read_text())["quantization_config"]
    for actual in (written, section):
        assert actual["producer"].pop("layout_written_by").startswith("dflash-trt ")
    for actual, wanted, key in (
        (written["quantization"], expected["hf_quant_config"]["quantization"], "exclude_modules"),
        (section, expected["quantization_config"], "ignore"),
    ):
        extra = set(actual.get(key, [])) - set(wanted.get(key, []))
        assert all(name == "lm_head" or name.startswith("*") for name in extra)
        assert set(wanted.get(key, [])) <= set(actual.get(key, []))
        actual.pop(key, None), wanted.pop(key, None)
    assert written == expected["hf_quant_config"]
    groups = [
        sorted(document.pop("config_groups", {}).values(), key=json.dumps)
        for document in (section, expected["quantization_config"])
    ]
    assert groups[0] == groups[1]
    assert section == expected["quantization_config"]


def test_excluded_modules_as_engines_call_them(tmp_path: Path) -> None:
    case = convert(FIXTURES / "tiny-gpt-oss-dflash", tmp_path / "q", "nvfp4-native")
    details = json.loads((case.quantised.directory / "hf_quant_config.json").read_text())["quantization"]
    attention = [f"layers.{i}.self_attn" for i in (0, 1)]
    dense = {"fc", *(f"{a}.{x}_proj" for a in attention for x in "qkv")}
    fused = {f"*{a}.qkv_proj" for a in attention}
    assert set(details["exclude_modules"]) == dense | {f"*{name}" for name in dense} | fused | {"lm_head"}


def test_other_files_come_along_but_no_other_weights(tmp_path: Path) -> None:
    source = write_random_draft(tmp_path / "draft", dialect="qwen3")
    (source / "README.md").write_text("licence")
    (source / "dflash.py").write_text("code")
    (source / "pytorch_model.bin").write_bytes(b"pickle")
    (source / ".hidden").write_text("")
    (source / "assets").mkdir()
    convert(source, tmp_path / "q", "fp8")
    names = {path.name for path in (tmp_path / "q").iterdir()}
    assert names == {"README.md", "dflash.py", "config.json", "hf_quant_config.json", "model.safetensors"}


def test_same_input_same_bytes_with_any_number_of_threads(tmp_path: Path) -> None:
    def written(threads: int) -> dict[str, bytes]:
        output = tmp_path / f"q{threads}"
        convert(FIXTURES / "tiny-gpt-oss-dflash", output, "mixed-nvfp4-fp8+fp8-kv", threads=threads)
        return {path.name: path.read_bytes() for path in output.iterdir()}

    assert written(1) == written(3) == written(0)


# --- tensors off the beaten path -----------------------------------------------------------------


def edited_draft(tmp_path: Path, **edits: Any) -> Path:
    """A gpt-oss draft of two layers; edits: `layers__0__mlp__up_proj=function of its weight`."""
    source = write_random_draft(tmp_path / "draft", dialect="gpt_oss", layer_types=["full_attention"] * 2)
    tensors = load_file(source / "model.safetensors")
    for name, edit in edits.items():
        key = name.replace("__", ".") + ".weight"
        tensors[key] = edit(tensors[key].clone())
    save_file(tensors, source / "model.safetensors")
    return source


def test_columns_that_are_no_whole_blocks(tmp_path: Path) -> None:
    source = write_random_draft(tmp_path / "draft", dialect="qwen3", sizes=DraftSizes(hidden=96, intermediate=72))
    with pytest.raises(CheckpointError) as caught:
        convert(source, tmp_path / "q", "nvfp4")
    assert caught.value.message == (
        f"{source / 'model.safetensors'}: tensor 'layers.0.mlp.down_proj.weight': expected columns in multiples"
        " of 16 for NVFP4, found 72"
    )
    with pytest.raises(CheckpointError, match=r"'layers\.0\.mlp\.down_proj\.weight': .* of 32 for W4A16_AWQ, found 72"):
        convert(source, tmp_path / "q", "int4-w4a16")
    convert(source, tmp_path / "q", "fp8")


def test_rows_that_are_no_whole_pairs(tmp_path: Path) -> None:
    source = write_random_draft(tmp_path / "draft", dialect="qwen3", sizes=DraftSizes(hidden=96, intermediate=33))
    (tmp_path / "own.yaml").write_text(
        "description: gate alone\nrules:\n  - {modules: '*gate_proj', algorithm: W4A16_AWQ}\n"
        "  - {modules: '*', algorithm: none}\n"
    )
    with pytest.raises(CheckpointError, match="expected an even number of rows for W4A16_AWQ, found 33"):
        convert(source, tmp_path / "q", str(tmp_path / "own.yaml"))


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8"])
def test_layers_of_zeros_and_of_subnormal_weights(tmp_path: Path, recipe: str) -> None:
    """No range of its own: modelopt's FP8 export takes scale 1; its NVFP4 export writes NaN, we 1 / 448."""
    source = edited_draft(tmp_path, layers__0__mlp__down_proj=torch.zeros_like)
    tensors = arrays(convert(source, tmp_path / "q", recipe).quantised.directory)
    assert not dequantised(tensors, "layers.0.mlp.down_proj").any()
    if recipe == "fp8":
        assert tensors["layers.0.mlp.down_proj.weight_scale"] == 1
    else:
        assert tensors["layers.0.mlp.down_proj.weight_scale_2"] == np.float32(6) / np.float32(2688)
        assert (tensors["layers.0.mlp.down_proj.weight_scale"].astype(np.float32) == 1).all()
    # Below float32's least normal range: finite scales, and no weight grows beyond that range.
    source = edited_draft(tmp_path, layers__0__mlp__down_proj=lambda w: torch.full_like(w, 2.0**-133))
    tensors = arrays(convert(source, tmp_path / "subnormal", recipe).quantised.directory)
    assert np.abs(dequantised(tensors, "layers.0.mlp.down_proj")).max() <= np.finfo(np.float32).tiny


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_other_weight_types(tmp_path: Path, dtype: torch.dtype) -> None:
    source = write_random_draft(tmp_path / "draft", dialect="gpt_oss", dtype=dtype)
    case = convert(source, tmp_path / "q", "mixed-nvfp4-fp8")
    test_weights_are_the_nearest_codes(case)
    test_every_other_tensor_survives_byte_for_byte(case)


@pytest.mark.parametrize(
    ("first", "found"), [("nvfp4", "NVFP4"), ("mixed-nvfp4-fp8", "FP8, NVFP4"), ("int4-w4a16", "W4A16_AWQ")]
)
def test_quantised_already(tmp_path: Path, first: str, found: str) -> None:
    convert(FIXTURES / "tiny-gpt-oss-dflash", tmp_path / "q", first)
    with pytest.raises(CheckpointError, match=f"q: expected an unquantised draft, found {found}\n"):
        convert(tmp_path / "q", tmp_path / "again", "fp8")


def test_a_checkpoint_is_never_in_memory(tmp_path: Path) -> None:
    """The weights stay in the page cache: what is allocated is one layer's codes and a few rows as float32."""
    sizes = DraftSizes(hidden=512, intermediate=4096, num_heads=8, num_kv_heads=2, head_dim=64)
    source = write_random_draft(tmp_path / "draft", dialect="qwen3", sizes=sizes)
    draft = read_draft(source)
    source_bytes = sum(tensor.num_bytes for tensor in draft.weights.values())
    tracemalloc.start()
    quantize_checkpoint(draft, load_recipe("fp8+fp8-kv"), tmp_path / "q", threads=1)
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak_bytes < source_bytes / 5
