# SPDX-License-Identifier: Apache-2.0
"""Many requests that arrive at random, and what each must come to."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from dflash_trt.api.acceptance import Step
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.engine.proposals import Draw, Proposals
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.policy.draft_length import DraftLength, FixedLength
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets.huggingface import load_model
from dflash_trt.runtime.targets.packed_target import PackedTarget
from dflash_trt.runtime.targets.sequential_target import SequentialTarget
from tests.decoding import greedy, open_trained, open_without_tokenizer
from tests.engines import build
from tests.fixtures_data import prompts
from tests.oracle.random_pairs import VOCAB_SIZE, write_random_pair
from tests.oracle.transformers_dflash import load_target, plain_greedy
from tests.paths import FIXTURES
from tests.reference.synthetic import Dialect

NUM_SLOTS = 8
NUM_JOBS = 32
MAX_NEW_TOKENS = 16
MASK = VOCAB_SIZE - 1
PATIENCE = 5000
"""Steps after which a decoder that is not idle is stuck."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A request, and the tokens of plain greedy decoding by transformers, alone and with its own caches."""

    prompt_ids: list[int]
    max_tokens: int
    expected: list[int]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A pair, and jobs for it."""

    session: Session
    oracle: PreTrainedModel
    """The target again, with transformers' own attention."""
    jobs: list[Job]

    @property
    def num_draft_tokens(self) -> int:
        return self.session.manifest.draft.num_draft_tokens

    def decoder(
        self, length: DraftLength | int, *, num_tokens: int = 10**6, num_slots: int = NUM_SLOTS,
        prefill_chunk: int = 64, runner: ModelRunner | None = None,
    ) -> Decoder:  # fmt: skip
        policy = FixedLength(length) if isinstance(length, int) else length
        runner = runner or ModelRunner(self.session.target, self.session.drafter)
        return Decoder(runner, SlotPool(num_slots, num_tokens), policy, prefill_chunk=prefill_chunk)

    def request(self, job: Job, params: SamplingParams | None = None) -> Request:
        return self.session.request(job.prompt_ids, params or greedy(job.max_tokens))

    def alone(self, job: Job, length: int, params: SamplingParams | None = None) -> Request:
        """The job decoded with nothing beside it."""
        request = self.request(job, params)
        drive(self.decoder(length, prefill_chunk=10**6), [request])
        return request


def random_workload(path: Path, dialect: Dialect, seed: int, *, packed: bool = True) -> Workload:
    """On a random pair, whose proposals are sometimes right; with transformers' own caches where not `packed`."""
    target, draft = write_random_pair(path, dialect=dialect, seed=seed)
    build(draft, path / "engine", target)
    session = open_without_tokenizer(path / "engine", target, num_slots=NUM_SLOTS)
    assert isinstance(session.target, PackedTarget)
    if not packed:
        taps = session.manifest.draft.target_layer_ids
        session.target = SequentialTarget(load_model(target, read_target(target).spec, taps), taps, NUM_SLOTS)
    rng = random.Random(seed)
    texts = [[rng.randrange(MASK) for _ in range(length)] for length in (1, 2, 3, 5, 6, 7, 8, 13, 14, 21, 34, 50)]
    oracle = load_target(target)
    return Workload(session=session, oracle=oracle, jobs=_jobs(oracle, texts, rng))


def fixture_workload(name: str) -> Workload:
    """On a trained pair, whose proposals are mostly right; its prompts are longer than the target's window."""
    session = open_trained(name, max_batch_size=NUM_SLOTS)
    rng = random.Random(0)
    texts = [text[: rng.randint(1, len(text))] for text in prompts(session)[:8]]
    texts += [a + b + c for a, b, c in [prompts(session)[8:11], prompts(session)[11:14]]]
    oracle = load_target(FIXTURES / name)
    return Workload(session=session, oracle=oracle, jobs=_jobs(oracle, texts, rng))


def _jobs(oracle: PreTrainedModel, texts: Sequence[list[int]], rng: random.Random) -> list[Job]:
    answers = [plain_greedy(oracle, text, MAX_NEW_TOKENS, ()) for text in texts]
    picked = [*range(len(texts)), *(rng.randrange(len(texts)) for _ in range(NUM_JOBS - len(texts)))]
    lengths = [rng.choice((1, 2, 3, rng.randint(4, MAX_NEW_TOKENS), MAX_NEW_TOKENS)) for _ in picked]
    return [
        Job(prompt_ids=texts[i], max_tokens=length, expected=answers[i][:length])
        for i, length in zip(picked, lengths, strict=True)
    ]


def drive(
    decoder: Decoder,
    requests: Sequence[Request],
    rng: random.Random | None = None,
    after_step: Callable[[], None] = lambda: None,
) -> None:
    """Steps until all have finished; with `rng` they arrive one by one, at random times."""
    pending = list(requests)
    for _ in range(PATIENCE):
        while pending and (rng is None or rng.random() < 0.5):
            decoder.add(pending.pop(0))
        if decoder.is_idle and not pending:
            break
        decoder.step()
        after_step()
    assert decoder.is_idle, "the decoder is stuck"
    assert not pending
    slots = decoder.slots
    assert (slots.free_slots, slots.free_tokens) == (slots.num_slots, slots.num_tokens)


def check_shared_pages(session: Session, prompt: Sequence[int]) -> list[Step]:
    """One prompt of 70 tokens twice, the second time using the first one's prefix: the same tokens and steps."""
    decoder = session.decoder(prefix_caching=True)
    requests = [session.request(([*prompt] * 80)[:70], greedy(12)) for _ in range(2)]
    for request in requests:
        drive(decoder, [request])
    assert [request.num_cached_tokens for request in requests] == [0, 64]
    assert requests[0].token_ids == requests[1].token_ids
    assert requests[0].steps == requests[1].steps
    return requests[0].steps


class PartlyRight(ModelRunner):
    """Proposes a random number of tokens of the answer, a wrong one, and then what the drafter does."""

    def __init__(
        self, workload: Workload, rng: random.Random, *, num_slots: int = NUM_SLOTS, prefill_chunk: int = 7,
        prefix_caching: bool = False,
    ) -> None:  # fmt: skip
        super().__init__(workload.session.target, workload.session.drafter)
        self._rng, self._vocab_size = rng, workload.session.manifest.target.vocab_size
        self.requests = [workload.request(job) for job in workload.jobs]
        self._answers = {id(r): job.expected for r, job in zip(self.requests, workload.jobs, strict=True)}
        slots, length = (
            SlotPool(num_slots, 10**6, prefix_caching=prefix_caching),
            FixedLength(workload.num_draft_tokens),
        )
        self.decoder = Decoder(self, slots, length, prefill_chunk=prefill_chunk)

    def draft(
        self, slots: Sequence[int], anchors: Sequence[int], num_tokens: int, draws: Sequence[Draw | None] = ()
    ) -> Callable[[], list[Proposals]]:
        wait, requests = super().draft(slots, anchors, num_tokens), [self.decoder.running[slot] for slot in slots]
        return lambda: self._partly_right(wait(), requests)

    def _partly_right(self, proposals: list[Proposals], requests: Sequence[Request]) -> list[Proposals]:
        for (row, *_), request in zip(proposals, requests, strict=True):
            rest = self._answers[id(request)][len(request.token_ids) :]
            count = min(len(rest), self._rng.randint(0, len(row)))
            row[:count] = rest[:count]
            if count < min(len(row), len(rest)):
                row[count] = (rest[count] + 1) % self._vocab_size
        return proposals


def check_drafted(workload: Workload, seed: int, *, at_once: bool, **options: Any) -> None:
    """Tokens of requests whose blocks are accepted whole, in part and not at all."""
    rng = random.Random(seed)
    pair = PartlyRight(workload, rng, **options)
    drive(pair.decoder, pair.requests, None if at_once else rng)
    assert [request.token_ids for request in pair.requests] == [job.expected for job in workload.jobs]
    steps = [step for request in pair.requests for step in request.steps]
    assert any(0 < step.accepted < step.proposed for step in steps), "no block was accepted in part"
