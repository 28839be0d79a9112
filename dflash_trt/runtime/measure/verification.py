# SPDX-License-Identifier: Apache-2.0
"""Checks over prompts that an engine is lossless, and what quantisation cost against the unquantised engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from dflash_trt.api.acceptance import Step
from dflash_trt.api.chat_template import TemplateOptions
from dflash_trt.api.prompts import PromptLine
from dflash_trt.api.runtime_options import RuntimeOptions, choose_device
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.errors import RequestError
from dflash_trt.runtime.checked_pair import CheckedPair
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.load import load_session
from dflash_trt.runtime.measure.comparable import check_reference
from dflash_trt.runtime.measure.comparing_drafter import ComparingDrafter, exposed_values
from dflash_trt.runtime.measure.statistics import first_difference
from dflash_trt.runtime.measure.verification_report import (
    EngineReport,
    PromptResult,
    VerificationReport,
    compare,
    engine_facts,
)
from dflash_trt.runtime.ranks.roles import ALONE, Follower, Leader
from dflash_trt.runtime.session import Session, run

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class TokenPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """A prompt that can be served."""

    name: str
    token_ids: list[int]


class Verification:
    """An engine, perhaps its reference, and the one target that both decode with."""

    def __init__(self, session: Session, reference: Session | None = None) -> None:
        """Both drafters were opened with `exposed_values`; no `reference`, no need for them."""
        self._session = session
        self._reference = reference
        self._comparing: ComparingDrafter | None = None
        if reference is not None:
            assert reference.drafter is not session.drafter  # each has a context of its own
            self._comparing = ComparingDrafter(session.drafter, reference.drafter)
            self._session = session.with_drafter(session.manifest, self._comparing)

    @classmethod
    def open(
        cls, pair: CheckedPair, reference: Path | None, options: RuntimeOptions, ranks: Leader | Follower = ALONE
    ) -> Verification:
        """Loads the target once, and both engines; raises as `check_reference` and `load_session` do."""
        if reference is None:
            return cls(load_session(pair, options, ranks=ranks))
        manifest, reference_manifest = pair.manifest, read_manifest(reference)
        check_reference(manifest, reference_manifest, str(reference))
        exposed = exposed_values(manifest.draft)
        session = load_session(pair, options, expose=exposed, ranks=ranks)
        drafter = open_drafter(
            reference, reference_manifest,
            device=choose_device(options.device), executor=options.executor, expose=exposed,
        )  # fmt: skip
        return cls(session, session.with_drafter(reference_manifest, drafter))

    @property
    def target_summary(self) -> str:
        """How the target is computed, in one line."""
        return self._session.target.summary

    def tokenize(
        self, prompts: Sequence[PromptLine], max_tokens: int, template: TemplateOptions | None = None
    ) -> list[TokenPrompt]:
        """Token ids of all prompts, text wrapped by `template`; RequestError names what cannot be served."""
        return tokenize(
            prompts, self._session.tokenizer, lambda token_ids: self._session.check(token_ids, max_tokens), template
        )

    def run(self, prompts: Iterable[TokenPrompt], max_tokens: int) -> VerificationReport:
        """Decodes every prompt plainly, with the engine and with the reference."""
        params = SamplingParams(max_tokens=max_tokens)
        engine = _Recording(self._session)
        reference = None if self._reference is None else _Recording(self._reference)
        for prompt in prompts:
            expected = self._session.generate_plain(prompt.token_ids, params).token_ids
            for recording in (engine, reference):
                if recording is not None:
                    recording.decode(prompt, params, expected)
        target, comparison = self._session.target, None
        if reference is not None:
            assert self._comparing is not None
            comparison = compare(engine.prompts, reference.prompts, self._comparing.error())
        return VerificationReport(
            block_size=self._session.manifest.draft.block_size,
            max_tokens=max_tokens,
            target_dtype=str(target.model.dtype).removeprefix("torch."),
            is_batch_invariant=target.is_batch_invariant,
            engine=engine.report(),
            reference=None if reference is None else reference.report(),
            comparison=comparison,
        )


def tokenize(
    prompts: Sequence[PromptLine],
    tokenizer: PreTrainedTokenizerBase | None,
    check: Callable[[list[int]], None],
    template: TemplateOptions | None = None,
) -> list[TokenPrompt]:
    """Token ids of all prompts; RequestError names the first that `check` refuses."""
    tokenized = []
    for prompt in prompts:
        token_ids = prompt.encode(tokenizer, template)
        try:
            check(token_ids)
        except RequestError as error:
            raise RequestError(f"{prompt.id}: {error.message}", hint=error.hint) from None
        tokenized.append(TokenPrompt(name=prompt.id, token_ids=token_ids))
    return tokenized


class _Recording:
    """Records the results of one session, prompt by prompt."""

    def __init__(self, session: Session) -> None:
        self.prompts: list[PromptResult] = []
        self._session = session
        self._steps: list[Step] = []

    def decode(self, prompt: TokenPrompt, params: SamplingParams, expected: Sequence[int]) -> None:
        """Decodes a prompt whose plain greedy tokens are `expected`."""
        request = self._session.request(prompt.token_ids, params)
        (answer,) = run(self._session.decoder(), [request])
        self._steps += request.steps
        self.prompts.append(
            PromptResult(
                name=prompt.name,
                num_prompt_tokens=len(prompt.token_ids),
                num_output_tokens=len(answer.token_ids),
                steps=len(request.steps),
                tau=answer.tau,
                first_difference=first_difference(expected, answer.token_ids),
            )
        )

    def report(self) -> EngineReport:
        """The report over all prompts so far."""
        taus = [prompt.tau for prompt in self.prompts if prompt.tau is not None]
        return EngineReport(
            **engine_facts(self._session.manifest, self._steps),
            identical=all(prompt.first_difference is None for prompt in self.prompts),
            tau=sum(taus) / len(taus) if taus else None,
            prompts=self.prompts,
        )
