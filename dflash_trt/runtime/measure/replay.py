# SPDX-License-Identifier: Apache-2.0
"""Acceptance without the target: the greedy decode loop, walked along answers that `capture` recorded.

It is the loop that serves (`Decoder`, `ModelRunner`), with a target that says what was recorded: the steps are those of
decoding wherever the taps are. No model is loaded; a file has its lm_head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import msgspec
import torch
import torch.nn.functional as F

from dflash_trt.api.acceptance import Acceptance, Step
from dflash_trt.api.runtime_options import choose_device
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.engine.manifest import Manifest, read_manifest
from dflash_trt.runtime.decoder import Decoder
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.kvcache.slots import SlotPool
from dflash_trt.runtime.measure.comparable import check_features, check_reference
from dflash_trt.runtime.measure.features import FeatureFile, FeatureSequence, PromptFacts, open_features
from dflash_trt.runtime.measure.statistics import Mean, TauLoss, mean_tau, tau_loss
from dflash_trt.runtime.measure.verification_report import (
    Comparison,
    EngineFigures,
    PromptFigures,
    compare,
    engine_facts,
)
from dflash_trt.runtime.model_runner import ModelRunner
from dflash_trt.runtime.policy.draft_length import FixedLength
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.targets.target import Segment, Target, Verified

BATCH_SIZE = 8
"""Sequences at once. More fill the CPU no better, and each holds its taps."""
PREFILL_CHUNK = 4096
"""Prompt tokens per step: no request waits for other prompts here."""


class Replayed(msgspec.Struct, frozen=True, kw_only=True):
    """One prompt, decoded with the drafter."""

    prompt: PromptFacts
    num_prompt_tokens: int
    num_output_tokens: int
    steps: list[Step]
    """The verify passes; the prefill, which emits the first token, is none."""

    @property
    def tau(self) -> float | None:
        """Emitted tokens per verify pass, as in `Completion`; None where no pass had room for a draft."""
        acceptance = Acceptance.of(self.steps)
        return acceptance.tau if acceptance.proposed else None


def replay(
    features: FeatureFile,
    drafter: Drafter,
    *,
    numbers: Sequence[int] | None = None,
    draft_length: int | None = None,
    on_prompt: Callable[[], None] = lambda: None,
) -> list[Replayed]:
    """Decodes the captured prompts greedily with `drafter`, in the order of `numbers`.

    `numbers`: all by default. `draft_length`: how many proposals a pass verifies, K by default. As many run at once as
    the drafter has slots, which must be empty. Raises CheckpointError for impossible values in the file.
    """
    chosen = range(features.facts.num_sequences) if numbers is None else numbers
    requests = [_request(features, i, on_prompt) for i in chosen]
    num_slots = len(drafter.cache.lengths)
    longest = max((request.max_length for request in requests), default=0)
    length = FixedLength(drafter.spec.num_draft_tokens if draft_length is None else draft_length)
    pair = ModelRunner(RecordedTarget(features, chosen, drafter.executor.device), drafter)
    decoder = Decoder(pair, SlotPool.for_each_slot(num_slots, longest), length, prefill_chunk=PREFILL_CHUNK)
    decoder.run(requests)
    return [
        Replayed(
            prompt=features.facts.prompts[i],
            num_prompt_tokens=len(request.prompt_ids),
            num_output_tokens=len(request.token_ids),
            steps=request.steps,
        )
        for i, request in zip(chosen, requests, strict=True)
    ]


def _request(features: FeatureFile, i: int, on_prompt: Callable[[], None]) -> Request:
    params = SamplingParams(max_tokens=features.facts.max_tokens)
    request = Request(
        prompt_ids=features.prompt(i).tolist(),
        params=params,
        sampler=params.sampler(),
        stop_ids=frozenset(features.facts.stop_token_ids),
    )
    request.on_progress = lambda request: on_prompt() if request.finished else None
    return request


@dataclass(slots=True)
class _RecordedPosition:
    """Position of a slot in its sequence."""

    sequence: FeatureSequence
    length: int = 0
    """Tokens that the slot holds."""


class RecordedTarget(Target):
    """A `Target` on a feature file. Each slot that begins takes the next sequence, as the decode loop admits requests.

    Its logits are 1 for the recorded token and 0 for all others; after the end, and after another token, they and the
    taps are meaningless, and the loop reads neither.
    """

    def __init__(self, file: FeatureFile, numbers: Sequence[int], device: torch.device) -> None:
        """`numbers`: of the sequences, in the order in which slots take them; `device`: where logits are computed."""
        self._file = file
        self._device = device
        self._numbers = iter(numbers)
        self._places: dict[int, _RecordedPosition] = {}
        self._token_ids, self._table = _embeddings(file)

    def verify(self, segments: Sequence[Segment], *, with_taps: bool) -> Verified:
        """Recorded logits and taps of the segments' rows."""
        logits, taps = [], []
        for segment in segments:
            if segment.slot not in self._places:
                self._places[segment.slot] = _RecordedPosition(self._file.sequence(next(self._numbers)))
            place = self._places[segment.slot]
            begin, end = place.length, place.length + len(segment.token_ids)
            _check(place.sequence, segment, begin)
            logits.append(self._logits(place.sequence, end - segment.num_logits, end))
            taps.append(_rows(place.sequence.taps, begin, end))
            place.length = end
        return Verified(logits=torch.cat(logits), tapped=[torch.cat(taps)] if with_taps else ())

    def rollback(self, slot: int, num_tokens: int) -> None:
        """Takes the slot's last tokens back."""
        self._places[slot].length -= num_tokens

    def release(self, slot: int) -> None:
        """Lets go of the slot's sequence."""
        del self._places[slot]

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Recorded embeddings [..., H] FLOAT: of mask tokens and tokens of an answer, or of all tokens."""
        ids = token_ids.cpu()
        rows = torch.searchsorted(self._token_ids, ids).clamp(max=len(self._token_ids) - 1)
        assert torch.equal(self._token_ids[rows], ids), "a token that no answer holds"
        return self._table[rows].to(token_ids.device)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The recorded lm_head's logits [..., V]."""
        weight, bias = self._head
        return F.linear(hidden.to(weight.dtype), weight, bias)

    @cached_property
    def _head(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Recorded lm_head in the target's type, read when a draft without its own head asks."""
        weight, bias = self._file.lm_head()
        dtype = getattr(torch, self._file.facts.target_dtype)
        return weight.to(self._device, dtype), None if bias is None else bias.to(self._device, dtype)

    def _logits(self, sequence: FeatureSequence, begin: int, end: int) -> torch.Tensor:
        """[end - begin, V]: 1 for the token after each of the positions."""
        logits = torch.zeros(end - begin, self._file.facts.target.vocab_size)
        following = sequence.tokens[begin + 1 : end + 1]
        logits[torch.arange(len(following)), following] = 1
        return logits


def _check(sequence: FeatureSequence, segment: Segment, begin: int) -> None:
    """A prompt's chunk and a block's first token are recorded ones; what follows in a block is proposed."""
    num_recorded = len(segment.token_ids) if begin < sequence.prompt_length else 1
    expected = sequence.tokens[begin : begin + num_recorded].tolist()
    assert list(segment.token_ids[:num_recorded]) == expected, "not the sequence that was recorded here"


def _rows(taps: torch.Tensor, begin: int, end: int) -> torch.Tensor:
    """Rows begin to end, padded with zeros."""
    rows = taps[begin:end].float()
    return F.pad(rows, (0, 0, 0, end - begin - len(rows)))


def _embeddings(file: FeatureFile) -> tuple[torch.Tensor, torch.Tensor]:
    """All token ids that the file has embeddings of, sorted [N], and these embeddings [N, H] FLOAT."""
    if file.facts.has_embedding:
        return torch.arange(file.facts.target.vocab_size), file.embed_tokens().float()
    rows = {file.facts.mask_token_id: file.mask_embedding()}
    for i in range(file.facts.num_sequences):
        token_ids, embeddings = file.answer(i)
        rows |= dict(zip(token_ids.tolist(), embeddings, strict=True))
    ids = sorted(rows)
    return torch.tensor(ids), torch.stack([rows[token] for token in ids]).float()


Progress = Callable[[int, str], AbstractContextManager[Callable[[], None]]]
"""Makes a progress bar for a number of prompts and a label; yields the function to call after each."""


class ReplayedPrompt(PromptFigures, frozen=True, kw_only=True):
    """One prompt under one engine, and what the prompts' file says of it."""

    category: str | None
    language: str | None


class ReplayedEngine(EngineFigures, frozen=True, kw_only=True):
    """Figures of one engine over all prompts."""

    tau_interval: Mean | None
    prompts: list[ReplayedPrompt]


class PromptGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The prompts of one category or language; `name` None stands for those without one."""

    name: str | None
    tau: Mean | None
    reference_tau: Mean | None
    tau_loss: TauLoss | None


class ReplayReport(msgspec.Struct, frozen=True, kw_only=True):
    """All that `verify --features` measured."""

    block_size: int
    max_tokens: int
    text_temperature: float
    """Temperature that the answers were sampled at; 0: greedy."""
    engine: ReplayedEngine
    reference: ReplayedEngine | None
    comparison: Comparison | None
    by_category: list[PromptGroup]
    """Empty where no prompt carries a category."""
    by_language: list[PromptGroup]


def verify_features(
    engine: Path, features: Path, reference: Path | None, progress: Progress, *, device: str = "auto",
    executor: str = "auto",
) -> ReplayReport:  # fmt: skip
    """Replays the captured answers with the engine and its reference, which run on `device`, by `executor`."""
    chosen = choose_device(device)
    directories = [engine, *([] if reference is None else [reference])]
    manifests = [read_manifest(directory) for directory in directories]
    if reference is not None:
        check_reference(manifests[0], manifests[1], str(reference), is_replayed=True)
    with ExitStack() as stack:
        files = [stack.enter_context(open_features(features, manifest.draft)) for manifest in manifests]
        file = files[0]
        check_features(manifests[0], file.facts, str(features), str(engine))
        with progress(file.facts.num_sequences * len(manifests), "prompts") as advance:
            replays = [
                replay(
                    read,
                    open_drafter(directory, manifest, num_slots=BATCH_SIZE, device=chosen, executor=executor),
                    on_prompt=advance,
                )
                for read, directory, manifest in zip(files, directories, manifests, strict=True)
            ]
        figures, *baselines = map(_engine, manifests, replays)
        baseline = baselines[0] if baselines else None
        return ReplayReport(
            block_size=manifests[0].draft.block_size,
            max_tokens=file.facts.max_tokens,
            text_temperature=file.facts.temperature,
            engine=figures,
            reference=baseline,
            comparison=None if baseline is None else compare(figures.prompts, baseline.prompts),
            by_category=_groups(figures, baseline, lambda prompt: prompt.category),
            by_language=_groups(figures, baseline, lambda prompt: prompt.language),
        )


def _engine(manifest: Manifest, replays: Sequence[Replayed]) -> ReplayedEngine:
    interval = mean_tau([replayed.tau for replayed in replays])
    return ReplayedEngine(
        **engine_facts(manifest, [step for replayed in replays for step in replayed.steps]),
        tau=None if interval is None else interval.mean,
        tau_interval=interval,
        prompts=[
            ReplayedPrompt(
                **msgspec.structs.asdict(replayed.prompt),
                num_prompt_tokens=replayed.num_prompt_tokens,
                num_output_tokens=replayed.num_output_tokens,
                steps=len(replayed.steps),
                tau=replayed.tau,
            )
            for replayed in replays
        ],
    )


def _groups(
    engine: ReplayedEngine, reference: ReplayedEngine | None, key: Callable[[ReplayedPrompt], str | None]
) -> list[PromptGroup]:
    """Groups prompts by `key`, sorted, those without one last; [] where no prompt has one."""
    names = {key(prompt) for prompt in engine.prompts}
    if names <= {None}:
        return []

    def taus(of: ReplayedEngine, name: str | None) -> list[float | None]:
        return [prompt.tau for prompt in of.prompts if key(prompt) == name]

    return [
        PromptGroup(
            name=name,
            tau=mean_tau(taus(engine, name)),
            reference_tau=None if reference is None else mean_tau(taus(reference, name)),
            tau_loss=None if reference is None else tau_loss(taus(engine, name), taus(reference, name)),
        )
        for name in sorted(names, key=lambda name: (name is None, name or ""))
    ]
