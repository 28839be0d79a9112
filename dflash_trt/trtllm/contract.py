# SPDX-License-Identifier: Apache-2.0
"""Releases of TensorRT-LLM that engine mode is written for, and the signatures that its registration relies on.

`make contract TENSORRT_LLM=DIR` compares every use of the drafter in a release with what ours implements.
"""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

from dflash_trt.errors import EngineError, MissingDependencyError

PACKAGE = "tensorrt_llm"
RELEASES = ("1.3.0rc27", "1.3.0rc29", "1.4.0rc1")
INTERFACE, WORKER = f"{PACKAGE}._torch.speculative.interface", f"{PACKAGE}._torch.speculative.dflash"
REGISTRY, DRAFTER = f"{PACKAGE}._torch.models.modeling_utils", f"{PACKAGE}._torch.models.modeling_dflash"
SIGNATURES = {
    (REGISTRY, "register_draft_model"): "mode",
    (REGISTRY, "get_registered_draft_model_builder"): "mode",
    (WORKER, "DFlashWorker._forward_impl"): "self attn_metadata spec_metadata draft_model ...",
    (DRAFTER, "DFlashForCausalLM.dflash_forward"): "self noise_embedding query_positions num_ctx_per_req ctx_k_cache"
    " ctx_v_cache ctx_cache_batch_idx ctx_kv_cache ctx_page_table",
}
"""Parameters of what we call, wrap and stand in for, by module and function; with "..." there may be others."""


def import_tensorrt_llm(asked_by: str) -> Any:
    """Import the package; MissingDependencyError, in the name of `asked_by`, where that fails."""
    try:
        return import_module(PACKAGE)
    except ImportError as problem:
        raise MissingDependencyError(
            f"{asked_by}: expected {PACKAGE}, found: {problem}",
            # As NVIDIA's installation guide of 1.3.0rc24 has it.
            hint="in an environment of its own, from a clone: pip install '.[trtllm]'",
        ) from None


def check_contract() -> str:
    """Return the installed release; EngineError with every difference where engine mode was not written for it."""
    package = import_tensorrt_llm("engine mode")
    version = str(getattr(package, "__version__", "none"))
    differences = [] if version in RELEASES else [f"version: expected {' or '.join(RELEASES)}, found {version}"]
    for (module, path), expected in SIGNATURES.items():
        found, wanted = _parameters(module, path), expected.split()
        fits = found == wanted or (found is not None and wanted[-1] == "..." and {*wanted[:-1]} <= {*found})
        if not fits:
            shown = "none" if found is None else f"({', '.join(found)})"
            differences.append(f"{module}.{path}: expected ({expected.replace(' ', ', ')}), found {shown}")
    if differences:
        raise EngineError(
            "engine mode: expected a TensorRT-LLM that it was written for, found one that differs:"
            + "".join(f"\n  - {difference}" for difference in differences),
            hint=f"serve in native mode, or install tensorrt_llm {' or '.join(v for v in RELEASES if v != version)}",
        )
    return version


def _parameters(module: str, path: str) -> list[str] | None:
    """Names of a function's parameters in order; None where there is no such function."""
    try:
        found: Any = import_module(module)
    except ImportError:
        return None
    for name in path.split("."):
        found = getattr(found, name, None)
    return list(inspect.signature(found).parameters) if callable(found) else None
