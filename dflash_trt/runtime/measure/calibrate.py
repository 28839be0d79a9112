# SPDX-License-Identifier: Apache-2.0
"""Activation ranges of a draft, from replaying it on captured features through modelopt's calibrators.

An anchor is a token of the answer, the context holds the features of all tokens before it, the block is the anchor's
embedding and S - 1 mask embeddings (docs/verify.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor

from dflash_trt.checkpoint.decoded_tensor import as_float32, map_tensor
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, refuse_quantised
from dflash_trt.checkpoint.draft_spec import EMBEDDING, MASK_EMBEDDING, DraftSpec
from dflash_trt.device.attention_kernel import check_kernels
from dflash_trt.engine.context_layout import ContextLayout
from dflash_trt.engine.graph.context_graph import context_graph
from dflash_trt.engine.graph.draft_graph import draft_graph
from dflash_trt.engine.graph.linear import input_name
from dflash_trt.errors import CheckpointError
from dflash_trt.quantize.bounds import CAPTURE, Ranges
from dflash_trt.runtime.drafter.onnxruntime.graph_session import model_session
from dflash_trt.runtime.drafter.torch.graph_program import Program
from dflash_trt.runtime.drafter.torch.onnx_graph import OnnxGraph
from dflash_trt.runtime.drafter.torch.operators import TORCH_TYPES
from dflash_trt.runtime.drafter.torch.scaled_linear import patterns
from dflash_trt.runtime.drafter.torch.stored_weights import StoredWeights
from dflash_trt.runtime.measure.features import FeatureFile, FeatureSequence, open_features

ANCHORS = 16
"""Blocks replayed per sequence."""
SEED = 0

Values = dict[str, Tensor]
"""Inputs or outputs of a graph, by name."""


def activation_ranges(draft: DraftCheckpoint, features: Path, device: str = "cpu") -> Ranges:
    """Largest magnitudes of every linear layer's input and of the cached K and V, on features that `capture` wrote.

    On `cpu` the draft computes in FLOAT, on `cuda` in BF16. Raises CheckpointError for a quantised draft or features
    that do not fit; MissingDependencyError for a GPU that the attention kernel was not compiled for;
    ModuleNotFoundError without modelopt (extra `calibrate`).
    """
    from modelopt.torch.quantization.calib import MaxCalibrator

    calibrators: dict[str, Any] = {}
    with open_features(features, draft.spec) as file:
        for name, values in replay(draft, file, None if device == "cpu" else torch.device(device)):
            if name not in calibrators:
                calibrators[name] = MaxCalibrator()
            calibrators[name].collect(values)
    amaxes = {name: calibrator.compute_amax() for name, calibrator in calibrators.items()}
    amax = {name: 0.0 if value is None else float(value) for name, value in amaxes.items()}
    attention = draft.spec.attention_modules()
    return Ranges(
        inputs={module: amax[module] for module in draft.spec.linear_modules()},
        k=tuple(amax[f"{layer}.k"] for layer in attention),
        v=tuple(amax[f"{layer}.v"] for layer in attention),
    )


def replay(
    draft: DraftCheckpoint, file: FeatureFile, device: torch.device | None = None
) -> Iterator[tuple[str, Tensor]]:
    """(module, FLOAT values) of what each linear layer reads; (`layers.N.self_attn.k`, values) for cached K, so for V.

    `device` is the Replayer's.
    """
    replayer = Replayer(draft, file.mask_embedding(), device)
    num_blocks = 0
    for number, sequence in enumerate(file.sequences()):
        outputs = replayer.context(sequence)
        kv = outputs["kv"]
        yield from _named(replayer.context_readers, outputs)
        for layer, attention in enumerate(draft.spec.attention_modules()):
            yield f"{attention}.k", kv[:, 0, layer].float()
            yield f"{attention}.v", kv[:, 1, layer].float()
        anchors = choose_anchors(sequence, number)
        if len(anchors):
            yield from _named(replayer.block_readers, replayer.blocks(sequence, anchors, kv))
        num_blocks += len(anchors)
    if not num_blocks:
        raise CheckpointError(
            f"{file.file}: no answer of at least 2 tokens in {file.facts.num_sequences} sequences",
            hint=f"capture longer answers: {CAPTURE}",
        )


def choose_anchors(sequence: FeatureSequence, number: int) -> NDArray[np.int64]:
    """Draws up to ANCHORS token indices of the answer, sorted, with the sequence number as the seed."""
    return sequence.random_anchors(ANCHORS, np.random.default_rng([SEED, number]))


class Replayer:
    """The draft's own graphs, unquantised, with the linear layers' inputs as further outputs."""

    def __init__(self, draft: DraftCheckpoint, mask_embedding: Tensor, device: torch.device | None = None) -> None:
        """`mask_embedding` [H] is the target's; what the draft has of its own takes its place.

        Torch computes in BF16 on `device`, without one ONNX Runtime in FLOAT on the CPU.
        """
        refuse_quantised(draft)
        self._embedding = BlockEmbedding(draft, mask_embedding)
        self.context_readers = _context_readers(draft.spec)
        self.block_readers = _block_readers(draft.spec)
        placed = _at_real_files(draft)
        self._context = _opened(context_graph(placed), placed.directory, list(self.context_readers), device)
        self._draft = _opened(draft_graph(placed), placed.directory, list(self.block_readers), device)

    def context(self, sequence: FeatureSequence) -> Values:
        """kv [n - 1, 2, L, G, D] of all tokens with taps, and the linear layers' inputs by value name."""
        positions = torch.arange(len(sequence.taps), dtype=torch.int32)
        return _finite(self._context({"target_hidden": sequence.taps.float(), "positions": positions}))

    def blocks(self, sequence: FeatureSequence, anchors: NDArray[np.int64], kv: Tensor) -> Values:
        """hidden [B, S, H] of the blocks at the anchors [B], over one context, and the layers' inputs by value name.

        `kv` is that of `context`, one page that all blocks read.
        """
        noise = torch.from_numpy(self._embedding.blocks(sequence, anchors))
        lengths = torch.from_numpy(anchors).int()
        k, v = (cache.transpose(0, 1)[None] for cache in kv.unbind(1))  # [1, L, n - 1, G, D]
        cached = ContextLayout.of_caches(k, v)
        feed = {
            "noise_embeds": noise,
            "positions": lengths[:, None] + torch.arange(noise.shape[1], dtype=torch.int32),
            "context_lengths": lengths,
            # Read by torch:
            "context_pointers": torch.tensor(cached.pointers),
            "context_layout": torch.tensor(cached.layout),
            "page_table": torch.zeros(1, 1, dtype=torch.int32),
            "slot_ids": torch.zeros_like(lengths),
            # ONNX Runtime also needs:
            "k_cache": k,
            "v_cache": v,
            "page_ids": torch.zeros(len(lengths), 1, dtype=torch.int32),
        }
        return _finite(self._draft(feed))


def _opened(
    model: onnx.ModelProto, directory: Path, expose: Sequence[str], device: torch.device | None
) -> Callable[[Values], Values]:
    """A graph's function of its inputs, which picks them out of more; it returns the values `expose`, too."""
    return _by_onnxruntime(model, directory, expose) if device is None else _by_torch(model, directory, expose, device)


def _by_onnxruntime(model: onnx.ModelProto, directory: Path, expose: Sequence[str]) -> Callable[[Values], Values]:
    session = model_session(model, directory, expose)
    inputs, outputs = ([port.name for port in ports] for ports in (session.get_inputs(), session.get_outputs()))

    def run(feed: Values) -> Values:
        values = session.run(outputs, {name: feed[name].numpy() for name in inputs})
        return dict(zip(outputs, map(torch.from_numpy, values), strict=True))

    return run


def _by_torch(
    model: onnx.ModelProto, directory: Path, expose: Sequence[str], device: torch.device
) -> Callable[[Values], Values]:
    if device.type == "cuda":
        check_kernels(device)
    dtypes = {port.name: TORCH_TYPES[port.type.tensor_type.elem_type] for port in model.graph.input}
    graph = OnnxGraph(directory, f"{model.graph.name}.onnx", StoredWeights(directory, device), model)
    program = Program(graph, [*(port.name for port in model.graph.output), *expose], patterns(device))

    @torch.no_grad()
    def run(feed: Values) -> Values:
        return program.run({name: feed[name].to(device, dtype) for name, dtype in dtypes.items()})

    return run


def _context_readers(spec: DraftSpec) -> dict[str, list[str]]:
    """The modules that read each value of context.onnx."""
    if not spec.context_input_layernorm:
        return {input_name("fc"): ["fc"], input_name(spec.context_modules()[0]): spec.context_modules()}
    pairs = [[f"{attention}.{kv}_proj" for kv in "kv"] for attention in spec.attention_modules()]
    return {input_name("fc"): ["fc"], **{input_name(pair[0]): pair for pair in pairs}}


def _block_readers(spec: DraftSpec) -> dict[str, list[str]]:
    """The modules that read each value of draft.onnx."""
    alone = [[f"{attention}.o_proj"] for attention in spec.attention_modules()]
    alone += [[f"layers.{i}.mlp.down_proj"] for i in range(len(spec.layers))]
    if spec.attention_gate is not None:
        alone += [[f"{attention}.g_proj"] for attention in spec.attention_modules()]
    return {input_name(modules[0]): modules for modules in [*spec.stacks(), *alone]}


def _at_real_files(draft: DraftCheckpoint) -> DraftCheckpoint:
    """`draft` at the files that links lead to (huggingface_hub's cache): ONNX Runtime follows none."""
    weights = {name: msgspec.structs.replace(t, file=t.file.resolve()) for name, t in draft.weights.items()}
    directories = {tensor.file.parent for tensor in weights.values()}
    if len(directories) > 1:
        raise CheckpointError(
            f"{draft.directory}: expected its weight files in one directory, found links into {len(directories)}",
            hint="copy the checkpoint with its links resolved: cp -rL",
        )
    return msgspec.structs.replace(draft, directory=directories.pop(), weights=weights)


def _finite(outputs: Values) -> Values:
    """The outputs; raises CheckpointError for values that are not finite."""
    for name, values in outputs.items():
        if not values.isfinite().all():
            raise CheckpointError(f"replay: {name} contains NaN or infinity")
    return outputs


def _named(readers: dict[str, list[str]], outputs: Values) -> Iterator[tuple[str, Tensor]]:
    for value, modules in readers.items():
        for module in modules:
            yield module, outputs[value].float()


class BlockEmbedding:
    """Embeds blocks by a draft's own table and mask embedding where it has them, else by the target's."""

    def __init__(self, draft: DraftCheckpoint, mask_embedding: torch.Tensor) -> None:
        """`mask_embedding` [H] is the target's."""
        spec, mask = draft.spec, mask_embedding.float().numpy()
        self._table = map_tensor(draft.weights[EMBEDDING]) if spec.own_embedding else None
        if self._table is not None:
            mask = as_float32(self._table[spec.mask_token_id])
        if spec.mask_embedding:
            mask = as_float32(map_tensor(draft.weights[MASK_EMBEDDING]))
        self._masks = np.tile(mask, (spec.block_size, 1))

    def blocks(self, sequence: FeatureSequence, anchors: NDArray[np.int64]) -> NDArray[np.float32]:
        """[B, S, H] FLOAT: the embedding of the token at each anchor [B], then S - 1 mask embeddings."""
        blocks = np.tile(self._masks, (len(anchors), 1, 1))
        if self._table is None:
            blocks[:, 0] = sequence.embeddings[anchors - sequence.prompt_length].float().numpy()
        else:
            blocks[:, 0] = as_float32(self._table[sequence.tokens.numpy()[anchors]])
        return blocks
