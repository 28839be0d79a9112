# SPDX-License-Identifier: Apache-2.0
"""Each family of targets against transformers' own hidden states and generate; in BF16, packed passes to the bit."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.ranks.sharding import sharding
from dflash_trt.runtime.session import run
from dflash_trt.runtime.targets.huggingface import load_model, make_target
from dflash_trt.runtime.targets.packed_target import PackedTarget, agrees
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from dflash_trt.runtime.targets.target import Segment, Verified
from tests.decoding import greedy, open_trained, open_without_tokenizer
from tests.engines import build
from tests.fixtures_data import PAIRS, prompts
from tests.paths import FIXTURES, REPOSITORY
from tests.reference.synthetic import write_random_draft
from tests.runtime.targets.families import (
    FAMILIES,
    NUM_SLOTS,
    SEQUENTIAL,
    SIZES,
    TAPS,
    computed,
    random_history,
    relative_error,
    write_family,
)
from tests.runtime.targets.test_causal_models import check_decoding, check_history

needs_bf16 = pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="needs a CPU for which oneDNN has BF16 products"
)
FIRST_TAPS = (0, 1)
VOCAB = 1024
Token = tuple[torch.Tensor, torch.Tensor]
"""Logits [V] and taps [A*H]."""


def open_target(name: str, num_slots: int, dtype: str = "bfloat16") -> HuggingFaceTarget:
    directory = FIXTURES / name
    return make_target(
        load_model(directory, read_target(directory).spec, FIRST_TAPS, dtype=dtype), FIRST_TAPS, num_slots, accelerate
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


HISTORIES = [
    *((name, (70, 30), "bfloat16") for name in PAIRS),  # beyond gpt-oss's sliding window of 64
    ("tiny-qwen3", (70, 30), "float32"),  # without a router, which MKL computes
    *(pytest.param(name, (1324, 662, 512, 60), "bfloat16", marks=pytest.mark.full) for name in PAIRS),
]


@needs_bf16
@pytest.mark.parametrize(("name", "lengths", "dtype"), HISTORIES)
def test_any_history(name: str, lengths: Sequence[int], dtype: str) -> None:
    rng = random.Random(name)
    sequences = [[rng.randrange(2, VOCAB) for _ in range(length)] for length in lengths]
    single, packed = open_target(name, 1, dtype), open_target(name, len(lengths), dtype)
    assert single.is_batch_invariant == (dtype == "bfloat16"), "asked in BF16"
    for found, tokens in zip(together(packed, sequences, rng), sequences, strict=True):
        for (logits, taps), (expected_logits, expected_taps) in zip(found, alone(single, tokens), strict=True):
            assert torch.equal(logits, expected_logits)
            assert torch.equal(taps, expected_taps)


@needs_bf16
@pytest.mark.parametrize(("count", "tokens"), [(3, 20), pytest.param(32, 96, marks=pytest.mark.full)])
@pytest.mark.parametrize("name", PAIRS)
def test_drafted_equals_plain(name: str, count: int, tokens: int) -> None:
    """Drafted, several at once, and plain, one at a time."""
    session = open_trained(name, max_batch_size=8, dtype="bfloat16")
    asked = [session.request(prompt, greedy(tokens)) for prompt in prompts(session)[:count]]
    for request, answer in zip(asked, run(session.decoder(), asked), strict=True):
        assert answer.token_ids == session.generate_plain(request.prompt_ids, greedy(tokens)).token_ids
        assert answer.tau > 1.5  # the drafter draws on BF16 taps


@needs_bf16
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


def main(directory: Path) -> None:
    """One of two ranks: prints how far sharded passes are from whole ones."""
    dist.init_process_group("gloo")
    spec = read_target(directory).spec
    turns = random_history(seed=3, num_turns=6, vocab_size=SIZES.vocab_size)
    whole = computed(make_target(load_model(directory, spec, TAPS), TAPS, NUM_SLOTS, accelerate), turns)
    model = load_model(directory, spec, TAPS, distributed_config=sharding(directory, dist.get_world_size()))
    error = relative_error(computed(make_target(model, TAPS, NUM_SLOTS, accelerate), turns), whole)
    if dist.get_rank() == 0:
        print(error)
    dist.destroy_process_group()


QUICK = ("qwen3.5", "gemma4", "kimi-k2.5")
"""Language models below images, as they are loaded; the causal models are compared with uncached passes."""


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One drafter for all families: random as it is, it fits none better than another."""
    path = tmp_path_factory.mktemp("families")
    build(write_random_draft(path / "draft", dialect="qwen3", sizes=SIZES), path / "engine")
    return path / "engine"


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in FAMILIES])
def test_a_family(name: str, engine: Path, tmp_path: Path) -> None:
    """Taps, tokens one by one, and tokens of ragged requests whose drafts are accepted and rejected."""
    oracle = write_family(tmp_path, name)
    session = open_without_tokenizer(engine, tmp_path, num_slots=NUM_SLOTS)
    assert isinstance(session.target, PackedTarget) is (name not in SEQUENTIAL)
    check_history(session.target, oracle, tolerance=2e-4)  # six layers round more than four
    check_decoding(session, oracle)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-moe", "gemma4", "kimi-k2.5"])
def test_a_family_on_two_ranks(name: str, tmp_path: Path) -> None:
    """Heads, experts and delta nets of one model on two processes, as transformers' plans divide them."""
    write_family(tmp_path, name)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*ranks, "-m", "tests.runtime.targets.test_families", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.splitlines()[-1]) < 1e-4


if __name__ == "__main__":
    main(Path(sys.argv[1]))
