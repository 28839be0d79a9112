# SPDX-License-Identifier: Apache-2.0
"""A graph's weights as ONNX Runtime gets them: large matrices as they are stored, all else in FLOAT.

On a CPU `_C`'s operator PackedLinear multiplies with what is mapped from the engine's own file: opening a draft reads
no weights, processes share them, and a pass reads a sixth to a half of what they would be in FLOAT. ONNX Runtime's
own kernel is the faster one for small matrices and many rows (benchmarks/bench_packed_linear.py); on a GPU it has all.

FLOAT weights are dequantised once, into files. ONNX Runtime would compute them, too, by folding constants; but it keeps
every intermediate of that until the session stands, and what it is given in memory beside what it packs from that
(1.31: `add_external_initializers`). Files it unmaps.
"""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import onnx
import torch
from google.protobuf.message import Message  # type: ignore[import-untyped]
from numpy.typing import NDArray
from onnx import TensorProto, helper

from dflash_trt.errors import EngineError
from dflash_trt.graph.cpu.stored_weights import BITS, Packed, Weight, WeightLocation, stored_weights
from dflash_trt.graph.onnx_builder import PLUGIN_DOMAIN
from dflash_trt.graph.pruning import prune

PACKED_LINEAR = "PackedLinear"
MIN_PACKED = 512
"""Columns of a matrix from which on it stays as it is stored: beside their products, the sums across vectors at the end
of a row then cost little."""
ROOT = Path("/")
"""ONNX Runtime takes all files from one folder; engine and temporary files lie in this one."""
SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - TemporaryDirectory makes the names in it


class _Initializer(NamedTuple):
    """One whose data is mapped where it lies, or else computed."""

    name: str
    data_type: int
    shape: tuple[int, ...]
    data: WeightLocation | Callable[[], Iterable[NDArray[Any]]]

    @property
    def num_new_bytes(self) -> int:
        """That have to be written."""
        size = 4 if self.data_type == TensorProto.FLOAT else 1
        return 0 if isinstance(self.data, WeightLocation) else size * math.prod(self.shape)


@contextmanager
def mapped_weights(model: onnx.ModelProto, directory: Path, *, keep_packed: bool) -> Iterator[None]:
    """Prepares `model`, whose data lies in `directory`, for the one session that is made within.

    Its initializers in files then have places below ROOT, and nodes that computed weights from weights are gone. With
    `keep_packed` each Gemm with a large matrix is a PackedLinear. Raises EngineError for data that is not in
    `directory`, and where there is no room for FLOAT weights.
    """
    graph = model.graph
    weights = stored_weights(graph, directory)
    initializers: dict[str, _Initializer] = {}
    nodes = []
    for node in graph.node:
        if keep_packed and _is_linear(node) and _can_stay(weights.get(node.input[1])):
            inputs = _packed(node.input[1], weights[node.input[1]])
            initializers |= {initializer.name: initializer for initializer in inputs}
            nodes.append(_packed_linear(node, weights[node.input[1]].parts[0], inputs))
        elif node.output[0] not in weights:
            read = {name: weights[name] for name in node.input if name in weights}
            initializers |= {n: _Initializer(n, TensorProto.FLOAT, w.shape, w.pieces) for n, w in read.items()}
            nodes.append(node)
    others = [initializer for initializer in graph.initializer if initializer.name not in weights]
    with _in_files(initializers.values()) as protos:
        del graph.node[:], graph.initializer[:]
        graph.node.extend(nodes)
        graph.initializer.extend([*others, *protos])
        prune(graph)
        if all(imported.domain != PLUGIN_DOMAIN for imported in model.opset_import):
            model.opset_import.append(helper.make_opsetid(PLUGIN_DOMAIN, 1))
        _refuse_others(model, {_location(proto) for proto in protos}, directory)
        yield


def _is_linear(node: onnx.NodeProto) -> bool:
    """Whether it is x times the transpose of a weight, and nothing else: as `linear` writes it."""
    attributes = {attribute.name: attribute.i for attribute in node.attribute}
    return node.op_type == "Gemm" and len(node.input) == 2 and attributes == {"transB": 1}


def _can_stay(weight: Weight | None) -> bool:
    """Whether the operator can multiply with it as it is stored, and is worth it."""
    if weight is None or len(weight.shape) != 2 or weight.shape[1] < MIN_PACKED:
        return False
    formats = {part.format for part in weight.parts}
    return len(weight.parts) == 1 or (len(formats) == 1 and formats <= set(BITS))


def _packed(name: str, weight: Weight) -> list[_Initializer]:
    """What PackedLinear reads of a weight: codes [N, bytes of a row], and block scales [N, K / 16] of NVFP4."""
    first, *others = weight.parts
    rows = weight.shape[0]
    num_bytes = sum(part.codes.num_bytes for part in weight.parts)
    data = (lambda: [part.codes.map() for part in weight.parts]) if others else first.codes
    initializers = [_Initializer(f"{name}/codes", TensorProto.UINT8, (rows, num_bytes // rows), data)]
    if (scales := first.block_scales) is not None:
        shape = rows, scales.num_bytes // rows
        initializers.append(_Initializer(f"{name}/block_scales", TensorProto.UINT8, shape, scales))
    return initializers


def _packed_linear(gemm: onnx.NodeProto, weight: Packed, inputs: Sequence[_Initializer]) -> onnx.NodeProto:
    return helper.make_node(
        PACKED_LINEAR,
        [gemm.input[0], *(initializer.name for initializer in inputs)],
        gemm.output,
        name=gemm.name,
        domain=PLUGIN_DOMAIN,
        format=weight.format,
        scale=weight.scale,
    )


@contextmanager
def _in_files(initializers: Iterable[_Initializer]) -> Iterator[list[TensorProto]]:
    """Initializers with their data in files; those that were written for it are gone afterwards.

    Raises EngineError where there is no room for them.
    """
    initializers = list(initializers)
    size = sum(initializer.num_new_bytes for initializer in initializers)
    with tempfile.TemporaryDirectory(prefix="dflash-trt-", dir=_folder_for(size)) as name:
        files = [Path(name).resolve() / str(number) for number in range(len(initializers))]
        try:
            with ThreadPoolExecutor(torch.get_num_threads()) as pool:
                protos = list(pool.map(_in_file, initializers, files))
        except OSError as error:
            raise EngineError(
                f"{name}: expected room for {size / 2**30:.1f} GiB of FLOAT weights while they load, found: {error}",
                hint="set TMPDIR to a directory with more room",
            ) from None
        yield protos


def _refuse_others(model: onnx.ModelProto, locations: Container[str], directory: Path) -> None:
    """Below ROOT lies everything: no other file may be named, wherever a graph can name one."""
    for tensor in _tensors(model.graph, model.functions):
        if tensor.data_location == TensorProto.EXTERNAL and _location(tensor) not in locations:
            raise EngineError(
                f"{directory}: expected a weight in FLOAT, FLOAT16, BFLOAT16, FP8 or NVFP4, found {tensor.name} of "
                f"{TensorProto.DataType.Name(tensor.data_type)} in {_location(tensor)}",
                hint="build the engine again",
            )


def _tensors(*roots: Any) -> Iterator[TensorProto]:
    """All that protobuf messages hold, however deep."""
    for root in roots:
        if isinstance(root, TensorProto):
            yield root
        elif isinstance(root, Message):
            yield from _tensors(*(value for _, value in root.ListFields()))
        elif isinstance(root, Iterable) and not isinstance(root, str | bytes):
            yield from _tensors(*root)


def _location(tensor: TensorProto) -> str:
    return next((entry.value for entry in tensor.external_data if entry.key == "location"), "")


def _folder_for(num_bytes: int) -> Path | None:
    """Shared memory where it has the room; else where temporary files go, which costs seconds a GiB."""
    has_room = SHARED_MEMORY.is_dir() and shutil.disk_usage(SHARED_MEMORY).free > 1.25 * num_bytes
    return SHARED_MEMORY if has_room else None


def _in_file(initializer: _Initializer, file: Path) -> TensorProto:
    """Where its data lies, which is in `file` if it has to be written."""
    name, data_type, shape, data = initializer
    if not isinstance(data, WeightLocation):
        with file.open("wb") as stream:
            for piece in data():
                stream.write(piece.data)
        data = WeightLocation(file, 0, initializer.num_new_bytes)
    proto = TensorProto(name=name, data_type=data_type, dims=shape, data_location=TensorProto.EXTERNAL)
    location = str(data.file.relative_to(ROOT))
    for key, value in (("location", location), ("offset", str(data.offset)), ("length", str(data.num_bytes))):
        proto.external_data.add(key=key, value=value)
    return proto
