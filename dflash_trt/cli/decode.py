# SPDX-License-Identifier: Apache-2.0
"""Decodes the prompts of `generate` on a backend, and shows the answers."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click
import msgspec

from dflash_trt.api.acceptance import NEAR_ZERO_TAU, Acceptance
from dflash_trt.api.backend import Backend, run
from dflash_trt.api.chat_template import TemplateOptions, encode
from dflash_trt.api.completion import Completion
from dflash_trt.api.paired_speed import Pair, PairedSpeed, Timing, paired_speed, take_turns
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.cli.output import number_text, print_json, print_table
from dflash_trt.deploy.deployment_file import Method
from dflash_trt.errors import EngineError, RequestError
from dflash_trt.observe.servers.processor_time import processor_time

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OpenBackend = Callable[[Method], Backend]
"""Opens a backend with the drafter ("dflash") or without ("none")."""
COUNTS = {
    "steps": "passes",
    "drafts": "drafting_passes",
    "accepted": "accepted",
    "proposed": "proposed",
    "accepted_by_position": "accepted_by_position",
    "tau": "tau",
    "tau_of_drafting_passes": "tau_of_drafting_passes",
}
"""Acceptance in the document of `generate --json`: its names, and Acceptance's."""
DIFFER = "WRONG: the tokens differ from plain decoding's; dflash-trt verify finds the first that does"
SECONDS = 20.0
"""Time for pairs of a comparison with plain decoding; at least one is measured."""


@dataclass(kw_only=True)
class Job:
    """Prompts and settings; `encode` comes before `run`."""

    prompt: str | list[list[int]]
    """A text, or prompts of token ids."""
    params: SamplingParams
    template: TemplateOptions | None
    """Chat template that wraps the text, if any."""
    baseline: bool
    as_json: bool
    prompts: list[list[int]] = field(default_factory=list)
    tokenizer: PreTrainedTokenizerBase | None = None

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Tokenizes the prompt; RequestError for an empty one, or without a chat template."""
        self.tokenizer, prompt = tokenizer, self.prompt
        self.prompts = [encode(tokenizer, prompt, self.template)] if isinstance(prompt, str) else prompt
        if not all(self.prompts):
            raise RequestError("prompt: expected at least one token, found an empty prompt")

    def fix_seed(self) -> None:
        """Draws with and without the drafter with one seed, so that sampled tokens are comparable, too."""
        self.params = msgspec.structs.replace(self.params, seed=self.params.sampler().seed)

    def run(self, open_backend: OpenBackend, *, takes_turns: bool = False) -> None:
        """Decodes and prints: one JSON document, or text as it grows and what it cost.

        A comparison with plain decoding `takes_turns` where a backend opens in no time; otherwise both decode once.
        """
        shown = not self.as_json
        drafted = self._decode(open_backend, "dflash", shown)
        plain: list[Completion] = []
        speed: PairedSpeed | None = None
        if self.baseline:
            if shown:
                click.secho("\n\nwithout the drafter:", bold=True)
            plain = self._decode(open_backend, "none", shown)
            pairs = self._pairs(open_backend) if takes_turns else [Pair(_timing(plain), _timing(drafted))]
            speed = paired_speed(pairs, _acceptance_length(drafted))
        if shown:
            click.echo("\n" if self.baseline else "")
            _print_costs(drafted, plain)
            if speed is not None:
                click.echo(speed_line(speed, _acceptance_length(drafted)))
            return
        documents = [_document(answer) for answer in drafted]
        for document, plain_answer in zip(documents, plain, strict=self.baseline):
            document["baseline"] = {
                "token_ids": plain_answer.token_ids,
                "steps": plain_answer.steps,
                "seconds": plain_answer.seconds,
            }
            document["identical"] = plain_answer.token_ids == document["token_ids"]
        compared = {} if speed is None else {"speed": msgspec.structs.asdict(speed) | {"verdict": speed.outcome}}
        print_json("generate", {"requests": documents, **compared})

    def _pairs(self, open_backend: OpenBackend) -> list[Pair]:
        """All prompts, decoded again in turns."""
        drafted: list[Completion] = []

        def timed(method: Method) -> Timing:
            with closing(open_backend(method)) as backend:
                began, before = time.perf_counter(), processor_time(os.getpid())
                answers = run(backend, self.prompts, self.params)
                seconds, spent = time.perf_counter() - began, processor_time(os.getpid()) - before
            if method == "dflash":
                drafted.extend(answers)
            return Timing(sum(len(answer.token_ids) for answer in answers), seconds, *spent)

        return take_turns(
            lambda _: timed("none"), lambda _: timed("dflash"), 1, SECONDS, lambda: _acceptance_length(drafted)
        )  # fmt: skip

    def _decode(self, open_backend: OpenBackend, method: Method, shown: bool) -> list[Completion]:
        with closing(open_backend(method)) as backend:
            try:
                if not shown:
                    return run(backend, self.prompts, self.params)
                return asyncio.run(self._show_all(backend))
            except EngineError as error:
                raise error.__cause__ or error from None  # the original error is not about the engine

    async def _show_all(self, backend: Backend) -> list[Completion]:
        """Prints prompts and continuations as they are decoded."""
        answers = []
        assert self.tokenizer is not None
        for number, ids in enumerate(self.prompts):
            text = ("\n" if number else "") + str(self.tokenizer.decode(ids, skip_special_tokens=True))
            async with aclosing(backend.stream(ids, self.params)) as chunks:
                async for chunk in chunks:
                    click.secho(text, nl=False, dim=True)  # once nothing is wrong with the request
                    click.echo(chunk.text, nl=False)
                    text = ""
                    if chunk.completion is not None:
                        answers.append(chunk.completion)
        return answers


def _timing(answers: Sequence[Completion]) -> Timing:
    return Timing(sum(len(answer.token_ids) for answer in answers), sum(answer.seconds for answer in answers))


def _acceptance_length(answers: Sequence[Completion]) -> float | None:
    """Over all verify passes; None where no pass is counted, or none had room for a draft."""
    acceptance = sum((answer.acceptance or Acceptance() for answer in answers), Acceptance())
    return None if acceptance.proposed == 0 else acceptance.tau


def _document(answer: Completion) -> dict[str, object]:
    """Entry of `generate --json`, with the counts of passes beside the other fields."""
    document = msgspec.structs.asdict(answer)
    for name in ("prompt", "prompt_token_ids", "index", "others"):  # the answers of a list have no other
        del document[name]
    acceptance = document.pop("acceptance")
    return document | {name: getattr(acceptance, field, None) for name, field in COUNTS.items()}


def _print_costs(drafted: Sequence[Completion], plain: Sequence[Completion]) -> None:
    """A line for each answer, or with a baseline a table."""
    for answer in drafted if not plain else ():
        click.echo(
            f"{len(answer.token_ids)} tokens in {number_text(answer.steps)} steps, tau {number_text(answer.tau)},"
            f" {len(answer.token_ids) / answer.seconds:.1f} tokens/s",
            err=True,
        )
    for answer, plain_answer in zip(drafted, plain, strict=bool(plain)):
        title = "identical tokens" if answer.token_ids == plain_answer.token_ids else "TOKENS DIFFER"
        rows = [_row("plain", plain_answer), _row("DFlash", answer)]
        print_table(title, ("decoding", "tokens", "steps", "acceptance length (tau)"), rows)
        if answer.token_ids != plain_answer.token_ids:
            click.echo(DIFFER, err=True)


def speed_line(speed: PairedSpeed, acceptance_length: float | None) -> str:
    """The verdict on speed, with a reason where DFlash is slower."""
    if speed.outcome != "slower":
        return speed.sentence
    why = "its drafts cost more than they bring here"
    if acceptance_length is not None and acceptance_length < NEAR_ZERO_TAU:
        why = "nearly every draft is rejected; dflash-trt verify measures it and names possible causes"
    return f"{speed.sentence}; {why}"


def _row(name: str, answer: Completion) -> tuple[str, ...]:
    return name, str(len(answer.token_ids)), number_text(answer.steps), number_text(answer.tau)
