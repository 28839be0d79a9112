# SPDX-License-Identifier: Apache-2.0
"""Recipes: which layers they quantise, and what is said about malformed ones."""

from pathlib import Path

import pytest

from dflash_trt.errors import RecipeError
from dflash_trt.quantize.recipe import FP8_KV, load_recipe, recipe_names

MODULES = [
    "fc",
    *(
        f"layers.{layer}.{name}_proj"
        for layer in (0, 1, 10)
        for name in ("self_attn.q", "self_attn.k", "self_attn.v", "self_attn.o", "mlp.gate", "mlp.up", "mlp.down")
    ),
]
HEAD = "description: mine\nrules:\n"
ALL = HEAD + "  - {modules: '*', algorithm: FP8}\n"


@pytest.mark.parametrize(
    ("name", "attention", "o_proj", "mlp"),
    [("bf16", None, None, None), ("fp8", "FP8", "FP8", "FP8"), ("nvfp4", "NVFP4", "NVFP4", "NVFP4"),
     ("nvfp4-native", None, "NVFP4", "NVFP4"), ("nvfp4-w4a16", "W4A16_NVFP4", "W4A16_NVFP4", "W4A16_NVFP4"),
     ("mixed-nvfp4-fp8", "FP8", "FP8", "NVFP4"), ("int4-w4a16", "W4A16_AWQ", "W4A16_AWQ", "W4A16_AWQ")],
)  # fmt: skip
def test_shipped_recipes(name: str, attention: str | None, o_proj: str | None, mlp: str | None) -> None:
    recipe = load_recipe(name)
    algorithms = recipe.algorithms(MODULES)
    assert recipe.description
    assert "fc" not in algorithms
    for module in MODULES[1:]:
        expected = mlp if ".mlp." in module else o_proj if "o_proj" in module else attention
        assert algorithms.get(module) == expected, module
    assert recipe.needs_ranges == (name not in ("bf16", "int4-w4a16", "nvfp4-w4a16"))


def test_names_of_recipes() -> None:
    assert recipe_names() == ["bf16", "fp8", "int4-w4a16", "mixed-nvfp4-fp8", "nvfp4", "nvfp4-native", "nvfp4-w4a16"]
    with pytest.raises(RecipeError) as caught:
        load_recipe("nvpf4")
    assert caught.value.message == (
        "'nvpf4': expected a recipe (bf16, fp8, int4-w4a16, mixed-nvfp4-fp8, nvfp4, nvfp4-native, nvfp4-w4a16), each"
        " with or without +fp8-kv, or a YAML file, found neither (nearest recipe: nvfp4)"
    )


@pytest.mark.parametrize(
    ("given", "name"),
    [("W4A16_AWQ", "int4-w4a16"), ("w4a16_nvfp4+fp8-kv", "nvfp4-w4a16+fp8-kv"), ("NVFP4", "nvfp4"), ("fp8", "fp8")],
)
def test_names_of_modelopt(given: str, name: str) -> None:
    assert load_recipe(given) == load_recipe(name)
    assert load_recipe(given).name == name


def test_fp8_cache_is_an_addition_to_any_recipe(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(ALL)
    assert not load_recipe("bf16").fp8_kv_cache
    for name in ("bf16", "nvfp4", str(tmp_path / "own.yaml")):
        recipe = load_recipe(name + FP8_KV)
        assert recipe.fp8_kv_cache
        assert recipe.needs_ranges
        assert recipe.algorithms(MODULES) == load_recipe(name).algorithms(MODULES)
    (tmp_path / "own.yaml").write_text(ALL + "fp8_kv_cache: true\n")
    assert load_recipe(str(tmp_path / "own.yaml")).fp8_kv_cache


def test_first_match_decides(tmp_path: Path) -> None:
    (tmp_path / "own.yaml").write_text(
        HEAD + "  - {modules: layers.1.*, algorithm: none}\n  - {modules: '*', algorithm: FP8}\n"
    )
    algorithms = load_recipe(str(tmp_path / "own.yaml")).algorithms(MODULES)
    assert set(MODULES) - algorithms.keys() == {m for m in MODULES if m.startswith("layers.1.")}


def complaint(tmp_path: Path, text: str) -> str:
    """Error about a recipe file, without its path."""
    file = tmp_path / "own.yaml"
    file.write_text(text)
    with pytest.raises(RecipeError) as caught:
        load_recipe(str(file)).algorithms(MODULES)
    assert str(file) in caught.value.message
    return caught.value.message.replace(str(file), "FILE")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (HEAD + "  - {module: '*', algorithm: FP8}\n",
         "FILE: unknown key rules[0].module (nearest key: modules): expected only modules, algorithm"),
        (ALL + "name: mine\n", "FILE: remove the key name ('mine'): a recipe is named after its file"),
        (
            HEAD + "  - {modules: '*', algorithm: FP4}\n",
            "FILE: rules[0].algorithm: expected one of FP8, NVFP4, W4A16_AWQ, W4A16_NVFP4, none, found 'FP4'"
            " (nearest value: NVFP4)",
        ),
        (HEAD + "  - {modules: layers.*, algorithm: FP8}\n",
         "recipe FILE: no rule matches module 'fc' (rules: layers.*"),
        (
            HEAD + "  - {modules: '*', algorithm: FP8}\n  - {modules: fc, algorithm: none}\n",
            "recipe FILE: rule 2 (fc) matches only modules that earlier rules take",
        ),
        (
            HEAD + "  - {modules: layers.0.mlp.gat_proj, algorithm: none}\n  - {modules: '*', algorithm: FP8}\n",
            "recipe FILE: rule 1 (layers.0.mlp.gat_proj) matches no module (nearest module: layers.0.mlp.gate_proj)",
        ),
    ],
)  # fmt: skip
def test_malformed_recipe(tmp_path: Path, text: str, message: str) -> None:
    assert complaint(tmp_path, text).startswith(message)
