# SPDX-License-Identifier: Apache-2.0
"""A draft checkpoint as modelopt itself exports it; needs modelopt 0.47.

Each 2-D weight becomes an nn.Linear under its checkpoint name, as modelopt's quantize_drafter.py does it, and
goes through the functions of `export_hf_checkpoint`. As a script it writes the golden configurations:

    python -m tests.quantize.modelopt_export
"""

import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import nn

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.quantize.bounds import Ranges
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.quantize.scales import scale_groups
from tests.paths import REPOSITORY
from tests.quantize.samples import int4_formula
from tests.reference.synthetic import DraftSizes, write_random_draft

GOLDEN = REPOSITORY / "tests" / "golden" / "quantize"
RECIPES = ("fp8", "nvfp4", "nvfp4-native", "nvfp4-w4a16", "mixed-nvfp4-fp8", "nvfp4+fp8-kv", "bf16+fp8-kv",
           "int4-w4a16")  # fmt: skip


WHOLE_BLOCKS = DraftSizes(hidden=96, intermediate=160)
"""Widths in blocks of any format."""


def modelopt_export(
    directory: Path, recipe_name: str, ranges: Ranges
) -> tuple[dict[str, torch.Tensor], dict[str, Any], dict[str, Any]]:
    """Tensors, hf_quant_config.json and config.json's quantization_config."""
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.export.quant_utils import get_quant_config, postprocess_state_dict, preprocess_linear_fusion
    from modelopt.torch.export.unified_export_hf import _export_quantized_weight
    from modelopt.torch.quantization.config import QuantizerAttributeConfig
    from modelopt.torch.quantization.nn import TensorQuantizer

    draft, recipe = read_draft(directory), load_recipe(recipe_name)
    algorithms = recipe.algorithms(draft.spec.linear_modules())
    stored = load_file(directory / "model.safetensors")
    root = _linear_view(stored)
    mtq.quantize(root, _quantizers(mtq, algorithms))

    for group in scale_groups(draft.spec):
        for algorithm in sorted({algorithms[m] for m in group if m in algorithms}):
            preprocess_linear_fusion([root.get_submodule(m) for m in group if algorithms.get(m) == algorithm])
    for module, algorithm in algorithms.items():
        if algorithm in ("FP8", "NVFP4"):
            root.get_submodule(module).input_quantizer.amax = torch.tensor(ranges.inputs[module])
        elif algorithm == "W4A16_AWQ":  # by the definition's scales, which modelopt's `max` would choose otherwise
            _, scales = int4_formula(stored[f"{module}.weight"].float().numpy())
            root.get_submodule(module).weight_quantizer._amax = torch.from_numpy(scales).flatten()[:, None] * 7
    if recipe.fp8_kv_cache:
        for attention, k, v in zip(draft.spec.attention_modules(), ranges.k, ranges.v, strict=True):
            for name, amax in (("k", k), ("v", v)):
                quantizer = TensorQuantizer(QuantizerAttributeConfig(num_bits=(4, 3)), amax=torch.tensor(amax))
                setattr(root.get_submodule(attention), f"{name}_bmm_quantizer", quantizer)

    config = get_quant_config(root)
    for module in algorithms:
        _export_quantized_weight(root.get_submodule(module), next(iter(stored.values())).dtype)
    kv = config["quantization"]["kv_cache_quant_algo"]
    tensors = stored | postprocess_state_dict(root.state_dict(), 448.0, kv)
    return tensors, config, convert_hf_quant_config_format(config)


def _linear_view(stored: dict[str, torch.Tensor]) -> nn.Module:
    root = nn.Module()
    for name, weight in stored.items():
        if weight.dim() != 2:
            continue
        *parents, leaf = name.removesuffix(".weight").split(".")
        node = root
        for parent in parents:
            if not hasattr(node, parent):
                setattr(node, parent, nn.Module())
            node = getattr(node, parent)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
        linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
        setattr(node, leaf, linear)
    return root


def _quantizers(mtq: Any, algorithms: dict[str, str]) -> dict[str, Any]:
    """One modelopt configuration with the presets' quantizers, module by module."""
    presets = {"FP8": mtq.FP8_DEFAULT_CFG, "NVFP4": mtq.NVFP4_DEFAULT_CFG, "W4A16_NVFP4": mtq.W4A16_NVFP4_CFG,
               "W4A16_AWQ": mtq.INT4_BLOCKWISE_WEIGHT_ONLY_CFG}  # fmt: skip
    entries: list[dict[str, Any]] = [{"quantizer_name": "*", "enable": False}]
    for module, algorithm in algorithms.items():
        for entry in presets[algorithm]["quant_cfg"]:
            if "cfg" in entry and entry["quantizer_name"] in ("*weight_quantizer", "*input_quantizer"):
                name, cfg = entry["quantizer_name"].removeprefix("*"), copy.deepcopy(entry["cfg"])
                if algorithm == "W4A16_AWQ":
                    cfg["block_sizes"][-1] = 32
                entries.append({"quantizer_name": f"{module}.{name}", "cfg": cfg})
    return {"quant_cfg": entries, "algorithm": "max"}


def unit_ranges(directory: Path) -> Ranges:
    """A range for every input, another one for each group that shares scales."""
    spec = read_draft(directory).spec
    values = {module: 1.5 + 0.37 * index for index, group in enumerate(scale_groups(spec)) for module in group}
    layers = range(len(spec.layers))
    return Ranges(inputs=values, k=tuple(3.3 + i for i in layers), v=tuple(5.7 + i for i in layers))


def main() -> None:
    GOLDEN.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        layers = ["full_attention"] * 2
        directory = write_random_draft(Path(temporary), dialect="gpt_oss", layer_types=layers, sizes=WHOLE_BLOCKS)
        for recipe in RECIPES:
            _, hf_quant_config, quantization_config = modelopt_export(directory, recipe, unit_ranges(directory))
            document = {"hf_quant_config": hf_quant_config, "quantization_config": quantization_config}
            (GOLDEN / f"{recipe}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
