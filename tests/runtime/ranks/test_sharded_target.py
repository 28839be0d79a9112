# SPDX-License-Identifier: Apache-2.0
"""Ranks decode like one, and end together: real processes, gloo, sharded fixtures."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.load import prepare_target
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.ranks.join import join
from dflash_trt.runtime.ranks.roles import LINGER_SECONDS, Follower, Leader
from dflash_trt.runtime.ranks.sharding import target_facts
from dflash_trt.runtime.targets.target import Segment
from tests.cli.commands import run
from tests.engines import trained_engine
from tests.paths import FIXTURES
from tests.runtime.measure.feature_samples import read
from tests.runtime.ranks.forks import Forks, Outcome, forks

NUM_SLOTS = 4
PROMPTS = {0: range(40, 130), 1: range(300, 307), 3: range(200, 233)}
"""Longer than the sliding window, shorter than a block, between the two; slot 2 stays empty."""


def load_pairs(engine: Path, target: Path, ranks: Leader | Follower) -> tuple[list[ModelRunner], float]:
    """Rank 0's pair, and the same target without a drafter; which share of the target's weights it holds."""
    manifest = read_manifest(engine)
    taps = manifest.draft.target_layer_ids
    shared = prepare_target(read_target(target), taps, NUM_SLOTS, ranks, dtype="auto", device="cpu")()
    pairs = [ModelRunner(shared, open_drafter(engine, manifest, num_slots=NUM_SLOTS)), ModelRunner(shared, None)]
    return pairs, _share(shared.model)


def run_script(pair: ModelRunner, plain: ModelRunner) -> dict[str, torch.Tensor]:
    """Every answer of the pairs, by name."""
    answers: dict[str, torch.Tensor] = {}
    last = _prefill(pair, answers)
    for step in range(3):
        slots = sorted(last)
        proposals = [drafted.token_ids for drafted in pair.draft(slots, [last[slot] for slot in slots], 7)()]
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
    """Slot 0 in two chunks, the others together with its second; the token after each prompt."""
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
    answers["proposals again"] = torch.tensor(pair.draft([3], [7], 7)()[0].token_ids)
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
    pair.release(2)
    pair.reserve(1, [9, 7], 32)
    answers["found"] = pair.verify([segment(1, prompt[32:], 1)]).clone()
    pair.commit([len(prompt) - 32])
    torch.testing.assert_close(answers["found"], answers["filled"], rtol=0, atol=1e-4)
    answers["proposals found"] = torch.tensor(pair.draft([1], [7], 5)()[0].token_ids)
    pair.release(1)


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
    is_narrow = num_ranks == 8  # too narrow are the experts of an eighth of tiny-gpt-oss
    assert ("its experts stay with transformers' products" in outcome.stderr[0]) == is_narrow
    assert outcome.stderr[1:] == [""] * (num_ranks - 1)

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


def captured(ranks: Forks, num_ranks: int, output: Path, *options: object, lost: int = -1, at: int = 0) -> Outcome:
    """`capture` of the answers in the fixture `features`; rank `lost` is killed at a call of its target."""
    pair = ("capture", FIXTURES / "tiny-qwen3-dflash", "--target", FIXTURES / "tiny-qwen3", "--tp", num_ranks)
    asked = ("--prompts", FIXTURES / "prompts.jsonl", "--max-prompts", 3, "--max-tokens", 40, "-o", output, *options)
    return ranks.run(num_ranks, "command", lost, at, *pair, *asked)


def test_ranks_capture_what_one_does(ranks: Forks, features: dict[str, Path], tmp_path: Path) -> None:
    """Rank 0 writes the file. Other than its tokens and tables, the taps are sums in another order."""
    outcome = captured(ranks, 2, tmp_path / "f")
    assert outcome.codes == [0, 0], outcome.stderr
    assert outcome.stdout == [f"{tmp_path / 'f'}\n", ""]
    assert "3 sequences, 120 answer tokens" in outcome.stderr[0]
    assert list(tmp_path.iterdir()) == [tmp_path / "f"]
    (one, _), (many, _) = read(features["tiny-qwen3"]), read(tmp_path / "f")
    assert many.keys() == one.keys()
    config = json.loads((FIXTURES / "tiny-qwen3" / "config.json").read_text())
    # A sum of k terms in FLOAT is off by about sqrt(k) * 2^-24 of its size; each layer adds two to the taps.
    rounding = 2 * config["num_hidden_layers"] * config["intermediate_size"] ** 0.5 * 2**-24
    for name, expected in one.items():
        atol = rounding * float(expected.abs().max()) if name.startswith("taps") else 0
        torch.testing.assert_close(many[name], expected, rtol=0, atol=atol, msg=name)


@pytest.mark.full
@pytest.mark.parametrize("lost", [0, 1])
def test_a_capture_goes_on_where_a_lost_rank_stopped_it(ranks: Forks, lost: int, tmp_path: Path) -> None:
    """To the same bytes; no rank outlives another, and one that is not rank 0 is named."""
    whole, output = tmp_path / "whole", tmp_path / "f"
    assert captured(ranks, 2, whole, "--max-batch-size", 1).codes == [0, 0]
    for at in (50, 140, 3):
        outcome = captured(ranks, 2, output, "--max-batch-size", 1, lost=lost, at=at)
        assert outcome.codes == [[-9, 1], [1, -9]][lost]
        assert outcome.stderr == ["" if lost == 0 else KILLED, ""]
        assert not output.exists()
    assert "written" in (tmp_path / "f.journal").read_text(), "the last but one was killed as it recorded"
    refused = captured(ranks, 4, output, "--max-batch-size", 1)
    assert "f.journal: expected a capture with these inputs and options, found others" in refused.stderr[0]
    assert captured(ranks, 2, output, "--max-batch-size", 1).codes == [0, 0]
    assert output.read_bytes() == whole.read_bytes()
    assert {path.name for path in tmp_path.iterdir()} == {"f", "whole"}


@pytest.mark.full
def test_ranks_verify_two_engines(ranks: Forks, tmp_path: Path) -> None:
    """Both drafters are rank 0's alone; the target's tokens and the steps are those of one process."""
    pair = (
        trained_engine("tiny-qwen3"),
        "--target",
        FIXTURES / "tiny-qwen3",
        "--reference",
        trained_engine("tiny-qwen3"),
    )
    prompts = "".join((FIXTURES / "prompts.jsonl").read_text().splitlines(keepends=True)[:2])
    (tmp_path / "prompts.jsonl").write_text(prompts)
    asked = ("verify", *pair, "--prompts", tmp_path / "prompts.jsonl", "--max-tokens", 24, "--json")
    many = ranks.run(2, "command", -1, 0, *asked, "--tp", 2)
    assert many.codes == [0, 0], many.stderr
    assert many.stdout[1] == ""
    assert "one of 2 ranks" in many.stderr[0]
    one = json.loads(run(*asked).stdout)
    document = json.loads(many.stdout[0])
    assert document["engine"] == one["engine"]
    assert document["reference"] == one["reference"]


@pytest.mark.full
def test_a_command_says_which_number_of_ranks_divides_the_heads(ranks: Forks, tmp_path: Path) -> None:
    outcome = captured(ranks, 3, tmp_path / "f")
    assert outcome.codes == [1, 1, 1]
    assert "num_attention_heads: expected a multiple of the number of ranks, 3, found 8" in outcome.stderr[0]
    assert "hint: start 2 ranks with --tp 2" in outcome.stderr[0]
    assert outcome.stderr[1:] == ["", ""]
    assert not list(tmp_path.iterdir())


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
    assert outcome.seconds > LINGER_SECONDS


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
    assert outcome.seconds > LINGER_SECONDS, "a launcher that sees another rank end first kills rank 0"


@pytest.mark.parametrize(
    ("how", "code", "message"),
    [("interrupt", 1, "Aborted!\n"), pytest.param("terminate", 143, "", marks=pytest.mark.full)],
)
def test_a_signal_to_all_ends_all(ranks: Forks, how: str, code: int, message: str) -> None:
    outcome = ranks.run(3, "lose", how)
    assert outcome.codes == [code, 1, 1]
    assert outcome.stderr == [message, "", ""]


def test_facts_tell_targets_apart(tmp_path: Path) -> None:
    target = shutil.copytree(FIXTURES / "tiny-qwen3", tmp_path / "target")
    facts = target_facts(read_target(target))
    assert facts == target_facts(read_target(FIXTURES / "tiny-qwen3")), "where they lie does not matter"
    config = target / "config.json"
    config.write_text(config.read_text() + "\n")
    other = read_target(target)
    other.weights.popitem()
    changed = target_facts(other)
    assert [name for name in facts if facts[name] != changed[name]] == [
        "sha256 of the target's config.json",
        "sha256 of the target's tensor names and shapes",
    ]
