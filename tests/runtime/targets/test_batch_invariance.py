# SPDX-License-Identifier: Apache-2.0
"""A token's numbers are those of decoding it alone, to the last bit, whatever else is in its pass: in BF16 of all."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.session import Session, open_session, run
from dflash_trt.runtime.targets.huggingface import load_model, make_target
from dflash_trt.runtime.targets.packed_target import agrees
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from dflash_trt.runtime.targets.target import Segment, Verified
from tests.decoding import greedy
from tests.engines import build
from tests.fixtures_data import PAIRS, prompts
from tests.paths import FIXTURES

pytestmark = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a CPU for which oneDNN has BF16 products"
)
TAPS = (0, 1)
VOCAB = 1024
Token = tuple[torch.Tensor, torch.Tensor]
"""Logits [V] and taps [A*H]."""


def open_target(name: str, num_slots: int, dtype: str = "bfloat16") -> HuggingFaceTarget:
    directory = FIXTURES / name
    return make_target(
        load_model(directory, read_target(directory).spec, TAPS, dtype=dtype), TAPS, num_slots, accelerate
    )


def append(target: HuggingFaceTarget, segments: Sequence[Segment], rejected: Sequence[int]) -> list[Token]:
    verified = target.verify(segments, with_taps=True)
    for segment, count in zip(segments, rejected, strict=True):
        target.rollback(segment.slot, count)
    return list(zip(verified.logits, verified.taps, strict=True))


def alone(target: HuggingFaceTarget, tokens: Sequence[int]) -> list[Token]:
    """Logits of each token, one a pass."""
    found = [append(target, [Segment(slot=0, token_ids=[x], num_logits=1)], [0])[0] for x in tokens]
    target.release(0)
    return found


def together(target: HuggingFaceTarget, sequences: Sequence[Sequence[int]], rng: random.Random) -> list[list[Token]]:
    """Logits of each token in random passes: slots, numbers of tokens and rejections vary."""
    found: list[list[Token]] = [[] for _ in sequences]
    while live := [i for i, tokens in enumerate(sequences) if len(found[i]) < len(tokens)]:
        segments, rejected = [], []
        for i in rng.sample(live, rng.randint(1, len(live))):
            begin = len(found[i])
            kept, junk = sequences[i][begin : begin + rng.choice([1, 2, 8, 16, 100])], [7] * rng.choice([0, 3])
            segments.append(Segment(slot=i, token_ids=[*kept, *junk], num_logits=len(kept) + len(junk)))
            rejected.append(len(junk))
        rows = iter(append(target, segments, rejected))
        for segment, junk_rows in zip(segments, rejected, strict=True):
            segment_rows = [next(rows) for _ in segment.token_ids]
            found[segment.slot] += segment_rows[: len(segment_rows) - junk_rows]
    return found


def check_histories(name: str, lengths: Sequence[int], dtype: str = "bfloat16") -> None:
    rng = random.Random(name)
    sequences = [[rng.randrange(2, VOCAB) for _ in range(length)] for length in lengths]
    single, packed = open_target(name, 1, dtype), open_target(name, len(lengths), dtype)
    assert single.is_batch_invariant == (dtype == "bfloat16"), "asked in BF16"
    for found, tokens in zip(together(packed, sequences, rng), sequences, strict=True):
        for (logits, taps), (expected_logits, expected_taps) in zip(found, alone(single, tokens), strict=True):
            assert torch.equal(logits, expected_logits)
            assert torch.equal(taps, expected_taps)


@pytest.mark.parametrize("name", PAIRS)
def test_any_history(name: str) -> None:
    """Beyond gpt-oss's sliding window of 64."""
    check_histories(name, (70, 30))


def test_any_history_in_fp32() -> None:
    """Without a router, which MKL computes."""
    check_histories("tiny-qwen3", (70, 30), "float32")


@pytest.mark.full
@pytest.mark.parametrize("name", PAIRS)
def test_long_histories(name: str) -> None:
    check_histories(name, (1324, 662, 512, 60))


def open_pair(name: str, place: Path) -> Session:
    build(FIXTURES / f"{name}-dflash", place / "engine", FIXTURES / name)
    return open_session(place / "engine", str(FIXTURES / name), RuntimeOptions(max_batch_size=8, dtype="bfloat16"))


def check_lossless(session: Session, count: int, tokens: int) -> None:
    """Drafted, several at once, and plain, one at a time."""
    asked = [session.request(prompt, greedy(tokens)) for prompt in prompts(session)[:count]]
    for request, answer in zip(asked, run(session.decoder(), asked), strict=True):
        assert answer.token_ids == session.generate_plain(request.prompt_ids, greedy(tokens)).token_ids
        assert answer.tau is not None
        assert answer.tau > 1.5  # the drafter draws on BF16 taps


@pytest.mark.parametrize("name", PAIRS)
def test_drafted_equals_plain(name: str, tmp_path: Path) -> None:
    check_lossless(open_pair(name, tmp_path), 3, 20)


@pytest.mark.full
@pytest.mark.parametrize("name", PAIRS)
def test_drafted_equals_plain_on_all_prompts(name: str, tmp_path: Path) -> None:
    check_lossless(open_pair(name, tmp_path), 32, 96)


def test_a_target_whose_blocks_round_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    target = open_target("tiny-qwen3", 1)
    assert agrees(target)
    ours: Callable[..., Verified] = target.verify

    def otherwise(segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        verified = ours(segments, with_taps=with_taps)
        factor = 1 + 2**-8 * (len(segments[0].token_ids) > 1)
        return Verified(logits=verified.logits * factor, tapped=verified.tapped)

    monkeypatch.setattr(target, "verify", otherwise)
    assert not agrees(target)
