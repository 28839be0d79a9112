# SPDX-License-Identifier: Apache-2.0
"""Configuration of a quantised checkpoint as modelopt 0.47 writes it: hf_quant_config.json and quantization_config."""

from __future__ import annotations

from dflash_trt import __version__
from dflash_trt.checkpoint.draft_spec import HEAD
from dflash_trt.checkpoint.number_formats import FORMATS, FP8, INT4
from dflash_trt.checkpoint.quantization import MIXED, SECTION, Quantization

Json = dict[str, object]
# Readers demand this name: vLLM (weight_utils.py get_quant_config) and TensorRT-LLM (auto_deploy) refuse others.
MODELOPT = {"name": "modelopt", "version": "0.47.0", "layout_written_by": f"dflash-trt {__version__}"}


def claim(config: dict[str, object], quantization: Quantization, modules: list[str]) -> tuple[Json, Json | None]:
    """config.json with the quantisation of the tensors in place of any other, and hf_quant_config.json if there is any.

    `modules` are all linear layers.
    """
    config = {key: value for key, value in config.items() if key != SECTION}
    if not quantization.algorithms():
        return config, None
    modules = [*modules, HEAD]
    return config | {SECTION: quantization_config(quantization, modules)}, hf_quant_config(quantization, modules)


def hf_quant_config(quantization: Quantization, modules: list[str]) -> Json:
    """hf_quant_config.json, where `modules` are all linear layers."""
    algorithms = quantization.modules
    details: Json = {"quant_algo": None, "kv_cache_quant_algo": FP8 if quantization.fp8_kv_cache else None}
    used = set(algorithms.values())
    if len(used) == 1:
        details |= _layer(used.pop())
        details["exclude_modules"] = _exclude_modules([m for m in {*modules, HEAD} if m not in algorithms])
    else:
        details["quant_algo"] = MIXED if used else None
        details["quantized_layers"] = {m: _layer(algorithms[m]) for m in modules if m in algorithms}
    return {"producer": MODELOPT, "quantization": details}


def quantization_config(quantization: Quantization, modules: list[str]) -> Json:
    """config.json's quantization_config, as modelopt's convert_hf_config.py spells it."""
    algorithms, config = quantization.modules, Json()
    details = hf_quant_config(quantization, modules)["quantization"]
    assert isinstance(details, dict)
    used = list(dict.fromkeys(algorithms.values()))
    if used == [INT4]:
        pass  # modelopt 0.47 writes no group for it, unless it stands beside another algorithm
    elif len(used) == 1:
        config["config_groups"] = {"group_0": {**_group(used[0]), "targets": ["Linear"]}}
    elif used:
        targets = [sorted(m for m in algorithms if algorithms[m] == a) for a in used]
        groups = zip(used, targets, strict=True)
        config["config_groups"] = {f"group_{i}": {**_group(a), "targets": t} for i, (a, t) in enumerate(groups)}
        config["quantized_layers"] = details["quantized_layers"]
    config["ignore"] = details.get("exclude_modules", [])
    if used:
        config["quant_algo"] = details["quant_algo"]
    if quantization.fp8_kv_cache:
        config["kv_cache_scheme"] = _codes(FP8)
    return config | {"producer": MODELOPT, "quant_method": "modelopt"}


def _layer(algorithm: str) -> Json:
    number_format = FORMATS[algorithm]
    group = {} if number_format.block is None else {"group_size": number_format.block}
    return {"quant_algo": algorithm, **group, **number_format.claims}


def _group(algorithm: str) -> Json:
    codes = _codes(algorithm)
    return {"input_activations": codes, "weights": codes} if FORMATS[algorithm].quantises_input else {"weights": codes}


def _codes(algorithm: str) -> Json:
    number_format = FORMATS[algorithm]
    group = {} if number_format.block is None else {"group_size": number_format.block}
    return {"dynamic": False, "num_bits": number_format.num_bits, "type": number_format.kind, **group}


def _exclude_modules(dense: list[str]) -> list[str]:
    """The dense layers by name, and what engines call them once nested and fused (modelopt's quantize_drafter.py).

    vLLM builds `fc` at `model.fc`, and joins q, k and v into a `qkv_proj`. lm_head is the target's unless it is listed.
    """
    names = set(dense)
    for fused, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
        for module in dense:
            parent = module.rpartition(".")[0]
            if parent and all(f"{parent}.{part}_proj" in dense for part in parts):
                names.add(f"{parent}.{fused}")
    return sorted(set(dense) | {f"*{name}" for name in names - {HEAD}})
