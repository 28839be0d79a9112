# SPDX-License-Identifier: Apache-2.0
"""Decoding passes that are recorded once for each size, against the models' own attention over whole sequences."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from dflash_trt.device.launcher import CudaLauncher, EagerLauncher, Launcher
from dflash_trt.runtime.kvcache import slot_cache
from dflash_trt.runtime.targets import recorded_pass
from dflash_trt.runtime.targets.packed_pass import CurrentPass
from dflash_trt.runtime.targets.packed_target import TORCH_OPERATORS, PackedTarget
from dflash_trt.runtime.targets.recorded_pass import PassSize, StaticPass
from dflash_trt.runtime.targets.running_model import torch_attention
from dflash_trt.runtime.targets.target import Segment
from tests.contract.cuda_graphs import stand_in, tensors_of
from tests.runtime.targets.families import (
    NUM_SLOTS,
    PACKED,
    TAPS,
    Turn,
    computed,
    family_model,
    random_history,
    recomputed,
    relative_error,
)

TOLERANCE = 1e-4
RECURRENT = ("qwen3_next", "qwen3_5", "qwen3_5_moe")
FAMILIES = [name for name in PACKED if name not in RECURRENT]
DIFFERENT = ("gemma2", "gemma4-small", "gpt_oss", "deepseek_v3")
"""Softcap; shared K and V; sinks, windows and experts; K wider than V."""


@pytest.fixture(autouse=True)
def small_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it grows, and recordings with it."""
    monkeypatch.setattr(slot_cache, "FIRST_PAGES", 1)
    monkeypatch.setattr(recorded_pass, "MIN_PAGES", 1)


def decoding(turns: Sequence[Turn]) -> list[Turn]:
    """The history with logits of every token in all passes but each third."""

    def whole(turn: Turn) -> Turn:
        segments = [msgspec.structs.replace(s, num_logits=len(s.token_ids)) for s in turn.segments]
        return Turn(segments=segments, taken_back=turn.taken_back, released=turn.released)

    return [turn if index % 3 == 2 else whole(turn) for index, turn in enumerate(turns)]


def history(seed: int) -> list[Turn]:
    """Up to pages and windows beyond the first one."""
    return decoding(random_history(seed, num_turns=14, longest=40))


def target_of(model: PreTrainedModel, launcher: Launcher) -> PackedTarget:
    return PackedTarget(model, TAPS, NUM_SLOTS, TORCH_OPERATORS, launcher)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in DIFFERENT else pytest.mark.full) for name in FAMILIES]
)
def test_a_recorded_pass_is_the_models_own(name: str) -> None:
    model, turns = family_model(name), history(seed=4)
    expected = recomputed(model, turns)
    target = target_of(model, EagerLauncher())
    assert relative_error(computed(target, turns), expected) < TOLERANCE
    assert len({size.num_pages for size in target.recorded_sizes}) > 1, "several sizes of context"


@pytest.mark.parametrize("name", ["gemma2", pytest.param("qwen2-window", marks=pytest.mark.full)])
def test_replays_compute_what_the_model_does(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph replays operators on addresses: no Python of ours chooses anything but what goes in."""
    model, turns = family_model(name), history(seed=2)
    expected = recomputed(model, turns)
    graphs = stand_in(monkeypatch)
    target = target_of(model, CudaLauncher(torch.device("cpu")))
    assert relative_error(computed(target, turns), expected) < TOLERANCE
    assert sum(graph.replays for graph in graphs) > len(graphs), "some sizes came again"


def test_caches_that_move_are_recorded_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt makes them grow, in a pass that is not recorded; a tensor of the first recording lives on."""
    model = family_model("gemma2")
    step = Turn(segments=[Segment(slot=0, token_ids=[5], num_logits=1)], taken_back=[0], released=[])
    prompt = Turn(segments=[Segment(slot=1, token_ids=[7] * 200, num_logits=1)], taken_back=[0], released=[])
    turns = [step, step, prompt, step, step]
    expected = recomputed(model, turns)
    graphs = stand_in(monkeypatch)
    target = target_of(model, CudaLauncher(torch.device("cpu")))
    outputs = list[object]()
    hook = model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    assert relative_error(computed(target, turns), expected) < TOLERANCE
    hook.remove()
    assert (len(graphs), sum(graph.replays for graph in graphs)) == (2, 4)


def test_only_the_sizes_used_last_stay(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(recorded_pass, "MAX_RECORDINGS", 2)
    caplog.set_level("INFO", "dflash_trt.runtime.targets")
    model, lengths = family_model("gemma2"), [1, 2, 1, 4, 1, 2]
    segments = [Segment(slot=0, token_ids=[5] * n, num_logits=n) for n in lengths]
    turns = [Turn(segments=[segment], taken_back=[0], released=[]) for segment in segments]
    expected = recomputed(model, turns)
    graphs = stand_in(monkeypatch)
    target = target_of(model, CudaLauncher(torch.device("cpu")))
    assert relative_error(computed(target, turns), expected) < TOLERANCE
    assert [graph.replays for graph in graphs] == [3, 1, 1, 1], "the second of two tokens is recorded again"
    assert [size.num_tokens for size in target.recorded_sizes] == [1, 2]
    assert ["1 x 4 tokens" in message for message in caplog.messages] == [False, False, True, False]
    assert caplog.messages[-1].endswith("; sizes: 2")


def test_a_window_that_begins_on_one_page_and_ends_on_another() -> None:
    """Every begin around two boundaries of pages, in blocks of five tokens."""
    model = family_model("gemma2")
    for length in (29, 31, 32, 33, 60, 62, 64, 65):
        prompt = Segment(slot=0, token_ids=[i % 60 for i in range(length)], num_logits=1)
        block = Segment(slot=0, token_ids=[7, 9, 11, 13, 15], num_logits=5)
        turns = [Turn(segments=[prompt], taken_back=[0], released=[])]
        turns += [Turn(segments=[block], taken_back=[rejected], released=[]) for rejected in (3, 0)]
        model.set_attn_implementation("eager")
        expected = recomputed(model, turns)
        assert relative_error(computed(target_of(model, EagerLauncher()), turns), expected) < TOLERANCE


def test_a_model_that_waits_for_the_gpu_is_launched_as_before(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is said once, and every pass is right."""

    class Waiting(EagerLauncher):
        def record(self, work: Callable[[], None], check: Callable[[], None] | None = None) -> Callable[[], None]:
            raise RuntimeError("called a synchronizing CUDA operation\nand more")

    model, turns = family_model("gemma2"), history(seed=2)
    expected = recomputed(model, turns)
    target = target_of(model, Waiting())
    assert relative_error(computed(target, turns), expected) < TOLERANCE
    (said,) = caplog.messages
    assert said.endswith("they cannot be recorded as a CUDA graph: called a synchronizing CUDA operation")


class OnDevice(TorchDispatchMode):
    """Refuses tensors that are elsewhere: a copy from or to the host cannot be captured."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        assert all(tensor.is_meta for tensor in tensors_of((args, kwargs, results))), func
        return results


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_a_recorded_pass_neither_waits_nor_copies(name: str) -> None:
    """On torch's meta device no number can be read, and nothing is computed."""
    meta, model = torch.device("meta"), copy.deepcopy(family_model(name))
    target, cache = target_of(model, EagerLauncher()), slot_cache.SlotCache(NUM_SLOTS, meta)
    segments = [Segment(slot=slot, token_ids=[5] * (3 - slot), num_logits=3 - slot) for slot in range(2)]
    for segment in segments:
        cache.table.cover(segment.slot, len(segment.token_ids))
    model.to(meta, torch.bfloat16)  # in which CUDA has products of experts that do not wait
    current = StaticPass(PassSize.of(segments, cache.table), cache, meta)
    inputs = {"position_ids": current.positions[None], "use_cache": False, "slot_pass": CurrentPass(current)}
    with torch.inference_mode(), OnDevice(), torch_attention(meta):
        output = target.model(current.token_ids[None], logits_to_keep=0, **inputs)
    assert output.logits.shape[1] == 2 * 4


def test_recurrent_state_is_not_recorded() -> None:
    target = target_of(family_model("qwen3_5"), EagerLauncher())
    computed(target, history(seed=2)[:2])
    assert target.recorded_sizes == []


def test_sizes_are_powers_of_two() -> None:
    target, turns = target_of(family_model("gemma2"), EagerLauncher()), history(seed=2)[:1]
    computed(target, turns)
    (size,) = target.recorded_sizes
    assert all(np.log2(number).is_integer() for number in size)
    assert size.num_segments >= len(turns[0].segments)
    assert [PassSize(8, 2, pages).is_recorded for pages in (512, 1024)] == [True, False]
    assert [PassSize(segments, 16, 1).is_recorded for segments in (32, 64)] == [True, False]
