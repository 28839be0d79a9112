# SPDX-License-Identifier: Apache-2.0
"""What engine mode relies on inside TensorRT-LLM, checked before anything is registered.

Read in NVIDIA/TensorRT-LLM, below tensorrt_llm/_torch: speculative/dflash.py at the commits of GENERATIONS and at
00679c66c3e3, which is like the older of them, speculative/interface.py (SpecWorkerBase), models/modeling_dflash.py at
009d8fa431bd, models/checkpoints/base_weight_mapper.py at 0c8de69a1ca6, models/modeling_utils.py and
models/modeling_speculative.py of the same months. The releases' own wheels have not been read: what differs in them
shows here, at load.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from importlib import import_module
from typing import Any, NamedTuple

from dflash_trt.errors import EngineError, MissingDependencyError

RELEASES = ("1.3.0rc27", "1.4.0rc1")
"""That the interface below was read for, the newest last."""
INTERFACE = "tensorrt_llm._torch.speculative.interface"
REGISTRY = "tensorrt_llm._torch.models.modeling_utils"
DRAFTER = "tensorrt_llm._torch.models.modeling_dflash"
WORKER = "tensorrt_llm._torch.speculative.dflash"
LOADER = "tensorrt_llm._torch.models.modeling_speculative"
MAPPER = "tensorrt_llm._torch.models.checkpoints.base_weight_mapper"
# Function by module, with the parameters it is called with: by us, or by the worker on our drafter.
SIGNATURES = {
    (REGISTRY, "register_draft_model"): "mode",
    (REGISTRY, "get_registered_draft_model_builder"): "mode",
    (DRAFTER, "DFlashForCausalLM.load_weights"): "self weights weight_mapper kwargs",
    (DRAFTER, "DFlashForCausalLM.load_weights_from_target_model"): "self target_model",
    (DRAFTER, "DFlashForCausalLM._build_fused_kv_buffers"): "self",
    (DRAFTER, "DFlashForCausalLM.project_target_hidden"): "self hidden_states",
    (DRAFTER, "DFlashForCausalLM.precompute_context_kv"): "self projected_hidden positions",
    (DRAFTER, "DFlashForCausalLM.dflash_forward"): "self noise_embedding query_positions num_ctx_per_req ctx_k_cache"
    " ctx_v_cache ctx_cache_batch_idx ctx_kv_cache ctx_page_table",
    (LOADER, "SpecDecOneEngineForCausalLM.load_draft_weights"): "self weights weight_mapper",
    (MAPPER, "BaseWeightMapper.init_model_and_config"): "self model config",
    (INTERFACE, "SpecWorkerBase.set_draft_model"): "self draft_model",
    (WORKER, "DFlashWorker.set_draft_model"): "self draft_model",
    (WORKER, "DFlashWorker._store_prefill_context"): "self draft_model spec_metadata attn_metadata position_ids"
    " total_target_tokens",
}
DRAFTER_INPUTS = "DFlashWorker.prepare_1st_drafter_inputs"
BUILDER = "model_config draft_config lm_head model"


class Generation(NamedTuple):
    """A worker that engine mode was written for."""

    commit: str
    drafter_inputs: str
    """Parameters of DRAFTER_INPUTS, by which generations are told apart."""
    news: str
    """What it has that the one before it had not, and what that means here."""
    unused: frozenset[str] = frozenset()
    """What it reads of drafters on paths of its own that ours never takes."""


_INPUTS = (
    "self input_ids position_ids hidden_states accepted_tokens num_accepted_tokens attn_metadata spec_metadata"
    " draft_model total_target_tokens"
)
GENERATIONS = (
    Generation("414ba69f42c2", _INPUTS, "the first that was read"),
    Generation(
        "864a4300",
        f"{_INPUTS} prep",
        "prep and ctx_rows_start (kernels of one target and its paged cache: not taken with ours), a mask row of the"
        " draft's own (ours have none), one buffer of captured hidden states for all CUDA graphs",
        # Read with prep alone, which one target's kernels make.
        frozenset(
            [
                "_fused_kv_weight",
                "_fused_kv_bias",
                "_input_ln_eps",
                "_k_norm_stacked",
                "_k_norm_eps",
                "_is_neox",
                "_get_cos_sin_cache",
            ]
        ),
    ),
)
"""The newest last."""
# What the worker reads of a drafter or sets on it, and what only on paths that ours never takes.
ATTRIBUTES = {
    "model_config", "config", "model", "draft_model_full", "lm_head", "logits_processor", "fc", "hidden_norm",
    "mask_token_id", "mask_token_embedding", "block_size", "dflash_attention_backend", "_num_attn_layers", "_num_heads",
    "_num_kv_heads", "_head_dim",
    "_runtime_position_ceiling", "_build_fused_kv_buffers", "project_target_hidden", "precompute_context_kv",
    "dflash_forward",
}  # fmt: skip
UNUSED = {
    "_kv_factor", "_paged_ctx_cache", "_uses_worker_attention_backend", "validate_block_attention_windows",
    "_get_attention_mask_args", "is_dflash2", "has_candidate_selector", "candidate_selector", "select_candidate_path",
}  # fmt: skip


def import_tensorrt_llm(asked_by: str) -> Any:
    """The package; MissingDependencyError, in the name of `asked_by`, where it cannot be imported."""
    try:
        return import_module("tensorrt_llm")
    except ImportError as problem:
        raise MissingDependencyError(
            f"{asked_by}: expected tensorrt_llm, found: {problem}",
            # As NVIDIA's installation guide of 1.3.0rc24 has it.
            hint=f"in an environment of its own: pip install tensorrt_llm=={RELEASES[-1]} dflash-trt",
        ) from None


def check_contract() -> Generation:
    """The worker's generation. Raises MissingDependencyError without TensorRT-LLM, EngineError with every difference to
    what was read of the generation that it is nearest to."""
    package = import_tensorrt_llm("engine mode")
    generation = _generation()
    if found := list(differences(package, generation)):
        listed = "".join(f"\n  - {difference}" for difference in found)
        raise EngineError(
            "engine mode: expected the TensorRT-LLM it was written for, found differences to it, with the worker of"
            f" {generation.commit} ({generation.news}):{listed}",
            hint=f"install tensorrt_llm {' or '.join(RELEASES)}, or serve in native mode",
        )
    return generation


def _generation() -> Generation:
    """By the parameters of its method; the oldest where they are nobody's, for the differences to be told."""
    method = _find(WORKER, DRAFTER_INPUTS)
    found = [] if method is None else list(inspect.signature(method).parameters)
    return next((g for g in reversed(GENERATIONS) if set(g.drafter_inputs.split()) <= set(found)), GENERATIONS[0])


def differences(package: Any, generation: Generation) -> Iterator[str]:
    """Each in one line: the version, what is missing, what has other parameters, what the worker newly asks for."""
    version = getattr(package, "__version__", "none")
    if version not in RELEASES:
        yield f"version: expected {' or '.join(RELEASES)}, found {version}"
    for (module, name), expected in {**SIGNATURES, (WORKER, DRAFTER_INPUTS): generation.drafter_inputs}.items():
        yield from _signature(f"{module}.{name}", _find(module, name), expected)
    mode = _find(INTERFACE, "SpeculativeDecodingMode.DFLASH")
    if mode is None:
        yield f"{INTERFACE}.SpeculativeDecodingMode.DFLASH: expected it, found none"
    elif (lookup := _find(REGISTRY, "get_registered_draft_model_builder")) is not None:
        yield from _signature("the builder of DFlash drafters", lookup(mode), BUILDER)
    known = ATTRIBUTES | UNUSED | generation.unused
    for module, name, variable in (
        (INTERFACE, "SpecWorkerBase", "draft_model"),
        (WORKER, "DFlashWorker", "draft_model"),
        (MAPPER, "BaseWeightMapper.init_model_and_config", "model"),
    ):
        if (reader := _find(module, name)) is None:
            yield f"{module}.{name}: expected it, found none"
            continue
        for asked in sorted(_asked(reader, variable) - known):
            yield f"{name}: expected no use of {variable}.{asked}, which our drafter lacks, found one"


def _find(module: str, name: str) -> Any:
    try:
        value: Any = import_module(module)
        for part in name.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError):
        return None
    return value


def _signature(name: str, function: Any, expected: str) -> Iterator[str]:
    if function is None:
        yield f"{name}: expected ({expected.replace(' ', ', ')}), found none"
        return
    found = list(inspect.signature(function).parameters)
    if found != expected.split():
        yield f"{name}: expected ({expected.replace(' ', ', ')}), found ({', '.join(found)})"


def _asked(reader: Any, variable: str) -> set[str]:
    """The attributes of `variable` in a class's or a method's source, direct or through getattr and hasattr."""

    def is_drafter(node: ast.expr) -> bool:
        return isinstance(node, ast.Name) and node.id == variable

    names = set()
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(reader)))):
        if isinstance(node, ast.Attribute) and is_drafter(node.value):
            names.add(node.attr)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("getattr", "hasattr"):
            subject, name = node.args[:2]
            if is_drafter(subject) and isinstance(name, ast.Constant):
                names.add(str(name.value))
    return names
