# SPDX-License-Identifier: Apache-2.0
"""Ranks decode like one, and end together: real processes, gloo, sharded fixtures."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.ranks.join import join
from dflash_trt.runtime.ranks.parallel_runner import rank_facts
from dflash_trt.runtime.ranks.roles import LINGER_SECONDS, Follower, Leader
from dflash_trt.runtime.targets.huggingface import load_model, make_target
from dflash_trt.runtime.targets.runnable import sharding
from dflash_trt.runtime.targets.target import Segment
from tests.engines import trained_engine
from tests.paths import FIXTURES
from tests.runtime.ranks.forks import Forks, forks

NUM_SLOTS = 4
PROMPTS = {0: range(40, 130), 1: range(300, 307), 3: range(200, 233)}
"""Longer than the sliding window, shorter than a block, between the two; slot 2 stays empty."""


def load_pairs(engine: Path, target: Path, ranks: Leader | Follower) -> tuple[list[ModelRunner], float]:
    """This rank's pair, and the same target without a drafter; which share of the target's weights it holds."""
    manifest = read_manifest(engine)
    checkpoint = read_target(target)
    ranks.verify_same_facts(rank_facts(engine, checkpoint))
    taps = manifest.draft.target_layer_ids
    options = {"distributed_config": sharding(target, ranks.size)} if ranks.size > 1 else {}
    model = load_model(target, checkpoint.spec, taps, **options)
    shared = make_target(model, taps, NUM_SLOTS, accelerate)
    pairs = [ModelRunner(shared, open_drafter(engine, manifest, num_slots=NUM_SLOTS)), ModelRunner(shared, None)]
    return pairs, _share(model)


def run_script(pair: ModelRunner, plain: ModelRunner) -> dict[str, torch.Tensor]:
    """Every answer of the pairs, by name."""
    answers: dict[str, torch.Tensor] = {}
    last = _prefill(pair, answers)
    for step in range(3):
        slots = sorted(last)
        proposals = [drafted.token_ids for drafted in pair.draft(slots, [last[slot] for slot in slots], 7)]
        answers[f"proposals {step}"] = torch.tensor(proposals)
        drafts = dict(zip(slots, proposals, strict=True))
        # Each slot verifies another number of proposals, and commits another number of tokens.
        lengths = {slot: (slot + step) % 4 + 1 for slot in slots}
        segments = [segment(slot, [last[slot], *drafts[slot][: lengths[slot]]]) for slot in slots]
        logits = answers[f"logits {step}"] = pair.verify(segments).clone()
        kept = [1 + (slot + 2 * step) % lengths[slot] for slot in slots]
        pair.commit(kept)
        begin = 0
        for slot, count in zip(slots, kept, strict=True):
            last[slot] = int(logits[begin + count - 1].argmax())
            begin += lengths[slot] + 1
    _use_a_slot_again(pair, plain, answers)
    return answers


def _share(model: nn.Module) -> float:
    here = sum((p.to_local() if isinstance(p, DTensor) else p).numel() for p in model.parameters())
    return here / sum(p.numel() for p in model.parameters())


def segment(slot: int, token_ids: Sequence[int], num_logits: int | None = None) -> Segment:
    """A segment that by default asks for all logits."""
    return Segment(slot=slot, token_ids=token_ids, num_logits=len(token_ids) if num_logits is None else num_logits)


def _prefill(pair: ModelRunner, answers: dict[str, torch.Tensor]) -> dict[int, int]:
    """Slot 0 in two chunks, the others beside its second; the token behind each prompt."""
    first, second = PROMPTS[0][:64], PROMPTS[0][64:]
    answers["no logits"] = pair.verify([segment(0, first, 0)]).clone()
    pair.commit([len(first)])
    parts = {0: second, 1: PROMPTS[1], 3: PROMPTS[3]}
    logits = answers["prefill"] = pair.verify([segment(slot, part, 1) for slot, part in parts.items()]).clone()
    pair.commit([len(part) for part in parts.values()])
    return dict(zip(parts, logits.argmax(dim=-1).tolist(), strict=True))


def _use_a_slot_again(pair: ModelRunner, plain: ModelRunner, answers: dict[str, torch.Tensor]) -> None:
    pair.release(3)
    answers["slot 3 again"] = pair.verify([segment(3, range(500, 520), 1)]).clone()
    pair.commit([20])
    answers["proposals again"] = torch.tensor(pair.draft([3], [7], 7)[0].token_ids)
    for slot in PROMPTS:
        pair.release(slot)
    answers["plain"] = plain.verify([segment(1, PROMPTS[1])]).clone()
    plain.commit([len(PROMPTS[1])])
    plain.release(1)
    _share_a_page(pair, answers)


def _share_a_page(pair: ModelRunner, answers: dict[str, torch.Tensor]) -> None:
    """Slot 1 begins with the page that slot 2 has filled, in both caches."""
    prompt = range(600, 640)
    pair.reserve(2, [9, 4], 0)
    answers["filled"] = pair.verify([segment(2, prompt, 1)]).clone()
    pair.commit([len(prompt)])
    pair.catch_up()
    assert pair.num_written(2) == len(prompt)
    pair.release(2)
    pair.reserve(1, [9, 7], 32)
    answers["found"] = pair.verify([segment(1, prompt[32:], 1)]).clone()
    pair.commit([len(prompt) - 32])
    torch.testing.assert_close(answers["found"], answers["filled"], rtol=0, atol=1e-4)
    answers["proposals found"] = torch.tensor(pair.draft([1], [7], 5)[0].token_ids)
    pair.release(1)


SECONDS = 8
"""How long the end of a rank may take to end the others: the longest wait is a second, the rest is a slow machine."""
KILLED = "error: rank 1: its process ended unexpectedly\n"


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    with forks(tmp_path_factory.mktemp("ranks")) as started:
        yield started


@pytest.mark.parametrize(
    ("name", "num_ranks"),
    [
        ("tiny-qwen3", 2),
        pytest.param("tiny-qwen3", 4, marks=pytest.mark.full),
        pytest.param("tiny-gpt-oss", 8, marks=pytest.mark.full),
    ],
)
def test_ranks_decode_like_one(ranks: Forks, name: str, num_ranks: int, tmp_path: Path) -> None:
    engine, output = trained_engine(name), tmp_path / "answers.pt"
    outcome = ranks.run(num_ranks, "decode", engine, FIXTURES / name, output)
    assert outcome.codes == [0] * num_ranks, outcome.stderr
    assert outcome.stdout == [""] * num_ranks
    said = {line for text in outcome.stderr[1:] for line in text.splitlines()}
    assert all("its experts stay with transformers' products" in line for line in said)
    assert not said or num_ranks == 8, "experts of tiny-gpt-oss are too narrow an eighth"

    with join(1) as alone:
        pairs, _ = load_pairs(engine, FIXTURES / name, alone)
        one, many = run_script(*pairs), torch.load(output)
    # Each holds its share of the weights; what is whole on every rank are norms, routers and row-wise biases.
    assert many.pop("share") < 1.02 / num_ranks
    assert many.keys() == one.keys()
    for answer, expected in one.items():
        if answer.startswith("proposals"):
            assert torch.equal(many[answer], expected), answer
        else:
            torch.testing.assert_close(many[answer], expected, rtol=0, atol=1e-4, msg=answer)
            assert torch.equal(many[answer].argmax(dim=-1), expected.argmax(dim=-1)), answer


def test_a_target_that_cannot_be_sharded_is_named_once(ranks: Forks, tmp_path: Path) -> None:
    outcome = ranks.run(3, "decode", trained_engine("tiny-qwen3"), FIXTURES / "tiny-qwen3", tmp_path / "answers.pt")
    assert outcome.codes == [1, 1, 1]
    assert "num_attention_heads: expected a multiple of the number of ranks, 3, found 8" in outcome.stderr[0]
    assert outcome.stderr[1:] == ["", ""]


def test_the_odd_rank_is_named(ranks: Forks) -> None:
    outcome = ranks.run(2, "odd")
    assert outcome.codes == [1, 1]
    assert outcome.stderr == ["error: rank 1: target: expected T as on rank 0, found another\n", ""]


@pytest.mark.parametrize("role", [("lose", "kill"), pytest.param(("idle",), marks=pytest.mark.full)])
def test_a_killed_rank_ends_the_others(ranks: Forks, role: tuple[str, ...]) -> None:
    outcome = ranks.run(4, *role)
    assert outcome.codes == [1, -9, 1, 1]
    assert outcome.stderr == [KILLED, "", "", ""]
    assert outcome.seconds < SECONDS


@pytest.mark.parametrize(
    ("how", "message"),
    [
        pytest.param("raise", "expected something else, found this", marks=pytest.mark.full),
        ("bug", "KeyError: 'a bug'"),
        pytest.param("early", "found this early", marks=pytest.mark.full),
    ],
)
def test_the_error_of_another_rank_is_told_by_rank_0(ranks: Forks, how: str, message: str) -> None:
    """An error is one line, a bug a traceback."""
    outcome = ranks.run(3, "lose", how)
    assert outcome.codes == [1, 1, 1]
    assert outcome.stderr[0].startswith("error: rank 1: Traceback" if how == "bug" else "error: rank 1: ")
    assert f"{message}\n" in outcome.stderr[0]
    assert how == "bug" or outcome.stderr[0].count("\n") == 1
    assert outcome.stderr[1:] == ["", ""]
    assert LINGER_SECONDS < outcome.seconds < SECONDS


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [
        pytest.param("raise", 1, "error: expected something else, found this\n", marks=pytest.mark.full),
        pytest.param("bug", 70, "KeyError: 'a bug'\n", marks=pytest.mark.full),
        ("kill", -9, ""),
    ],
)
def test_the_end_of_rank_0_ends_the_others(ranks: Forks, how: str, code: int, message: str) -> None:
    outcome = ranks.run(3, "fail", how)
    assert outcome.codes == [code, 1, 1]
    assert outcome.stderr[0].endswith(message)
    assert outcome.stderr[1:] == ["", ""]
    assert LINGER_SECONDS < outcome.seconds < SECONDS, "a launcher that sees another rank end first kills rank 0"


def test_ctrl_c_ends_all(ranks: Forks) -> None:
    outcome = ranks.run(3, "lose", "interrupt")
    assert outcome.codes == [1, 1, 1]
    assert outcome.stderr == ["Aborted!\n", "", ""]
    assert outcome.seconds < SECONDS


def test_facts_tell_engines_and_targets_apart(tmp_path: Path) -> None:
    engine, target = tmp_path / "engine", tmp_path / "target"
    engine.mkdir()
    shutil.copy(trained_engine("tiny-qwen3") / "manifest.json", engine)
    shutil.copytree(FIXTURES / "tiny-qwen3", target)
    facts = rank_facts(engine, read_target(target))
    assert facts == rank_facts(engine, read_target(FIXTURES / "tiny-qwen3")), "where they lie does not matter"
    for file in (engine / "manifest.json", target / "config.json"):
        file.write_text(file.read_text() + "\n")
        changed = rank_facts(engine, read_target(target))
        (name,) = (name for name in facts if facts[name] != changed[name])
        assert file.name in name
        facts = changed
    other = read_target(target)
    other.weights.popitem()
    changed = rank_facts(engine, other)
    assert [name for name in facts if facts[name] != changed[name]] == [
        "sha256 of the target's tensor names and shapes"
    ]
