# SPDX-License-Identifier: Apache-2.0
"""The two graphs on ONNX Runtime, lowered to FLOAT, on a CPU."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import onnxruntime
import torch
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from onnxruntime.capi import onnxruntime_pybind11_state as ort_errors
from torch import Tensor

from dflash_trt import _C
from dflash_trt.engine.executor import DraftInputs
from dflash_trt.engine.manifest import Manifest
from dflash_trt.errors import EngineError
from dflash_trt.runtime.drafter.onnxruntime.lowering import lower_to_cpu
from dflash_trt.runtime.drafter.onnxruntime.packed_linear import pack_linear_layers

MIN_SHARED_BYTES = 2**23
"""FLOAT size of a matrix from which on a second thread is worth its wake-up: it sleeps, because it may not spin.
Measured (benchmarks/bench_ort_threads.py, two cores of an AMD EPYC): at 6 MiB two threads take 1.0 to 1.1 times as long
as one, at 13.5 0.8 to 1.1, at 24 0.75 to 1.1, at 63 0.6 to 0.8."""
REFUSALS = (
    DecodeError,
    ValueError,  # of onnx, as the next: data that is not where the graph says
    onnx.checker.ValidationError,
    ort_errors.Fail,  # of ONNX Runtime (1.31), without a common base
    ort_errors.InvalidArgument,
    ort_errors.InvalidGraph,
    ort_errors.InvalidProtobuf,
    ort_errors.NotImplemented,
    ort_errors.RuntimeException,
)


def graph_session(directory: Path, file: str, expose: Sequence[str] = ()) -> onnxruntime.InferenceSession:
    """A session on the ONNX file `file` of an engine directory; `expose` names values that become further outputs.

    Raises EngineError for a file that it does not load: weights that are links out of the directory, an operator that
    its version lacks.
    """
    try:
        return model_session(onnx.load(directory / file, load_external_data=False), directory, expose)
    except REFUSALS as error:
        raise EngineError(
            f"{directory / file}: expected a graph that onnxruntime {onnxruntime.__version__} loads, found: {error}",
            hint="copy the engine with files instead of links (cp -rL), or build it again",
        ) from None


def num_threads(model: onnx.ModelProto) -> int:
    """Threads that compute `model`: torch's number, which OMP_NUM_THREADS sets, or one where no weight is worth two."""
    largest = max((math.prod(weight.dims) for weight in model.graph.initializer), default=0)
    return torch.get_num_threads() if 4 * largest >= MIN_SHARED_BYTES else 1


def model_session(model: onnx.ModelProto, directory: Path, expose: Sequence[str] = ()) -> onnxruntime.InferenceSession:
    """A session on a graph in memory whose weights lie in `directory`."""
    options = onnxruntime.SessionOptions()
    # Torch and ONNX Runtime take turns on the same cores: a pool that spins would starve the other.
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.intra_op_num_threads = num_threads(model)
    # Packed weights come in the sizes they have; its arena would double each time it grows.
    options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
    # It compares each value with all that are free: 0.75 s of the 2,800 nodes of a draft in NVFP4. Passes take the same
    # time and memory without, as the arena gives freed memory out again.
    options.enable_mem_reuse = False
    options.register_custom_ops_library(_C.__file__)
    # The model comes from memory, its weights from files.
    options.add_session_config_entry("session.model_external_initializers_file_folder_path", str(directory))
    packed = onnx.ModelProto()
    packed.CopyFrom(model)
    pack_linear_layers(packed, directory)
    lowered = lower_to_cpu(packed, expose).SerializeToString()
    return onnxruntime.InferenceSession(lowered, options, providers=["CPUExecutionProvider"])


NUMPY_TYPES = {torch.float32: np.float32, torch.int32: np.int32}
TOKEN_IDS = ("token_ids", "candidate_ids")
"""Outputs that are INT32; all others are FLOAT."""
MAX_SIZES = 512
"""Combinations of row and page counts that stay bound."""


class OnnxExecutor:
    """An Executor that computes in FLOAT, on torch's own memory."""

    cache_dtype = torch.float32
    device = torch.device("cpu")

    def __init__(self, directory: Path, manifest: Manifest, *, expose: Sequence[str] = ()) -> None:
        """`manifest` is that of `directory`, read and checked by `read_manifest`.

        `expose` names values inside draft.onnx that `draft_values` may return.
        """
        self._directory = directory
        self._manifest = manifest
        self._expose = expose
        self._sessions: dict[str, onnxruntime.InferenceSession] = {}
        self._bound: dict[str, BoundGraph] = {}

    def cache_rows(self, num_slots: int) -> None:
        """None: graphs on ONNX Runtime have no such limit."""

    def load(self) -> None:
        """Creates both sessions.

        Raises EngineError when ONNX Runtime refuses a graph.
        """
        for name, graph in self._manifest.graphs.items():
            if name not in self._sessions:
                expose = self._expose if name == "draft" else ()
                self._sessions[name] = graph_session(self._directory, graph.file, expose)
                self._bound[name] = BoundGraph(self._sessions[name])

    def bind(self, k_cache: Tensor, v_cache: Tensor) -> None:
        """Reads the caches in place, so later writes of their owner are seen."""
        self._bound["draft"].share(k_cache=k_cache, v_cache=v_cache)

    def bind_pool(self, layers: Sequence[Tensor], max_pages: int) -> None:
        """Raises EngineError: standard operators follow no pointers."""
        raise EngineError(
            "ONNX Runtime: expected a context cache of its own, found a pool of pages",
            hint="build plans: dflash-trt build --plans-for DIR",
        )

    def release(self) -> None:
        """Drops the caches."""
        for graph in self._bound.values():
            graph.forget()

    def close(self) -> None:
        """Drops the caches and both sessions."""
        self._bound.clear()
        self._sessions.clear()

    def context(self, taps: Tensor, positions: Tensor) -> Tensor:
        """kv [T, 2, L, G, D] FLOAT."""
        (port,) = self._manifest.graphs["context"].outputs
        inputs = {"target_hidden": taps, "positions": positions}
        return self._bound["context"].run(inputs, {port.name: port.sizes({"T": len(taps)})})[0]

    def draft(self, inputs: DraftInputs) -> Tensor:
        """hidden [B, S, H]."""
        embeds = inputs.noise_embeds
        (hidden,) = self._bound["draft"].run(inputs._asdict(), {"hidden": embeds.shape})
        # `to` with a copy takes twice as long as `clone`.
        return hidden.clone() if embeds.dtype == hidden.dtype else hidden.to(embeds.dtype)

    def draft_values(self, inputs: DraftInputs, names: Sequence[str]) -> list[Tensor]:
        """The named values of one pass as `draft` makes it, each [B, S, H] FLOAT; the next call overwrites them."""
        B, S, H = inputs.noise_embeds.shape
        shapes = {name: (B, S, H) if name == "hidden" else (B * S, H) for name in names}
        return [value.view(B, S, H) for value in self._bound["draft"].run(inputs._asdict(), shapes)]

    def propose(self, inputs: DraftInputs) -> Tensor:
        """Proposals [B, K]."""
        shape = (len(inputs.noise_embeds), self._manifest.draft.num_draft_tokens)
        return self._bound["draft"].run(inputs._asdict(), {"token_ids": shape})[0].long()

    def candidates(self, inputs: DraftInputs) -> tuple[Tensor, Tensor, Tensor]:
        """hidden [B, S, H], candidate ids and logits [B, K, k]."""
        B, S, H = inputs.noise_embeds.shape
        spec = self._manifest.draft
        assert spec.num_candidates is not None
        each = (B, spec.num_draft_tokens, spec.num_candidates)
        shapes = {"hidden": (B, S, H), "candidate_ids": each, "candidate_logits": each}
        hidden, ids, logits = self._bound["draft"].run(inputs._asdict(), shapes)
        return hidden, ids.long(), logits


class _Bound(NamedTuple):
    """The binding of a graph for one size."""

    binding: onnxruntime.IOBinding
    inputs: list[Tensor]
    outputs: list[Tensor]


class BoundGraph:
    """A session whose inputs and outputs lie in torch's memory.

    Binding costs more than copying a step's inputs, so each size is bound once; all sizes share the memory.
    """

    def __init__(self, session: onnxruntime.InferenceSession) -> None:
        self._session = session
        self.forget()

    def forget(self) -> None:
        """Releases all memory."""
        self._shared: dict[str, Tensor] = {}
        self._own: dict[str, Tensor] = {}
        self._bound: dict[tuple[object, ...], _Bound] = {}

    def share(self, **tensors: Tensor) -> None:
        """Reads these inputs in place from now on."""
        self._shared |= tensors
        self._bound.clear()

    def run(self, inputs: Mapping[str, Tensor], outputs: Mapping[str, Sequence[int]]) -> list[Tensor]:
        """Runs the graph; `outputs` are the names and shapes of values to return: FLOAT ones, and token ids.

        The next call overwrites them.
        """
        size = (*outputs, *(tensor.shape for tensor in inputs.values()))
        bound = self._bound.get(size) or self._bind(size, inputs, outputs)
        for own, tensor in zip(bound.inputs, inputs.values(), strict=True):
            own.copy_(tensor)
        self._session.run_with_iobinding(bound.binding)
        return bound.outputs

    def _bind(
        self, size: tuple[object, ...], inputs: Mapping[str, Tensor], outputs: Mapping[str, Sequence[int]]
    ) -> _Bound:
        ours = [
            self._memory(name, tensor.shape, torch.float32 if tensor.is_floating_point() else torch.int32)
            for name, tensor in inputs.items()
        ]
        results = [
            self._memory(name, shape, torch.int32 if name in TOKEN_IDS else torch.float32)
            for name, shape in outputs.items()
        ]
        binding = self._session.io_binding()
        for name, tensor in (*zip(inputs, ours, strict=True), *self._shared.items()):
            binding.bind_input(name, *_place(tensor))
        for name, tensor in zip(outputs, results, strict=True):
            binding.bind_output(name, *_place(tensor))
        if len(self._bound) == MAX_SIZES:
            self._bound.clear()
        self._bound[size] = _Bound(binding, ours, results)
        return self._bound[size]

    @torch.inference_mode(False)  # so that it may be written in that mode and outside it
    def _memory(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """The beginning of a value's own memory, which all of its sizes share."""
        count = math.prod(shape)
        if name not in self._own or len(self._own[name]) < count:
            self._own[name] = torch.empty(count, dtype=dtype)
            self._bound.clear()
        return self._own[name][:count].view(*shape)


def _place(tensor: Tensor) -> tuple[str, int, type[np.generic], tuple[int, ...], int]:
    return "cpu", 0, NUMPY_TYPES[tensor.dtype], tuple(tensor.shape), tensor.data_ptr()
