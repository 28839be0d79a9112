# SPDX-License-Identifier: Apache-2.0
"""The part of an engine that a rank of TensorRT-LLM runs, and the all-reduce of ranks that share a drafter.

It is TensorRT-LLM's own, which its target's layers use in the same captured graphs: for blocks of a few rows
it has faster kernels than NCCL (`AllReduce` of _torch/distributed/ops.py at 0071496dc625; read, not run).
"""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

from torch import Tensor

from dflash_trt.engine.executor import AllReduce
from dflash_trt.engine.manifest import Manifest, read_shard
from dflash_trt.errors import EngineError
from dflash_trt.files.command import quoted

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
