# SPDX-License-Identifier: Apache-2.0
"""Shards of ranks in ONNX Runtime, with the sum between their segments: together they are the whole drafter."""

import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.number_formats import BLOCK
from dflash_trt.engine.engine_directory import BuildOptions, build_engine
from dflash_trt.engine.manifest import Manifest, read_manifest, read_shard
from dflash_trt.engine.shards import not_shared
from dflash_trt.engine.signatures import num_segments, segment_name, stream_names
from dflash_trt.errors import BuildError, EngineError
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.drafter.onnxruntime import lowering
from dflash_trt.runtime.drafter.onnxruntime.graph_session import graph_session
from tests.engines import FloatArray, Graphs, fitting_target
from tests.featured import featured_draft
from tests.paths import FIXTURES

DRAFT = FIXTURES / "tiny-gpt-oss-dflash"
LENGTH = 20
Rows = tuple[FloatArray, FloatArray]


def build(draft: DraftCheckpoint, output: Path, num_ranks: int) -> Manifest:
    facts = {"draft": draft, "draft_name": draft.directory.name, "target": fitting_target(draft)}
    build_engine(BuildOptions(output=output, num_ranks=num_ranks, **facts))
    return read_manifest(output)


class Ranks:
    """The graphs of all ranks of an engine, each with the shard of the rank that `order` says."""

    def __init__(self, engine: Path, order: list[int]) -> None:
        whole = read_manifest(engine)
        self.spec = whole.draft
        self._graphs = []
        for rank in order:
            directory, manifest = read_shard(engine, whole, rank)
            sessions = {name: graph_session(directory, graph.file) for name, graph in manifest.graphs.items()}
            self._graphs.append((manifest, sessions))

    def context(self, taps: FloatArray) -> list[Rows]:
        """k, v [T, L, G, D] of each rank."""
        feed = {"target_hidden": taps, "positions": np.arange(len(taps), dtype=np.int32)}
        found = (sessions["context"].run(["kv"], feed)[0] for _, sessions in self._graphs)
        return [(kv[:, 0], kv[:, 1]) for kv in found]

    def draft(self, noise: FloatArray, caches: list[Rows], length: int) -> list[FloatArray]:
        """hidden [1, S, H] of each rank, whose caches [1, L, T, G, D] hold its own heads."""
        positions = length + np.arange(noise.shape[1], dtype=np.int32)[None]
        shared = {"noise_embeds": noise, "positions": positions}
        shared |= {"page_ids": np.zeros((1, 1), np.int32), "context_lengths": np.array([length], np.int32)}
        values = [shared | {"k_cache": k, "v_cache": v} for k, v in caches]
        for i in range(num_segments(len(self.spec.layers))):
            for (manifest, sessions), own in zip(self._graphs, values, strict=True):
                name = segment_name(i)
                outputs = [port.name for port in manifest.graphs[name].outputs]
                feed = {value.name: own[value.name] for value in sessions[name].get_inputs()}
                own |= dict(zip(outputs, sessions[name].run(outputs, feed), strict=True))
            _, partial = stream_names(i + 1)
            if partial in values[0]:
                total = np.sum([own[partial] for own in values], axis=0)
                total[noise.shape[1] :] = np.nan  # rows of padding
                for own in values:
                    own[partial] = total
        return [own["hidden"][: noise.shape[1]][None] for own in values]


def hidden_of(engine: Path, order: list[int], context_order: list[int] | None = None) -> tuple[FloatArray, FloatArray]:
    """hidden of the whole drafter, and of the ranks in that order with the context rows of ranks in another."""
    whole, ranks = Graphs(engine), Ranks(engine, order)
    spec, rng = whole.spec, np.random.default_rng(5)
    taps = rng.standard_normal((LENGTH, spec.target_hidden_size)).astype(np.float32)
    noise = rng.standard_normal((1, spec.block_size, spec.hidden_size)).astype(np.float32)
    rows = whole.context(taps, np.arange(LENGTH))
    parts = Ranks(engine, context_order).context(taps) if context_order else ranks.context(taps)
    if not context_order:
        for x in range(2):
            np.testing.assert_allclose(np.concatenate([part[x] for part in parts], axis=2), rows[x], atol=1e-4)
    slot = [tuple(np.ascontiguousarray(x.swapaxes(0, 1)[None]) for x in part) for part in (rows, *parts)]
    expected = whole.draft(noise, slot[0], [0], [LENGTH])
    found = ranks.draft(noise, slot[1:], LENGTH)
    assert all(np.array_equal(each, found[0]) for each in found)
    return expected, found[0]


def largest_error(expected: FloatArray, found: FloatArray) -> float:
    """Error relative to the size of hidden."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


@pytest.mark.parametrize(
    ("name", "recipe"),
    [*(("tiny-gpt-oss", recipe) for recipe in ("bf16", "nvfp4", "padded nvfp4")), ("tiny-qwen3", "fp8")],
)
def test_two_ranks_are_the_whole_drafter(
    tmp_path: Path, name: str, recipe: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The draft has gpt-oss's windows, sinks and biases; codes and scales of quantised layers are the whole draft's.

    Padding rows, which ONNX Runtime otherwise skips, are NaN after each sum.
    """
    if recipe.startswith("padded"):
        monkeypatch.setattr(lowering, "leave_out_padding", lambda graph: None)
        recipe = recipe.removeprefix("padded ")
    draft = read_draft(FIXTURES / f"{name}-dflash")
    if recipe != "bf16":
        quantize_checkpoint(draft, load_recipe(recipe), tmp_path / "draft")
        draft = read_draft(tmp_path / "draft")
    build(draft, tmp_path / "engine", 2)
    assert largest_error(*hidden_of(tmp_path / "engine", [0, 1])) <= 1e-5


def test_a_rank_for_each_kv_head(tmp_path: Path) -> None:
    draft = featured_draft(DRAFT, tmp_path / "draft", {"num_attention_heads": 16, "num_key_value_heads": 8})
    _, part = read_shard(tmp_path / "engine", build(draft, tmp_path / "engine", 8), 7)
    assert part.draft.num_key_value_heads == 1
    assert largest_error(*hidden_of(tmp_path / "engine", [*range(8)])) <= 1e-5


def test_heads_offset_by_one_rank_show(tmp_path: Path) -> None:
    """Context rows of the next rank's heads, under this rank's queries."""
    build(read_draft(DRAFT), tmp_path / "engine", 2)
    assert largest_error(*hidden_of(tmp_path / "engine", [0, 1], [1, 0])) > 1e-2


def test_heads_offset_by_one_rank_are_refused(tmp_path: Path) -> None:
    """Directories that changed their places, or came from another engine."""
    engine, other = tmp_path / "engine", tmp_path / "other"
    whole = build(read_draft(DRAFT), engine, 2)
    build(read_draft(FIXTURES / "tiny-qwen3-dflash"), other, 2)
    shutil.rmtree(engine / "rank1")
    shutil.copytree(engine / "rank0", engine / "rank1")
    with pytest.raises(EngineError, match="rank1: expected the heads of rank 1 of 2, found rank 0 of 2") as refused:
        read_shard(engine, whole, 1)
    assert "--tp 2" in str(refused.value.hint)
    shutil.rmtree(engine / "rank1")
    shutil.copytree(other / "rank1", engine / "rank1")
    with pytest.raises(EngineError, match="is a shard of another engine than"):
        read_shard(engine, whole, 1)


def test_the_same_bytes_twice(tmp_path: Path) -> None:
    for name in "ab":
        build(read_draft(DRAFT), tmp_path / name, 2)
    files = [
        {file.relative_to(tmp_path / name): file.read_bytes() for file in (tmp_path / name).rglob("*.*")}
        for name in "ab"
    ]
    assert files[0] == files[1]
    assert Path("rank1/draft.0.onnx") in files[0]


def test_what_ranks_cannot_share(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match="expected KV heads that 4 ranks share evenly, found 2") as refused:
        build(read_draft(DRAFT), tmp_path / "engine", 4)
    assert refused.value.hint == "build without --tp: every rank then runs the whole drafter"
    with pytest.raises(BuildError, match="expected a plain DFlash draft for 2 ranks, found layers"):
        build(read_draft(FIXTURES / "tiny-qwen3-dflash2"), tmp_path / "engine", 2)
    uneven = msgspec.structs.replace(read_draft(DRAFT).spec, intermediate_size=2 * 3 * BLOCK + 2)
    assert not_shared(uneven, 2) == "expected MLP channels in blocks of 16 that 2 ranks share evenly, found 98"
    even = msgspec.structs.replace(uneven, intermediate_size=2 * 3 * BLOCK)
    assert not_shared(even, 2) is None
    assert not_shared(even, 2, ["W4A16_AWQ"]) == (
        "expected MLP channels in blocks of 32 that 2 ranks share evenly, found 96"
    )
