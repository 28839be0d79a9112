# SPDX-License-Identifier: Apache-2.0
"""Put our drafter in the place of TensorRT-LLM's own in every rank, in releases that engine mode is written for.

`make contract TENSORRT_LLM=DIR` compares every use of the drafter in a release with what ours implements.
"""

from __future__ import annotations

import inspect
import runpy
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial, wraps
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from dflash_trt.deploy.trtllm_arguments import ENGINE_MODE
from dflash_trt.engine.manifest import Manifest, read_manifest, read_shard
from dflash_trt.errors import EngineError, MissingDependencyError
from dflash_trt.files.command import quoted

if TYPE_CHECKING:
    from torch import Tensor

    from dflash_trt.engine.executor import AllReduce

MODULE = ENGINE_MODE[-1]
DYNAMO = "dynamo.trtllm"
"""NVIDIA Dynamo's worker around TensorRT-LLM, which has no console script."""
SESSION = "tensorrt_llm.llmapi.mpi_session"
CLIENT = "RemoteMpiCommSessionClient"
T = TypeVar("T")


def run_command(command: Sequence[str]) -> None:
    """Runs the console script or Python file `command[0]`, or dynamo.trtllm, with the rest as arguments; then exits."""
    if command and command[0].endswith(".py"):
        _run_file(Path(command[0]), command)
    if command and command[0] == DYNAMO:
        sys.argv[:] = list(command)
        runpy.run_module(DYNAMO, run_name="__main__")  # in place: sys.modules keeps the main module that registers
        sys.exit()
    scripts = {script.name: script for script in entry_points(group="console_scripts")}
    if not command or command[0] not in scripts:
        sys.exit(f"usage: {' '.join(ENGINE_MODE)} trtllm-serve|trtllm-bench|dflash-trt|FILE.py ARGUMENTS...")
    sys.argv[:] = list(command)
    sys.exit(scripts[command[0]].load()())


def _run_file(file: Path, command: Sequence[str]) -> None:
    """Runs a Python file in place: runpy.run_path would make it the main module, which ranks then import."""
    try:
        code = compile(file.read_bytes(), str(file), "exec")
    except OSError as problem:
        sys.exit(f"error: {file}: {problem.strerror}")
    sys.argv[:] = list(command)
    sys.path[0] = str(file.resolve().parent)  # python FILE puts it there, too
    exec(code, {"__name__": "__main__", "__file__": str(file), "__builtins__": __builtins__})  # noqa: S102
    sys.exit()


def running_command() -> list[str]:
    """Words that start this program again: a Python file, or the command dflash-trt."""
    name, *arguments = sys.argv or [""]
    if name in ("", "-c"):
        return ["FILE.py"]
    is_file = name.endswith(".py") and Path(name).name != "__main__.py"
    return [name if is_file else "dflash-trt", *arguments]


def check_start() -> None:
    """Raise EngineError where ranks would not import the registration."""
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if spec is None or spec.name != f"{MODULE}.__main__":
        raise EngineError(
            "engine mode: expected a start that registers the drafter in every rank, found another main module",
            hint=shlex.join([*ENGINE_MODE, *running_command()]),
        )


def register_in_remote_ranks() -> None:
    """Make every task register the drafter in its rank first; EngineError where tasks are sent another way.

    Ranks of trtllm-llmapi-launch import no main module but unpickle tasks. They run TensorRT-LLM's own modules
    (llmapi/mgmn_leader_node.py on rank 0, mgmn_worker_node.py on the others) and wait; the command, which is no MPI
    process, sends them functions through one method (llmapi/mpi_session.py, read on NVIDIA/TensorRT-LLM's main of
    November 2026).
    """
    client: Any = getattr(import_module(SESSION), CLIENT, None)
    submit: Any = getattr(client, "submit", lambda: None)
    found = list(inspect.signature(submit).parameters)
    if found[:3] != ["self", "task", "args"]:
        raise EngineError(f"{SESSION}.{CLIENT}.submit: expected (self, task, *args, ...), found ({', '.join(found)})")

    @wraps(submit)
    def submit_registered(self: Any, task: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return submit(self, partial(run_registered, task), *args, **kwargs)

    client.submit = submit_registered


def run_registered(task: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Register the drafter in this rank, then run the task."""
    register()
    return task(*args, **kwargs)


DISTRIBUTED = "tensorrt_llm._torch.distributed"


def rank_engine(directory: Path, whole: Manifest, mapping: Any) -> tuple[Path, Manifest]:
    """Directory and manifest of the whole drafter, or of the shard of `mapping`'s rank.

    Raises EngineError for shards of another number of ranks, or where ranks have requests of their own.
    """
    if whole.shard is not None:
        raise EngineError(
            f"{directory}: expected the engine of all ranks, found the part of {whole.shard}",
            hint=f"set speculative_config.speculative_model to {quoted(directory.parent)}",
        )
    if whole.num_ranks == 1:
        return directory, whole
    if mapping.enable_attention_dp:
        raise EngineError(
            f"{directory}: expected a whole drafter for attention by data parallelism, whose ranks have requests of"
            f" their own, found one shared by {whole.num_ranks} ranks",
            hint="build without --tp",
        )
    if mapping.tp_size != whole.num_ranks:
        raise EngineError(
            f"{directory}: expected a drafter shared by {mapping.tp_size} ranks (tensor_parallel_size), found one"
            f" shared by {whole.num_ranks}",
            hint=f"dflash-trt build DRAFT --target TARGET --tp {mapping.tp_size} -o {quoted(directory)} --force",
        )
    return read_shard(directory, whole, mapping.tp_rank)


def all_reduce(mapping: Any) -> AllReduce:
    """TensorRT-LLM's all-reduce among the ranks of `mapping`; EngineError where it takes no mapping."""
    package: Any = getattr(import_module(DISTRIBUTED), "AllReduce", lambda: None)
    found = list(inspect.signature(package).parameters)
    if "mapping" not in found:
        raise EngineError(
            f"{DISTRIBUTED}.AllReduce: expected it to take a mapping, found ({', '.join(found)})",
            hint="build the engine without --tp: then ranks add up nothing",
        )
    module = package(mapping=mapping)

    def add_up(partial: Tensor) -> None:
        partial.copy_(module(partial))

    return add_up


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
            # Command of NVIDIA's installation guide of 1.3.0rc24.
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


def register() -> str:
    """Register our drafter, and make the worker prove that it is called; return the release of TensorRT-LLM.

    Raises EngineError with every difference where this TensorRT-LLM is not one that engine mode was written for.
    """
    release = check_contract()
    mode, registry = import_module(INTERFACE).SpeculativeDecodingMode.DFLASH, import_module(REGISTRY)
    if registry.get_registered_draft_model_builder(mode) is not build_draft_model:
        registry.register_draft_model(mode)(build_draft_model)
        _require_our_drafter(import_module(WORKER).DFlashWorker)
    return release


def _require_our_drafter(worker: Any) -> None:
    """Fail the first drafted step of `worker` that did not call our drafter.

    A target may build a drafter of its own past the registry. Every step with generating requests passes through this
    method in each rank; a CUDA graph is captured through it.
    """
    step = worker._forward_impl
    signature = inspect.signature(step)

    @wraps(step)
    def checked_step(self: Any, *args: Any, **kwargs: Any) -> Any:
        result = step(self, *args, **kwargs)
        given = signature.bind(self, *args, **kwargs).arguments
        drafter, attention = given["draft_model"], given["attn_metadata"]
        has_drafts = attention.num_seqs > attention.num_contexts and given["spec_metadata"].runtime_draft_len > 0
        if has_drafts and not getattr(drafter, "has_drafted", False):
            found = f"{type(drafter).__module__}.{type(drafter).__qualname__}"
            raise EngineError(
                "engine mode: expected the first drafted step to call the registered drafter, found that TensorRT-LLM"
                f" drafts with {found}: this target family builds its own",
                hint="serve in native mode: mode: native in the deployment file",
            )
        return result

    worker._forward_impl = checked_step


def build_draft_model(model_config: Any, draft_config: Any, lm_head: Any, model: Any) -> Any:
    """Build the drafter, or this rank's share, of the engine that `speculative_model` names; plans load with weights.

    Raises EngineError where that is no engine directory, is shared by another number of ranks, or has no plans; for
    plans of another GPU or TensorRT; for an attention backend whose cache our plans do not read; and for an FP8
    context cache, because the worker casts taps to the cache's dtype.
    """
    from dflash_trt.device.launcher import CurrentStreamLauncher
    from dflash_trt.engine.plans.tensorrt_executor import TensorRTExecutor
    from dflash_trt.trtllm.drafter_module import BACKENDS, EngineDrafter
    from dflash_trt.trtllm.scoring_module import DFlash2EngineDrafter, LilicorrEngineDrafter
    from dflash_trt.trtllm.worker_context import declare_pool

    spec_config = model_config.spec_config
    if spec_config.attention_backend not in BACKENDS:
        raise EngineError(
            f"speculative_config.attention_backend: expected {' or '.join(BACKENDS)} for engine mode,"
            f" found {spec_config.attention_backend}"
        )
    directory = Path(spec_config.speculative_model).absolute()
    manifest = read_manifest(directory)
    if manifest.quantization.fp8_kv_cache:
        raise EngineError(
            f"{directory}: expected plans with a BF16 context cache for engine mode, found FP8",
            hint="build with the recipe without +fp8-kv",
        )
    draft = manifest.draft
    if draft.is_dspark:
        raise EngineError(
            f"{directory}: expected a DFlash, DFlash2 or LiLiCorr draft for engine mode, found {draft.kind}, whose"
            " block, or Markov head, that worker does not know",
            hint="decode with the engine here: dflash-trt generate",
        )
    if found := draft.own_vocabulary:
        raise EngineError(
            f"{directory}: expected a draft without embedding and lm_head of its own for engine mode, whose worker"
            f" computes with the target's, found {' and '.join(found)}",
            hint="decode with the engine here (dflash-trt generate), or let TensorRT-LLM load the checkpoint itself",
        )
    if (stages := model_config.mapping.pp_size) > 1:
        raise EngineError(
            f"engine mode: expected pipeline_parallel_size 1, found {stages}: its drafter is on every"
            " rank, and taps come from all layers",
            hint="set tensor_parallel_size to the number of GPUs, or serve the target without a drafter",
        )
    in_pool, mapping = BACKENDS[spec_config.attention_backend], model_config.mapping
    place, manifest = rank_engine(directory, manifest, mapping)
    draft = manifest.draft
    if in_pool:
        declare_pool(draft_config, draft)
    shared = None if manifest.shard is None else all_reduce(mapping)
    executor = TensorRTExecutor(place, manifest, CurrentStreamLauncher(), shared)
    executor.check()  # before the target's weights are read
    if draft.candidate_selector is not None:
        return DFlash2EngineDrafter(draft_config, draft, executor, directory, in_pool=in_pool)
    if draft.lilicorr is not None:
        return LilicorrEngineDrafter(draft_config, draft, executor, directory, in_pool=in_pool)
    return EngineDrafter(draft_config, draft, executor, in_pool=in_pool)
