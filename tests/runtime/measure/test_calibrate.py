# SPDX-License-Identifier: Apache-2.0
"""Replays of captured features: equal to decoding, equal to the float64 equations, and what they refuse."""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

import msgspec
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.quantization import Quantization
from dflash_trt.cli.failure import EXTRAS
from dflash_trt.quantize.bounds import ranges_from_weights
from dflash_trt.runtime.measure.calibrate import ANCHORS, Replayer, activation_ranges, choose_anchors, replay
from dflash_trt.runtime.measure.features import FeatureSequence, open_features
from dflash_trt.runtime.session import Session
from tests.checkpoint.samples import refusal
from tests.cli.commands import run
from tests.decoding import generate, open_trained
from tests.engine.graph.test_features import CASES, Case
from tests.featured import featured_draft
from tests.fixtures_data import PAIRS
from tests.paths import FIXTURES
from tests.reference.dflash_float64 import Array, ReferenceDrafter
from tests.reference.synthetic import write_random_draft
from tests.runtime.measure.feature_samples import Facts, Tensors, edit

RELATIVE = 1e-5
OTHER_ORDER = 1e-4  # ranges of the sums after the taps, too
BF16_NOISE = 8 * 2**-9  # each rounding is at most 2^-9, and few lie between two layers' inputs
CALIBRATORS = "modelopt.torch.quantization.calib"


def fixture_draft(name: str) -> DraftCheckpoint:
    return read_draft(FIXTURES / f"{name}-dflash")


def largest_replayed(name: str, features: Path, device: torch.device | None = None) -> dict[str, float]:
    """max |x| by what `replay` names."""
    draft, largest = fixture_draft(name), defaultdict[str, float](float)
    with open_features(features, draft.spec) as file:
        for module, values in replay(draft, file, device):
            largest[module] = max(largest[module], float(values.abs().max()))
    return dict(largest)


def sequence(prompt_length: int, num_tokens: int) -> FeatureSequence:
    return FeatureSequence(
        tokens=torch.zeros(num_tokens, dtype=torch.int64),
        prompt_length=prompt_length,
        taps=torch.zeros(num_tokens - 1, 1),
        embeddings=torch.zeros(num_tokens - prompt_length, 1),
    )


def test_anchors_stand_in_the_answer() -> None:
    long = sequence(50, 300)
    anchors = choose_anchors(long, 3)
    assert len(set(anchors.tolist())) == len(anchors) == ANCHORS
    assert anchors.min() >= 50
    assert anchors.max() < 299
    assert sorted(anchors) == anchors.tolist() == choose_anchors(long, 3).tolist()
    assert anchors.tolist() != choose_anchors(long, 4).tolist()
    assert choose_anchors(sequence(5, 9), 0).tolist() == [5, 6, 7]
    assert choose_anchors(sequence(5, 6), 0).tolist() == []


@pytest.mark.parametrize("name", PAIRS)
def test_replayed_blocks_are_those_of_decoding(name: str, features: dict[str, Path]) -> None:
    """hidden of each block that speculative decoding drafted, from the file alone.

    On the file's taps as on decoding's own the two agree to FLOAT's accuracy.
    """
    session = open_trained(name, max_batch_size=1)
    draft = fixture_draft(name)
    with open_features(features[name], draft.spec) as file:
        captured = next(file.sequences())
        replayer = Replayer(draft, file.mask_embedding())
    tokens, p = captured.tokens.tolist(), captured.prompt_length
    decoded = drafted_blocks(session, tokens[:p], len(tokens) - p)
    anchors = np.array(sorted(decoded))
    assert len(anchors) > 3

    outputs = replayer.context(captured)
    hidden = replayer.blocks(captured, anchors, outputs["kv"])["hidden"].numpy()
    masks = [draft.spec.mask_token_id] * draft.spec.num_draft_tokens
    for row, anchor in enumerate(anchors.tolist()):
        session.drafter.release(0)
        session.drafter.inject([0], [anchor], captured.taps[:anchor])
        block = session.target.embed(torch.tensor([[tokens[anchor], *masks]]))
        same_taps = session.drafter.run([0], block)["hidden"][0].numpy()
        assert np.abs(hidden[row] - same_taps).max() <= RELATIVE * np.abs(same_taps).max()
        assert np.abs(hidden[row] - decoded[anchor]).max() <= OTHER_ORDER * np.abs(same_taps).max()


def drafted_blocks(session: Session, prompt: list[int], max_tokens: int) -> dict[int, Array]:
    """hidden [S, H] of every block that decoding drafts, by the number of context tokens before it."""
    blocks: dict[int, Array] = {}
    inject, draft = session.drafter.inject, session.drafter.run
    injected = [0]

    def count(slots: Sequence[int], num_rows: Sequence[int], taps: torch.Tensor, rows: np.ndarray) -> None:
        injected[0] += len(rows)
        inject(slots, num_rows, taps, rows)

    def keep(slots: Sequence[int], noise_embeds: torch.Tensor) -> Mapping[str, torch.Tensor]:
        outputs = draft(slots, noise_embeds)
        blocks[injected[0]] = outputs["hidden"][0].clone().numpy()
        return outputs

    with patch.object(session.drafter, "inject", count), patch.object(session.drafter, "run", keep):
        generate(session, prompt, max_tokens)
    return blocks


@pytest.mark.parametrize("name", PAIRS)
def test_what_is_collected_equals_the_equations(name: str, features: dict[str, Path]) -> None:
    """Largest magnitude of every linear layer's input and of the cached K and V, in float64."""
    draft, reference = fixture_draft(name), ReferenceDrafter.load(FIXTURES / f"{name}-dflash")
    expected = defaultdict[str, float](float)
    linear, S = ReferenceDrafter.linear, draft.spec.block_size

    def note(module: str, x: Array) -> None:
        expected[module] = max(expected[module], float(np.abs(x).max()))

    def noting_linear(self: ReferenceDrafter, module: str, x: Array) -> Array:
        note(module, x)
        return linear(self, module, x)

    with (
        patch.object(ReferenceDrafter, "linear", noting_linear),
        open_features(features[name], draft.spec) as file,
    ):
        mask = file.mask_embedding().double().numpy()
        for number, captured in enumerate(file.sequences()):
            taps = captured.taps.double().numpy()
            k, v = reference.context_kv(taps, np.arange(len(taps)))
            for layer, attention in enumerate(draft.spec.attention_modules()):
                note(f"{attention}.k", k[:, layer])
                note(f"{attention}.v", v[:, layer])
            for anchor in choose_anchors(captured, number).tolist():
                noise = np.tile(mask, (S, 1))
                noise[0] = captured.embeddings[anchor - captured.prompt_length].double().numpy()
                reference.draft(noise, k[:anchor], v[:anchor], np.arange(anchor, anchor + S))

    actual = largest_replayed(name, features[name])
    assert actual.keys() == expected.keys()
    assert actual.keys() >= set(draft.spec.linear_modules())
    for module, value in expected.items():
        assert actual[module] == pytest.approx(value, rel=RELATIVE), module


@pytest.mark.parametrize("name", PAIRS)
def test_torch_collects_what_onnxruntime_does(name: str, features: dict[str, Path]) -> None:
    """The computation on a GPU, here by torch: BF16 rounds each value between two layers, FLOAT none."""
    expected = largest_replayed(name, features[name])
    actual = largest_replayed(name, features[name], torch.device("cpu"))
    assert actual.keys() == expected.keys()
    assert actual != expected
    for module, value in expected.items():
        assert actual[module] == pytest.approx(value, rel=BF16_NOISE), module


class Largest:
    """Stands in for modelopt's MaxCalibrator."""

    def __init__(self) -> None:
        self.amax: torch.Tensor | None = None

    def collect(self, x: torch.Tensor) -> None:
        assert x.dtype == torch.float32
        amax = x.abs().max()
        self.amax = amax if self.amax is None else torch.maximum(self.amax, amax)

    def compute_amax(self) -> torch.Tensor | None:
        return self.amax


@pytest.fixture(params=["stand-in", pytest.param("modelopt", marks=pytest.mark.full)])
def calibrators(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in, and in the full tests modelopt's own."""
    if request.param == "modelopt":
        pytest.importorskip("modelopt", reason="modelopt comes with dflash-trt[dev]")
        return
    module = ModuleType(CALIBRATORS)
    module.MaxCalibrator = Largest  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, CALIBRATORS, module)


@pytest.mark.parametrize("name", PAIRS)
@pytest.mark.usefixtures("calibrators")
def test_ranges(name: str, features: dict[str, Path]) -> None:
    """The largest magnitudes, exactly."""
    draft, largest = fixture_draft(name), largest_replayed(name, features[name])
    ranges = activation_ranges(draft, features[name])
    assert list(ranges.inputs) == draft.spec.linear_modules()
    assert ranges.inputs == {module: largest[module] for module in draft.spec.linear_modules()}
    attention = draft.spec.attention_modules()
    assert ranges.k == tuple(largest[f"{layer}.k"] for layer in attention)
    assert ranges.v == tuple(largest[f"{layer}.v"] for layer in attention)


def test_a_drafts_own_embedding_is_what_blocks_begin_with(features: dict[str, Path], tmp_path: Path) -> None:
    """The rows in the file are the target's: the same where the draft's are those, and else not looked at."""
    target = load_file(FIXTURES / "tiny-qwen3" / "model.safetensors")["model.embed_tokens.weight"].bfloat16()
    row = torch.randn(128, generator=torch.Generator().manual_seed(0)).bfloat16()
    mine = target.clone()
    mine[1] = row

    def values(name: str, table: torch.Tensor, **facts: object) -> np.ndarray:
        tensors = {"embed_tokens.weight": table} if facts.get("own_embedding") else {}
        tensors |= {"mask_embedding": row} if facts.get("mask_embedding") else {}
        draft = featured_draft(FIXTURES / "tiny-qwen3-dflash", tmp_path / name, facts, tensors)
        with open_features(features["tiny-qwen3"], draft.spec) as file:
            replayer, first = Replayer(draft, file.mask_embedding()), next(iter(file.sequences()))
            kv = replayer.context(first)["kv"]
            return replayer.blocks(first, choose_anchors(first, 0), kv)["hidden"].numpy()

    borrowed = values("borrowed", target)
    assert np.array_equal(values("same", target, own_embedding=True), borrowed)
    own = values("own", mine, own_embedding=True)
    assert np.abs(own - borrowed).max() > 0.1
    assert np.array_equal(values("row", target, mask_embedding=True), own)


@pytest.mark.usefixtures("calibrators")
def test_a_layer_of_zeros_has_the_range_0(features: dict[str, Path], tmp_path: Path) -> None:
    def silence(tensors: Tensors, facts: Facts) -> None:
        for i in range(3):
            tensors[f"taps.{i}"].zero_()

    silent = edit(features["tiny-qwen3"], tmp_path / "f", silence)
    assert activation_ranges(fixture_draft("tiny-qwen3"), silent).inputs["fc"] == 0


def test_without_modelopt(features: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An error that names the extra; nothing else takes modelopt's place."""
    draft, output = FIXTURES / "tiny-qwen3-dflash", tmp_path / "out"
    arguments = ("--recipe", "fp8", "-o", output, "--calibration", features["tiny-qwen3"])
    monkeypatch.setitem(sys.modules, "modelopt", None)
    result = run("quantize", draft, *arguments)
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == ("error: missing package nvidia-modelopt\n\nhint: pip install 'dflash-trt[calibrate]'\n")
    assert not output.exists()
    assert EXTRAS["modelopt"] == EXTRAS["requests"] == "calibrate"


def no_answers(tensors: Tensors, facts: Facts) -> None:
    """Cuts every answer to one token."""
    facts["max_tokens"] = 1
    for i in range(3):
        end = int(tensors[f"prompt_length.{i}"]) + 1
        tensors[f"tokens.{i}"] = tensors[f"tokens.{i}"][:end].clone()
        tensors[f"taps.{i}"] = tensors[f"taps.{i}"][: end - 1].clone()
        tensors[f"embeddings.{i}"] = tensors[f"embeddings.{i}"][:1].clone()


@pytest.mark.parametrize(
    ("quantization", "found"),
    [
        (Quantization(modules={"fc": "FP8"}, fp8_kv_cache=False), "FP8"),
        (Quantization(modules={}, fp8_kv_cache=True), "an FP8 context cache"),
    ],
)
def test_a_quantised_draft_is_refused(quantization: Quantization, found: str) -> None:
    draft = msgspec.structs.replace(fixture_draft("tiny-qwen3"), quantization=quantization)
    message = refusal(lambda: Replayer(draft, torch.zeros(128)))
    assert f"expected an unquantised draft, found {found}" in message


def overflow(tensors: Tensors, facts: Facts) -> None:
    tensors["taps.0"].fill_(3e38)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (no_answers, "no answer of at least 2 tokens in 3 sequences"),
        (overflow, "contains NaN or infinity"),
    ],
)
def test_features_that_cannot_be_replayed(
    change: Callable[[Tensors, Facts], None], words: str, features: dict[str, Path], tmp_path: Path
) -> None:
    file = edit(features["tiny-qwen3"], tmp_path / "f", change)
    assert words in refusal(lambda: largest_replayed("tiny-qwen3", file))


def test_a_draft_in_the_hub_cache(features: dict[str, Path], tmp_path: Path) -> None:
    """huggingface_hub keeps links to blobs in another directory, which ONNX Runtime refuses to follow."""
    blobs, draft = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    draft.mkdir()
    for name in ("config.json", "model.safetensors"):
        (blobs / f"x-{name}").write_bytes((FIXTURES / "tiny-qwen3-dflash" / name).read_bytes())
        (draft / name).symlink_to(blobs / f"x-{name}")
    with open_features(features["tiny-qwen3"], read_draft(draft).spec) as file:
        assert next(iter(replay(read_draft(draft), file)))[0] == "fc"


CHOSEN = [c for c in CASES if c.name in ("biases of q and v, fc and MLP", "Laguna", "MiMo", "partial rotary 4 gpt_oss")]


@pytest.mark.parametrize("case", CHOSEN, ids=lambda case: case.name)
def test_no_input_exceeds_its_bound(case: Case, tmp_path: Path) -> None:
    """Over rows that point where weight rows point, and random ones; fc has no bound."""
    draft = featured_draft(write_random_draft(tmp_path / "base", dialect=case.dialect), tmp_path / "draft", case.facts)
    ranges, spec = ranges_from_weights(draft), draft.spec
    reference = ReferenceDrafter.load(tmp_path / "draft", case.reference)
    seen: dict[str, float] = {}

    class Recording(ReferenceDrafter):
        def linear(self, name: str, x: Any) -> Any:
            seen[name] = max(seen.get(name, 0.0), float(np.abs(x).max()))
            return super().linear(name, x)

    recording = Recording(**{name: getattr(reference, name) for name in reference.__dataclass_fields__})
    rng, H, S = np.random.default_rng(0), spec.hidden_size, spec.block_size
    v_weight = reference.tensors["layers.0.self_attn.v_proj.weight"]
    rows = np.concatenate([v_weight, 100 * np.eye(H), 10 * rng.normal(size=(64, H))])
    taps = rows @ np.linalg.pinv(reference.tensors["fc.weight"]).T
    k, v = recording.context_kv(taps, np.arange(len(rows)))
    for begin in range(0, len(rows) - S, S):
        recording.draft(rows[begin : begin + S], k, v, np.arange(len(rows), len(rows) + S))
    assert seen.keys() - {"fc"} == ranges.inputs.keys()
    for module, bound in ranges.inputs.items():
        assert seen[module] <= bound * (1 + 1e-6), module
    assert (np.abs(k).max(axis=(0, 2, 3)) <= np.array(ranges.k) * (1 + 1e-6)).all()
    assert (np.abs(v).max(axis=(0, 2, 3)) <= np.array(ranges.v) * (1 + 1e-6)).all()
    assert np.abs(k[:, 0]).max() > 0.3 * ranges.k[0]  # no bound is far from the values that occur
    assert np.abs(v[:, 0]).max() > 0.3 * ranges.v[0]
