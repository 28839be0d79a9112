# SPDX-License-Identifier: Apache-2.0
"""Each family of targets from its checkpoint to its tokens, against transformers' own hidden states and generate."""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.draft_length import FixedLength
from dflash_trt.runtime.drafter.proposals import Draw, Proposals
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.model_runner import LocalRunner
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets.packed_target import PackedTarget
from dflash_trt.runtime.targets.target import Segment
from tests.decoding import open_without_tokenizer
from tests.engines import build
from tests.oracle.random_pairs import VOCAB_SIZE
from tests.oracle.transformers_dflash import plain_greedy
from tests.paths import REPOSITORY
from tests.reference.synthetic import write_random_draft
from tests.runtime.batches import MASK, Job, Workload, drive
from tests.runtime.targets.families import WINDOW
from tests.runtime.targets.family_checkpoints import FAMILIES, SEQUENTIAL, SIZES, write_family

NUM_SLOTS = 8
QUICK = ("llama", "qwen3-moe", "qwen3.5", "gemma4", "kimi-k2.5")
"""Windows, experts, recurrent state, latent attention and wrappers: the others are these again (make test-full)."""


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
    check_taps(session, oracle)
    workload = Workload(
        session=session, oracle=oracle, jobs=jobs(oracle, lengths=(WINDOW - 1, WINDOW + 5), max_tokens=8)
    )
    check_plain(workload)
    check_drafted(workload, seed=0, at_once=True)


@pytest.mark.full
@pytest.mark.parametrize("name", FAMILIES)
def test_requests_of_a_family_that_come_at_any_time(name: str, engine: Path, tmp_path: Path) -> None:
    oracle = write_family(tmp_path, name)
    session = open_without_tokenizer(engine, tmp_path, num_slots=NUM_SLOTS)
    lengths = (1, 2, 3, 5, 7, 8, 13, 21, 34, 50, 90, 17)
    workload = Workload(session=session, oracle=oracle, jobs=jobs(oracle, lengths=lengths, max_tokens=20))
    check_drafted(workload, seed=1, at_once=False)


@pytest.mark.full
@pytest.mark.parametrize("name", ["qwen3-next", "qwen3.5-moe", "gemma4", "kimi-k2.5"])
def test_a_family_on_two_ranks(name: str, tmp_path: Path) -> None:
    """Heads, experts and delta nets of one model on two processes, as transformers' plans divide them."""
    write_family(tmp_path, name)
    ranks = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*ranks, "-m", "tests.runtime.targets.sharded_family", str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.splitlines()[-1]) < 1e-4


def check_taps(session: Session, oracle: PreTrainedModel) -> None:
    """The residual stream after each tapped layer, of a prompt in two ragged passes beside another."""
    target = session.target
    prompts = {2: [3, 1, 0, 3, 3, 1, 1, 3, 0, 1, 1, 3, 3], 0: [1, 3, 3, 0]}
    first = target.verify(
        [Segment(slot=s, token_ids=ids[:3], num_logits=3) for s, ids in prompts.items()], with_taps=True
    )
    for slot in prompts:
        target.rollback(slot, 1)
    rest = target.verify(
        [Segment(slot=s, token_ids=ids[2:], num_logits=1) for s, ids in prompts.items()], with_taps=True
    )
    for slot in prompts:
        target.release(slot)
    for i, ids in enumerate(prompts.values()):
        with torch.inference_mode():
            output = oracle(torch.tensor([ids]), output_hidden_states=True)
        expected = torch.cat(
            [output.hidden_states[layer + 1][0] for layer in session.manifest.draft.target_layer_ids], dim=-1
        )
        begin = 0 if i == 0 else len(prompts[2]) - 2
        found = torch.cat([first.taps[3 * i : 3 * i + 2], rest.taps[begin : begin + len(ids) - 2]])
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        torch.testing.assert_close(rest.logits[i], output.logits[0, -1], rtol=1e-4, atol=1e-3)


def jobs(oracle: PreTrainedModel, lengths: Sequence[int], max_tokens: int) -> list[Job]:
    rng = random.Random(0)
    prompts = [[rng.randrange(MASK) for _ in range(length)] for length in lengths]
    return [
        Job(prompt_ids=ids, max_tokens=max_tokens, expected=plain_greedy(oracle, ids, max_tokens, ()))
        for ids in prompts
    ]


def check_plain(workload: Workload) -> None:
    job = workload.jobs[-1]
    assert workload.alone(job, 0).token_ids == job.expected


class PartlyRight(LocalRunner):
    """Proposes a random number of tokens of the answer, a wrong one, and then what the drafter does."""

    def __init__(self, workload: Workload, rng: random.Random) -> None:
        super().__init__(workload.session.target, workload.session.drafter)
        self._rng = rng
        self.requests = [workload.request(job) for job in workload.jobs]
        self._answers = {id(r): job.expected for r, job in zip(self.requests, workload.jobs, strict=True)}
        slots, length = SlotPool(NUM_SLOTS, 10**6), FixedLength(workload.num_draft_tokens)
        self.decoder = Decoder(self, slots, length, prefill_chunk=7)

    def draft(
        self, slots: Sequence[int], anchors: Sequence[int], num_tokens: int, draws: Sequence[Draw | None] = ()
    ) -> list[Proposals]:
        proposals = super().draft(slots, anchors, num_tokens)
        for (row, *_), slot in zip(proposals, slots, strict=True):
            request = self.decoder.running[slot]
            rest = self._answers[id(request)][len(request.token_ids) :]
            count = min(len(rest), self._rng.randint(0, len(row)))
            row[:count] = rest[:count]
            if count < min(len(row), len(rest)):
                row[count] = (rest[count] + 1) % VOCAB_SIZE
        return proposals


def check_drafted(workload: Workload, seed: int, *, at_once: bool) -> None:
    rng = random.Random(seed)
    pair = PartlyRight(workload, rng)
    drive(pair.decoder, pair.requests, None if at_once else rng)
    assert [request.token_ids for request in pair.requests] == [job.expected for job in workload.jobs]
    steps = [step for request in pair.requests for step in request.steps]
    assert any(0 < step.accepted < step.proposed for step in steps), "no block was accepted in part"
