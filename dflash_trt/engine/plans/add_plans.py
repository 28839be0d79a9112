# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build --plans-for DIR`: adds plans to a complete engine directory, and only those that are due."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import msgspec
import onnx
from onnx.external_data_helper import uses_external_data

from dflash_trt.engine.engine_directory import ENGINE, is_engine
from dflash_trt.engine.manifest import MANIFEST, Manifest, read_manifest, read_parts, sha256
from dflash_trt.engine.plans import machine, tensorrt_api
from dflash_trt.engine.plans.compile import TimingCache, build_plan
from dflash_trt.engine.plans.jit_cache import is_of_plan
from dflash_trt.engine.plans.plan import (
    Here,
    Plan,
    PlanOptions,
    check_gpus,
    check_limits,
    check_options,
    is_served,
    profiles,
)
from dflash_trt.engine.plans.plan_process import PlanJob, build_apart
from dflash_trt.engine.plans.tensorrt_api import host_code, plugin_library
from dflash_trt.files.workspace import recover_abandoned
from dflash_trt.files.write import OutputKind, new_directory, new_file


def add_plans(directory: Path, options: PlanOptions | None = None, timing_cache: TimingCache | None = None) -> Manifest:
    """Builds the plans of `directory` and returns the manifest; plans that are still right stay.

    TensorRT builds for this GPU; TensorRT-RTX for the GPUs of `options`, or for this one where they name none.

    Where ranks share the drafter, theirs are built in their place, all of them here: those of a graph differ in
    weights only. Raises MissingDependencyError without TensorRT, a GPU that is asked for or the plugin, BuildError when
    a GPU lacks the graphs' precision, the plugin or the chosen TensorRT does not take the draft or `options`, or
    TensorRT refuses a graph; the directory then serves ONNX Runtime as before, and keeps `options` for the next try
    where they can be right.
    """
    for folder in (directory, directory.absolute().parent):  # what a killed process left of manifest or directory
        recover_abandoned(folder)
    manifest = read_manifest(directory)
    options = options or manifest.plan_options or PlanOptions()
    algorithms = manifest.quantization.algorithms()
    check_options(options, has_timing_cache=timing_cache is not None)
    check_gpus(algorithms, options)
    check_limits(manifest.draft, options.max_batch_size, options.max_seq_len)
    if options != manifest.plan_options:
        manifest = msgspec.structs.replace(manifest, plan_options=options)
        kind = OutputKind(name="a manifest", recognizes=lambda file: is_engine(file.parent), form="file")
        with new_file(directory / MANIFEST, kind, force=True) as temporary:
            temporary.write_bytes(manifest.encode())
    if manifest.num_ranks > 1:
        for place, _ in read_parts(directory, manifest):
            add_plans(place, options, timing_cache)
        return manifest
    trt = tensorrt_api.load_tensorrt(options.runtime)
    capabilities, gpu = options.compute_capabilities, None
    if not capabilities:
        gpu = machine.gpu()
        capabilities = (gpu.compute_capability,)
        check_gpus(algorithms, msgspec.structs.replace(options, compute_capabilities=capabilities))
    is_measured = options.runtime == "tensorrt"
    plugin = plugin_library(needs_kernels=is_measured)
    plugin_sha256 = sha256(plugin) if options.version_compatible else host_code(plugin)
    wanted = {
        name: Plan(
            file=f"{name}.plan",
            made_from={file: manifest.sha256[file] for file in (graph.file, *_weight_files(directory / graph.file))},
            runtime=options.runtime,
            version=str(trt.__version__),
            gpu=gpu.name if gpu and is_measured else None,
            compute_capabilities=capabilities,
            plugin_sha256=plugin_sha256 if graph.reads_context else None,
            workspace_bytes=options.workspace_bytes,
            hardware_compatibility=options.hardware_compatibility,
            version_compatible=options.version_compatible,
            profiles=profiles(name, options),
        )
        for name, graph in manifest.graphs.items()
    }
    due = [name for name, plan in wanted.items() if _is_due(manifest.plans.get(name), plan, gpu)]
    if not due:
        return manifest
    registered = manifest.plugin
    if is_measured:
        tensorrt_api.load_plugin(trt, plugin, registered.name, registered.version, registered.namespace)
    with new_directory(directory, ENGINE, force=True) as temporary:
        _link_files(directory, temporary, leave_out={MANIFEST, *(wanted[name].file for name in due)})
        for name in due:
            plan, graph = wanted[name], manifest.graphs[name]
            if not is_measured:
                library = (str(plugin), registered.name, registered.version, registered.namespace)
                job = PlanJob(
                    name=name, graph=graph, options=options, compute_capabilities=capabilities, plugin=library
                )
                build_apart(job, directory, temporary / plan.file)
                continue
            content = build_plan(
                trt, directory, graph, plan.profiles, options, compute_capabilities=capabilities,
                plugin=plugin if plan.plugin_sha256 else None, timing_cache=timing_cache,
            )  # fmt: skip
            (temporary / plan.file).write_bytes(content)
        hashes = manifest.sha256 | {wanted[name].file: sha256(temporary / wanted[name].file) for name in due}
        plans = manifest.plans | {name: wanted[name] for name in due}
        manifest = msgspec.structs.replace(manifest, plans=plans, sha256=dict(sorted(hashes.items())))
        (temporary / MANIFEST).write_bytes(manifest.encode())
    return manifest


def _is_due(old: Plan | None, wanted: Plan, gpu: machine.Gpu | None) -> bool:
    """Whether a plan must be built: it is missing, was made from or for something else, or does not run here."""
    if old is None or old == wanted:
        return old is None
    if gpu is None or wanted.runtime == "tensorrt_rtx":
        return True
    here = Here(runtime=wanted.runtime, version=wanted.version, gpu=gpu, plugin_sha256=wanted.plugin_sha256)
    built = {"gpu": old.gpu, "compute_capabilities": old.compute_capabilities, "version": old.version}
    return not is_served(old, here) or msgspec.structs.replace(wanted, **built) != old


def _weight_files(graph: Path) -> list[str]:
    """The files that a graph's initializers point into."""

    tensors = onnx.load(graph, load_external_data=False).graph.initializer
    entries = (entry for tensor in tensors if uses_external_data(tensor) for entry in tensor.external_data)
    return sorted({entry.value for entry in entries if entry.key == "location"})


def _link_files(directory: Path, temporary: Path, *, leave_out: set[str]) -> None:
    """Links everything else into `temporary`, files of other origin included, without kernels of plans left out."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        if Path(folder) != directory:
            return set()
        return leave_out | {name for name in names if any(is_of_plan(name, plan) for plan in leave_out)}

    shutil.copytree(directory, temporary, copy_function=_link, symlinks=True, ignore=left_out, dirs_exist_ok=True)


def _link(file: str | Path, name: str | Path) -> str:
    """Hard-links a file of gigabytes until the old directory is gone; copies it on file systems without links."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)
    return str(name)
