# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build --plans-for DIR`: adds plans to a complete engine directory, and only those that are due."""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import onnx
from onnx.external_data_helper import uses_external_data

from dflash_trt.engine.manifest import ENGINE, MANIFEST, Manifest, is_engine, read_manifest, read_parts, sha256
from dflash_trt.engine.plans import machine, tensorrt_api
from dflash_trt.engine.plans.build_checks import check_build, check_gpus
from dflash_trt.engine.plans.compile import build_plan
from dflash_trt.engine.plans.jit_cache import is_of_plan
from dflash_trt.engine.plans.plan import Here, Plan, PlanOptions, is_served, profiles
from dflash_trt.engine.plans.plan_process import PlanJob, build_apart
from dflash_trt.engine.plans.tensorrt_api import host_code, plugin_library
from dflash_trt.engine.plans.timing_cache import TimingCache
from dflash_trt.files.workspace import recover_abandoned
from dflash_trt.files.write import OutputKind, new_directory, new_file


def add_plans(directory: Path, options: PlanOptions | None = None, timing_cache: TimingCache | None = None) -> Manifest:
    """Builds the plans of `directory` and returns the manifest; plans that are still valid are kept.

    TensorRT builds for this GPU; TensorRT-RTX for the GPUs of `options`, or for this one if they name none.

    If ranks share the drafter, all ranks' plans are built here instead: plans of a graph differ only in weights. Raises
    MissingDependencyError without TensorRT, a GPU that is asked for or the plugin, BuildError if a GPU lacks the
    graphs' precision, the plugin or the chosen TensorRT does not support the draft or `options`, or TensorRT rejects a
    graph; the directory then still serves ONNX Runtime, and keeps `options` for the next attempt if they can be valid.
    """
    for folder in (directory, directory.absolute().parent):  # restores what a killed process left
        recover_abandoned(folder)
    manifest = read_manifest(directory)
    options = options or manifest.plan_options or PlanOptions()
    algorithms = manifest.quantization.algorithms()
    check_build(manifest.draft, algorithms, options, has_timing_cache=timing_cache is not None)
    manifest = _keep_options(directory, manifest, options)
    if manifest.num_ranks > 1:
        for place, _ in read_parts(directory, manifest):
            add_plans(place, options, timing_cache)
        return manifest
    builder = _open_builder(options, algorithms)
    wanted = {name: _wanted(directory, manifest, name, options, builder) for name in manifest.graphs}
    due = {name: plan for name, plan in wanted.items() if _is_due(manifest.plans.get(name), plan, builder.gpu)}
    return _build(directory, manifest, due, options, builder, timing_cache) if due else manifest


def _keep_options(directory: Path, manifest: Manifest, options: PlanOptions) -> Manifest:
    """Writes `options` into the manifest, for the next try where this one fails."""
    if options == manifest.plan_options:
        return manifest
    manifest = msgspec.structs.replace(manifest, plan_options=options)
    kind = OutputKind(name="a manifest", recognizes=lambda file: is_engine(file.parent), form="file")
    with new_file(directory / MANIFEST, kind, force=True) as temporary:
        temporary.write_bytes(manifest.encode())
    return manifest


class _Builder(NamedTuple):
    """A TensorRT that is installed here, and the GPUs that it builds for."""

    trt: Any
    plugin: Path
    plugin_sha256: str
    compute_capabilities: tuple[str, ...]
    gpu: machine.Gpu | None
    """This machine's, where plans are for it."""


def _open_builder(options: PlanOptions, algorithms: Collection[str]) -> _Builder:
    trt = tensorrt_api.load_tensorrt(options.runtime)
    capabilities, gpu = options.compute_capabilities, None
    if not capabilities:
        gpu = machine.gpu()
        capabilities = (gpu.compute_capability,)
        check_gpus(algorithms, msgspec.structs.replace(options, compute_capabilities=capabilities))
    plugin = plugin_library(needs_kernels=options.runtime == "tensorrt")
    plugin_sha256 = sha256(plugin) if options.version_compatible else host_code(plugin)
    return _Builder(trt, plugin, plugin_sha256, capabilities, gpu)


def _wanted(directory: Path, manifest: Manifest, name: str, options: PlanOptions, builder: _Builder) -> Plan:
    """The plan of a graph as it would be built now."""
    graph, gpu = manifest.graphs[name], builder.gpu
    return Plan(
        file=f"{name}.plan",
        made_from={file: manifest.sha256[file] for file in (graph.file, *_weight_files(directory / graph.file))},
        runtime=options.runtime,
        version=str(builder.trt.__version__),
        gpu=gpu.name if gpu and options.runtime == "tensorrt" else None,
        compute_capabilities=builder.compute_capabilities,
        plugin_sha256=builder.plugin_sha256 if graph.reads_context else None,
        workspace_bytes=options.workspace_bytes,
        hardware_compatibility=options.hardware_compatibility,
        version_compatible=options.version_compatible,
        profiles=profiles(name, options),
    )


def _build(
    directory: Path, manifest: Manifest, due: dict[str, Plan], options: PlanOptions, builder: _Builder,
    timing_cache: TimingCache | None,
) -> Manifest:  # fmt: skip
    """Replaces the directory by one with the plans that are due."""
    registered = manifest.plugin
    library = (builder.plugin, registered.name, registered.version, registered.namespace)
    if options.runtime == "tensorrt":
        tensorrt_api.load_plugin(builder.trt, *library)
    with new_directory(directory, ENGINE, force=True) as temporary:
        _link_files(directory, temporary, leave_out={MANIFEST, *(plan.file for plan in due.values())})
        for name, plan in due.items():
            graph, file = manifest.graphs[name], temporary / plan.file
            if options.runtime == "tensorrt_rtx":
                job = PlanJob(
                    name=name, graph=graph, options=options, compute_capabilities=builder.compute_capabilities,
                    plugin=(str(builder.plugin), *library[1:]),
                )  # fmt: skip
                build_apart(job, directory, file)
                continue
            with file.open("wb") as output:
                build_plan(
                    builder.trt, directory, graph, plan.profiles, options,
                    compute_capabilities=builder.compute_capabilities,
                    plugin=builder.plugin if plan.plugin_sha256 else None, timing_cache=timing_cache, output=output,
                )  # fmt: skip
        hashes = manifest.sha256 | {plan.file: sha256(temporary / plan.file) for plan in due.values()}
        manifest = msgspec.structs.replace(manifest, plans=manifest.plans | due, sha256=dict(sorted(hashes.items())))
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
    """Links everything else into `temporary`, including foreign files but not compiled kernels of dropped plans."""

    def left_out(folder: str, names: list[str]) -> set[str]:
        if Path(folder) != directory:
            return set()
        return leave_out | {name for name in names if any(is_of_plan(name, plan) for plan in leave_out)}

    shutil.copytree(directory, temporary, copy_function=_link, symlinks=True, ignore=left_out, dirs_exist_ok=True)


def _link(file: str | Path, name: str | Path) -> str:
    """Hard-links a large file until the old directory is removed; copies it on file systems without links."""
    try:
        os.link(file, name)
    except OSError:
        shutil.copyfile(file, name)
    return str(name)
