# SPDX-License-Identifier: Apache-2.0
"""Verification and its statistics on random pairs, where a damage has a known effect, and what it refuses."""

from __future__ import annotations

import math
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from dflash_trt.api.prompts import read_prompts
from dflash_trt.checkpoint.draft_spec import BlockConv
from dflash_trt.checkpoint.quantization import Quantization
from dflash_trt.checkpoint.rope import Rope
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.engine.manifest import Manifest
from dflash_trt.errors import EngineError, RequestError
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.measure.comparable import check_reference
from dflash_trt.runtime.measure.comparing_drafter import BLOCKS_APART, exposed_values
from dflash_trt.runtime.measure.statistics import Difference, TauLoss, first_difference, relative_error, tau_loss
from dflash_trt.runtime.measure.verification import TokenPrompt, Verification
from dflash_trt.runtime.measure.verification_report import PromptResult, VerificationReport
from dflash_trt.runtime.measure.verification_verdict import find_failure
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets.huggingface import load_model, make_target
from tests.damage import copy_scaled
from tests.decoding import decode, generate, greedy
from tests.engines import build
from tests.oracle.random_pairs import write_random_pair


@pytest.mark.parametrize(
    ("expected", "found", "difference"),
    [
        ([], [], None), ([1, 2], [1, 2], None), ([1, 2, 3], [1, 9, 3], (1, 2, 9)), ([1, 2], [1], (1, 2, None)),
        ([1], [1, 2], (1, None, 2)), ([], [7], (0, None, 7)),
    ],
)  # fmt: skip
def test_first_difference(expected: list[int], found: list[int], difference: tuple[int | None, ...] | None) -> None:
    result = first_difference(expected, found)
    assert (result and (result.position, result.expected, result.found)) == difference


def test_tau_loss_of_two_prompts() -> None:
    """Resamples are (1,1), (1,2) and (2,2), with chances 1/4, 1/2 and 1/4: the ends of the interval are exact."""
    measured = tau_loss([1.0, 3.0], [2.0, 4.0])
    assert measured.loss == pytest.approx(1 - 2 / 3)
    assert (measured.low, measured.high) == (pytest.approx(1 - 3 / 4), pytest.approx(1 - 1 / 2))
    assert measured == tau_loss([1.0, 3.0], [2.0, 4.0])


@pytest.mark.parametrize(
    ("tau", "reference", "loss"), [([2.0], [4.0], 0.5), ([3.0, 3.0], [2.0, 2.0], -0.5), ([], [], None)]
)
def test_tau_loss_of_few_prompts(tau: list[float], reference: list[float], loss: float | None) -> None:
    """A gain is a negative loss; a single prompt has no interval."""
    measured = tau_loss(tau, reference)
    assert (measured and measured.loss) == loss
    if measured is not None:
        assert (measured.low is None, measured.num_prompts) == (len(tau) == 1, len(tau))


def test_tau_loss_is_paired() -> None:
    """Prompts differ much, engines by one half on each: the interval must not see the prompts' spread."""
    reference = np.linspace(2, 10, 50)
    measured = tau_loss((reference / 2).tolist(), reference.tolist())
    assert measured.loss == measured.low == measured.high == 0.5


def test_tau_loss_interval_is_the_textbooks() -> None:
    generator = np.random.default_rng(1)
    reference = np.full(400, 4.0)
    taus = reference + generator.normal(-0.2, 0.5, 400)
    measured = tau_loss(taus.tolist(), reference.tolist())
    half_width = 1.96 * taus.std() / math.sqrt(400) / 4
    assert measured.high - measured.low == pytest.approx(2 * half_width, rel=0.05)


def test_relative_error() -> None:
    one, other = (torch.tensor(values) for values in ([[3.0, 4], [0, 0]], [[3.0, 0], [0, 4]]))
    assert relative_error(one, one) == 0
    assert relative_error(one, other) == pytest.approx(math.sqrt(32) / 5)
    zero = torch.zeros(3)
    assert relative_error(zero, zero) == 0
    assert relative_error(zero + 1, zero) == math.inf
    large = torch.full((4,), 3e38)  # squares overflow FLOAT
    assert relative_error(large / 2, large) == pytest.approx(0.5)


PROMPTS = [TokenPrompt(name=f"p{i}", token_ids=[i, 1, 2, 3]) for i in range(3)]
TOKENS = 14


class Pair:
    """A random target and engines of its draft."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.target, self.draft = write_random_pair(path, dialect="qwen3")
        manifest = build(self.draft, path / "engine", self.target)
        spec = read_target(self.target).spec
        taps = manifest.draft.target_layer_ids
        self.loaded = make_target(load_model(self.target, spec, taps), taps, num_slots=1)
        self.plain, self.again = (self.session(path / "engine", manifest) for _ in range(2))

    def session(self, engine: Path, manifest: Manifest) -> Session:
        exposed = exposed_values(manifest.draft)
        drafter = open_drafter(engine, manifest, expose=exposed)
        return Session(manifest, self.loaded, drafter, None, frozenset())

    def damaged(self, tensor: str, factor: float) -> Session:
        engine = self.path / f"{tensor}-{factor}"
        copy_scaled(self.draft, self.path / "damaged", tensor, factor)
        return self.session(engine, build(self.path / "damaged", engine, self.target))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def report(pair: Pair) -> VerificationReport:
    """An engine beside itself."""
    return Verification(pair.plain, pair.again).run(PROMPTS, TOKENS)


def test_an_engine_beside_itself(report: VerificationReport) -> None:
    assert report.engine == report.reference
    assert report.engine.identical
    loss = report.comparison.tau_loss
    assert (loss.loss, loss.low, loss.high, loss.num_prompts) == (0, 0, 0, 3)
    assert [d.difference for d in report.comparison.tau_differences] == [0] * 3
    error = report.comparison.error
    assert error.hidden == 0
    assert all((layer.output, layer.k, layer.v) == (0, 0, 0) for layer in error.layers)
    useful = msgspec.structs.replace(report, engine=msgspec.structs.replace(report.engine, tau=1.25))
    assert find_failure(useful, 0.0) is None
    # The pair was never trained: lossless, and of no use.
    assert "nearly every draft token is rejected" in str(find_failure(report, 0.0))
    few = msgspec.structs.replace(report, engine=msgspec.structs.replace(report.engine, steps=19))
    assert find_failure(few, 0.0) is None
    unknown = msgspec.structs.replace(report, engine=msgspec.structs.replace(report.engine, tau=None))
    assert "tau: not measured" in str(find_failure(unknown, None))


def test_an_engine_alone(pair: Pair) -> None:
    report = Verification(pair.plain).run(PROMPTS, TOKENS)
    assert (report.reference, report.comparison) == (None, None)
    completions = [generate(pair.plain, prompt.token_ids, TOKENS) for prompt in PROMPTS]
    assert [prompt.tau for prompt in report.engine.prompts] == [c.tau for c in completions]
    assert report.engine.steps == sum(c.steps for c in completions)
    acceptance = report.engine.acceptance
    assert [entry.position for entry in acceptance] == list(range(1, report.block_size))
    assert sum(entry.accepted for entry in acceptance) == sum(c.acceptance.accepted for c in completions)
    assert sum(entry.proposed for entry in acceptance) == sum(c.acceptance.proposed for c in completions)


def test_errors_appear_where_the_damage_is(pair: Pair) -> None:
    """V of layer 1 doubled: ||2 v - v|| / ||v|| is 1 there, nothing before it changes, all after it does."""
    damaged = pair.damaged("layers.1.self_attn.v_proj.weight", 2)
    report = Verification(damaged, pair.plain).run(PROMPTS, TOKENS)
    assert report.engine.identical, "a damaged drafter costs steps, never tokens"
    error = report.comparison.error
    drafts = [sum(step.proposed > 0 for step in decode(damaged, p.token_ids, greedy(TOKENS)).steps) for p in PROMPTS]
    assert error.num_blocks == sum(math.ceil(count / BLOCKS_APART) for count in drafts)
    assert [layer.v for layer in error.layers] == pytest.approx([0, 1, 0], abs=1e-6)
    assert [layer.k for layer in error.layers] == pytest.approx([0, 0, 0], abs=1e-6)
    first, *rest = (layer.output for layer in error.layers)
    assert first == pytest.approx(0, abs=1e-6)
    assert all(output > 0.01 for output in [*rest, error.hidden])


def test_prompts_are_checked_before_the_first_is_decoded(pair: Pair, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text('{"token_ids": [1]}\n{"token_ids": [99]}\n')
    with pytest.raises(RequestError, match=r"2: prompt: expected token ids from 0 to 4, found 99"):
        Verification(pair.plain).tokenize(read_prompts(tmp_path / "p.jsonl"), TOKENS)


def test_a_prompt_without_a_verify_pass_has_no_tau(pair: Pair) -> None:
    first = generate(pair.plain, [1, 2], 1).token_ids[0]
    stop = frozenset([first])
    stopped, reference = (
        Session(pair.plain.manifest, pair.loaded, session.drafter, None, stop) for session in (pair.plain, pair.again)
    )
    report = Verification(stopped, reference).run([TokenPrompt(name="short", token_ids=[1, 2])], TOKENS)
    assert report.engine.identical
    assert (report.engine.tau, report.engine.prompts[0].tau) == (None, None)
    assert (report.comparison.tau_loss, report.comparison.error) == (None, None)
    failure = find_failure(report, 0.5)
    assert failure.message == "tau: not measured, no verify pass had a draft"


def with_loss(report: VerificationReport, loss: TauLoss) -> VerificationReport:
    comparison = msgspec.structs.replace(report.comparison, tau_loss=loss)
    return msgspec.structs.replace(report, comparison=comparison)


def test_the_gate_is_on_the_mean(report: VerificationReport) -> None:
    tau = msgspec.structs.replace(report.engine, tau=1.25)
    report = with_loss(
        msgspec.structs.replace(report, engine=tau), TauLoss(loss=0.03, low=0.01, high=0.05, num_prompts=32)
    )
    assert find_failure(report, None) is None
    assert find_failure(report, 0.03) is None
    failure = find_failure(report, 0.0299)
    assert failure.message == ("tau loss: expected at most 2.99%, found a mean of 3.00% (1.00% to 5.00%)")
    alone = find_failure(with_loss(report, TauLoss(loss=0.5, low=None, high=None, num_prompts=1)), 0.1)
    assert alone.message.endswith("found a mean of 50.00%")


def test_the_first_differing_prompt_is_named(report: VerificationReport) -> None:
    def differing(name: str, expected: int | None) -> PromptResult:
        difference = Difference(position=7, expected=expected, found=2)
        return msgspec.structs.replace(report.engine.prompts[0], name=name, first_difference=difference)

    prompts = [report.engine.prompts[0], differing("here", 3), differing("there", None)]
    engine = msgspec.structs.replace(report.engine, prompts=prompts, identical=False)
    failure = find_failure(msgspec.structs.replace(report, engine=engine), None)
    assert failure.message == (
        "engine: 2 of 3 prompts differ from greedy decoding without speculation; the first is"
        " 'here', output token 7: expected 3, found 2"
    )
    # Decoding with the reference must be lossless too, or its tau is that of another text.
    failure = find_failure(msgspec.structs.replace(report, reference=engine), None)
    assert failure.message.startswith("reference: 2 of 3 prompts differ")


def test_a_reference_of_another_draft_or_a_quantised_one_is_refused(pair: Pair) -> None:
    manifest = pair.plain.manifest
    check_reference(manifest, manifest, "ref")
    dense = msgspec.structs.replace(manifest.draft, model_type="qwen3")  # the form that quantize writes
    check_reference(manifest, msgspec.structs.replace(manifest, draft=dense), "ref")
    draft = msgspec.structs.replace(manifest.draft, block_size=9)
    target = msgspec.structs.replace(manifest.target, vocab_size=7)
    quantised = Quantization(modules={"layers.0.mlp.up_proj": "NVFP4"}, fp8_kv_cache=False)
    cache = Quantization(modules={}, fp8_kv_cache=True)
    cases = {
        "reference ref is an engine of another draft: block_size: expected 6, found 9": {"draft": draft},
        "engine of another target: vocab_size: expected 5, found 7": {"target": target},
        "expected an unquantised engine, found NVFP4 in layers.0.mlp.up_proj": {"quantization": quantised},
        "found an FP8 context cache": {"quantization": cache},
    }
    for words, facts in cases.items():
        with pytest.raises(EngineError, match=words):
            check_reference(manifest, msgspec.structs.replace(manifest, **facts), "ref")


def test_answers_are_replayed_by_drafts_of_two_kinds(pair: Pair) -> None:
    """One of the same kind is a mistaken reference, and so is one that reads other taps."""
    manifest = pair.plain.manifest

    def other(**facts: object) -> Manifest:
        return msgspec.structs.replace(manifest, draft=msgspec.structs.replace(manifest.draft, **facts))

    conv = BlockConv(kernel_size=2, group_size=8)
    check_reference(manifest, other(block_conv=conv), "ref", is_replayed=True)
    cases = (
        (False, {"block_conv": conv}, "another draft: block_conv: expected None"),
        (True, {"rms_norm_eps": 0.5}, "another draft: rms_norm_eps"),
        (True, {"block_conv": conv, "block_size": 9}, "another draft: num_draft_tokens: expected 5, found 8"),
        (True, {"block_conv": conv, "target_layer_ids": (0,)}, "another draft: target_layer_ids"),
    )
    for is_replayed, facts, words in cases:
        with pytest.raises(EngineError, match=words):
            check_reference(manifest, other(**facts), "ref", is_replayed=is_replayed)


def test_layers_of_another_draft_are_named(pair: Pair) -> None:
    """Only the layers that differ are named, and in what they differ, without Python's spelling of them."""
    manifest = pair.plain.manifest

    def difference(**facts: object) -> str:
        draft = msgspec.structs.replace(manifest.draft, **facts)
        with pytest.raises(EngineError) as refused:
            check_reference(manifest, msgspec.structs.replace(manifest, draft=draft), "ref")
        return refused.value.message.removeprefix("reference ref is an engine of another draft: ")

    layers = manifest.draft.layers
    first, last = layers[0], len(layers) - 1
    causal = not first.causal
    changed = msgspec.structs.replace(first, causal=causal, sliding_window=77)
    words = f"layers 0: sliding_window: expected {first.sliding_window}, found 77; causal: expected {not causal}, found"
    assert difference(layers=(changed, *layers[1:])).startswith(words)
    sinks = tuple(msgspec.structs.replace(layer, sinks=not layer.sinks) for layer in layers)
    listed = ", ".join(map(str, range(last + 1)))
    assert difference(layers=sinks) == f"layers {listed}: sinks: expected {first.sinks}, found {not first.sinks}"
    assert difference(layers=layers[:1] * (last + 2)) == f"number of layers: expected {last + 1}, found {last + 2}"
    assert difference(rope=Rope(theta=7.0, scaling=None)).startswith("rope.theta: expected ")
