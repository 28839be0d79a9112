# SPDX-License-Identifier: Apache-2.0
"""Activation ranges of a draft, from replaying it on captured features through modelopt's calibrators.

An anchor is a token of the answer, the context holds the features of all tokens before it, the block is the anchor's
embedding and S - 1 mask embeddings (docs/verify.md).
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnxruntime
import torch
from numpy.typing import NDArray

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, refuse_quantised
from dflash_trt.checkpoint.draft_spec import EMBEDDING, MASK_EMBEDDING, DraftSpec
from dflash_trt.checkpoint.mapped import as_float32, map_tensor
from dflash_trt.engine.graph.context_graph import context_graph
from dflash_trt.engine.graph.draft_graph import draft_graph
from dflash_trt.engine.graph.linear import input_name
from dflash_trt.errors import CheckpointError
from dflash_trt.quantize.bounds import CAPTURE, Ranges
from dflash_trt.runtime.drafter.onnxruntime.ort_session import model_session
from dflash_trt.runtime.measure.features import FeatureFile, FeatureSequence, open_features

ANCHORS = 16
"""Blocks replayed per sequence."""
SEED = 0

FloatArray = NDArray[np.float32]


def activation_ranges(draft: DraftCheckpoint, features: Path) -> Ranges:
    """Largest magnitudes of every linear layer's input and of the cached K and V, on features that `capture` wrote.

    Raises CheckpointError for a quantised draft or features that do not fit; ModuleNotFoundError without modelopt
    (extra `calibrate`).
    """
    from modelopt.torch.quantization.calib import MaxCalibrator

    calibrators: dict[str, Any] = {}
    with open_features(features, draft.spec) as file:
        for name, values in replay(draft, file):
            if name not in calibrators:
                calibrators[name] = MaxCalibrator()
            calibrators[name].collect(torch.from_numpy(values))
    amaxes = {name: calibrator.compute_amax() for name, calibrator in calibrators.items()}
    amax = {name: 0.0 if value is None else float(value) for name, value in amaxes.items()}
    attention = draft.spec.attention_modules()
    return Ranges(
        inputs={module: amax[module] for module in draft.spec.linear_modules()},
        k=tuple(amax[f"{layer}.k"] for layer in attention),
        v=tuple(amax[f"{layer}.v"] for layer in attention),
    )


def replay(draft: DraftCheckpoint, file: FeatureFile) -> Iterator[tuple[str, FloatArray]]:
    """(module, values) for what each linear layer reads; (`layers.N.self_attn.k`, values) for cached K, so for V."""
    replayer = Replayer(draft, file.mask_embedding())
    num_blocks = 0
    for number, sequence in enumerate(file.sequences()):
        outputs = replayer.context(sequence)
        k, v = outputs["kv"].swapaxes(0, 1)
        yield from _named(replayer.context_readers, outputs)
        for layer, attention in enumerate(draft.spec.attention_modules()):
            yield f"{attention}.k", k[:, layer]
            yield f"{attention}.v", v[:, layer]
        anchors = choose_anchors(sequence, number)
        if len(anchors):
            yield from _named(replayer.block_readers, replayer.blocks(sequence, anchors, k, v))
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
    """The draft's own graphs on the CPU, unquantised, with the linear layers' inputs as further outputs."""

    def __init__(self, draft: DraftCheckpoint, mask_embedding: torch.Tensor) -> None:
        """`mask_embedding` [H] is the target's; what the draft has of its own takes its place."""
        refuse_quantised(draft)
        self._embedding = BlockEmbedding(draft, mask_embedding)
        self.context_readers = _context_readers(draft.spec)
        self.block_readers = _block_readers(draft.spec)
        placed = _at_real_files(draft)
        self._context = model_session(context_graph(placed), placed.directory, list(self.context_readers))
        self._draft = model_session(draft_graph(placed), placed.directory, list(self.block_readers))

    def context(self, sequence: FeatureSequence) -> dict[str, FloatArray]:
        """kv [n - 1, 2, L, G, D] of all tokens with taps, and the linear layers' inputs by value name."""
        positions = np.arange(len(sequence.taps), dtype=np.int32)
        feed = {"target_hidden": sequence.taps.float().numpy(), "positions": positions}
        return _run(self._context, feed)

    def blocks(
        self, sequence: FeatureSequence, anchors: NDArray[np.int64], k: FloatArray, v: FloatArray
    ) -> dict[str, FloatArray]:
        """hidden [B, S, H] of the blocks at the anchors [B], over one context, and the layers' inputs by value name."""
        noise = self._embedding.blocks(sequence, anchors)
        lengths = anchors.astype(np.int32)
        feed: dict[str, NDArray[Any]] = {
            "noise_embeds": noise,
            "positions": lengths[:, None] + np.arange(noise.shape[1], dtype=np.int32),
            "k_cache": k.swapaxes(0, 1)[None],  # [1, L, n - 1, G, D]
            "v_cache": v.swapaxes(0, 1)[None],
            "page_ids": np.zeros((len(lengths), 1), np.int32),
            "context_lengths": lengths,
        }
        return _run(self._draft, feed)


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


def _run(session: onnxruntime.InferenceSession, feed: dict[str, NDArray[Any]]) -> dict[str, FloatArray]:
    """All outputs by name; raises CheckpointError for values that are not finite."""
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, feed), strict=True))
    for name, values in outputs.items():
        if not np.isfinite(values).all():
            raise CheckpointError(f"replay: {name}: expected finite values, found NaN or infinity")
    return outputs


def _named(readers: dict[str, list[str]], outputs: dict[str, FloatArray]) -> Iterator[tuple[str, FloatArray]]:
    for value, modules in readers.items():
        for module in modules:
            yield module, outputs[value]


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
