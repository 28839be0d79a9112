# SPDX-License-Identifier: Apache-2.0
"""Builds engine directories for tests."""

import atexit
import shutil
import tempfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint, TargetSpec, read_target
from dflash_trt.engine.engine_directory import BuildOptions, build_engine
from dflash_trt.engine.manifest import Manifest, read_manifest
from dflash_trt.engine.proposal_head import HeadChoice
from dflash_trt.runtime.drafter.onnxruntime.graph_session import graph_session
from tests.paths import FIXTURES

FloatArray = npt.NDArray[np.float32]


def build(draft: Path, output: Path, target: Path | None = None, num_ranks: int = 1) -> Manifest:
    """Builds `draft` for `target`; without one, for a target that has just the facts the draft demands."""
    checkpoint = read_draft(draft)
    partner = read_target(target) if target else fitting_target(checkpoint)
    build_engine(
        BuildOptions(draft=checkpoint, draft_name=str(draft), target=partner, output=output, num_ranks=num_ranks)
    )
    return read_manifest(output)


def build_with_head(draft: Path, target: Path, work: Path, token_ids: Iterable[int] | None = range(400)) -> Path:
    """An engine in `work` whose draft has the target's head as its own, or those rows of it."""
    rows = None if token_ids is None else np.array([*token_ids])
    choice = HeadChoice(algorithm=None, num_tokens=None if rows is None else len(rows))
    build_engine(
        BuildOptions(
            draft=read_draft(draft), draft_name=str(draft), target=read_target(target), output=work / "engine",
            head=choice, head_tokens=rows,
        )
    )  # fmt: skip
    return work / "engine"


@cache
def trained_engine(name: str) -> Path:
    """The engine of a trained fixture pair, for all tests of this process that only read it."""
    directory = Path(tempfile.mkdtemp()) / "engine"
    atexit.register(shutil.rmtree, directory.parent)
    build(FIXTURES / f"{name}-dflash", directory, FIXTURES / name)
    return directory


def fitting_target(draft: DraftCheckpoint) -> TargetCheckpoint:
    """A target that has just the facts that `draft` demands, and no weights."""
    spec = draft.spec
    facts = TargetSpec(
        model_type=spec.model_type,
        hidden_size=spec.tap_hidden_size or spec.hidden_size,
        num_hidden_layers=spec.num_target_layers or max(spec.target_layer_ids) + 1,
        vocab_size=spec.vocab_size or 96,
        max_position_embeddings=spec.max_position_embeddings,
    )
    return TargetCheckpoint(directory=draft.directory, spec=facts, config=draft.config, weights={})


class Graphs:
    """Both graphs of an engine directory as plain functions on float32 arrays."""

    def __init__(self, directory: Path) -> None:
        manifest = read_manifest(directory)
        self.directory = directory
        self.spec = manifest.draft
        self._context: onnxruntime.InferenceSession = graph_session(directory, manifest.graphs["context"].file)
        self._draft: onnxruntime.InferenceSession = graph_session(directory, manifest.graphs["draft"].file)

    def context(self, target_hidden: FloatArray, positions: npt.NDArray[np.int64]) -> tuple[FloatArray, FloatArray]:
        """target_hidden [T, A*H], positions [T] -> k, v [T, L, G, D]."""
        feed = {"target_hidden": target_hidden, "positions": positions.astype(np.int32)}
        (kv,) = self._context.run(["kv"], feed)
        return kv[:, 0], kv[:, 1]

    def draft(
        self,
        noise_embeds: FloatArray,
        caches: tuple[FloatArray, FloatArray],
        page_ids: list[int],
        context_lengths: list[int],
    ) -> FloatArray:
        """noise_embeds [B, S, H], caches [slots, L, C_max, G, D] -> hidden [B, S, H]."""
        lengths = np.array(context_lengths, dtype=np.int32)
        feed = {
            "noise_embeds": noise_embeds,
            "positions": lengths[:, None] + np.arange(noise_embeds.shape[1], dtype=np.int32),
            "k_cache": caches[0],
            "v_cache": caches[1],
            "page_ids": np.array(page_ids, dtype=np.int32)[:, None],
            "context_lengths": lengths,
        }
        (hidden,) = self._draft.run(["hidden"], feed)
        return hidden
