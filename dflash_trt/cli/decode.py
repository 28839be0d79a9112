# SPDX-License-Identifier: Apache-2.0
"""Decodes the prompts of `generate` on a backend, and shows the answers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import click
import msgspec

from dflash_trt.api.acceptance import NEAR_ZERO_TAU
from dflash_trt.api.backend import Backend, run
from dflash_trt.api.chat_template import TemplateOptions, encode
from dflash_trt.api.completion import Completion
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.cli.output import number_text, print_json, print_table
from dflash_trt.deploy.deployment_file import Method
from dflash_trt.errors import EngineError, RequestError

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
SLOWER = 0.95  # share of plain decoding's speed; two runs differ by less
SECONDS = 5.0
"""A comparison that took less is timed again: one run of a tenth of a second says little on a busy machine."""


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

    def run(self, open_backend: OpenBackend, rounds: int = 1) -> None:
        """Decodes and prints: one JSON document, or text as it grows and what it cost.

        A short comparison with plain decoding runs up to `rounds` times.
        """
        start = time.monotonic()
        shown = not self.as_json
        drafted = self._decode(open_backend, "dflash", shown)
        plain: list[Completion] = []
        if self.baseline:
            if shown:
                click.secho("\n\nwithout the drafter:", bold=True)
            plain = self._decode(open_backend, "none", shown)
            for _ in range(rounds - 1):
                if time.monotonic() - start > SECONDS:
                    break
                drafted = _faster(drafted, self._decode(open_backend, "dflash", shown=False))
                plain = _faster(plain, self._decode(open_backend, "none", shown=False))
        if shown:
            click.echo("\n" if self.baseline else "")
            _print_costs(drafted, plain)
            return
        documents = [_document(answer) for answer in drafted]
        for document, plain_answer in zip(documents, plain, strict=self.baseline):
            document["baseline"] = {
                "token_ids": plain_answer.token_ids,
                "steps": plain_answer.steps,
                "seconds": plain_answer.seconds,
            }
            document["identical"] = plain_answer.token_ids == document["token_ids"]
        print_json("generate", {"requests": documents})

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


def _faster(answers: Sequence[Completion], again: Sequence[Completion]) -> list[Completion]:
    """Faster answer to each prompt; an answer whose tokens changed does not replace the first."""
    return [
        new if new.token_ids == old.token_ids and new.seconds < old.seconds else old
        for old, new in zip(answers, again, strict=True)
    ]


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
    columns = ("decoding", "tokens", "steps", "tau", "seconds", "tokens/s", "time ratio")
    for answer, plain_answer in zip(drafted, plain, strict=bool(plain)):
        title = "identical tokens" if answer.token_ids == plain_answer.token_ids else "TOKENS DIFFER"
        print_table(title, columns, [_row("plain", plain_answer, plain_answer), _row("DFlash", answer, plain_answer)])
        for remark in remarks(answer, plain_answer):
            click.echo(remark, err=True)


def remarks(answer: Completion, plain: Completion) -> Iterator[str]:
    """Warnings about an answer compared with plain decoding, each with the next command."""
    if answer.token_ids != plain.token_ids:
        yield "WRONG: the tokens differ from plain decoding's; dflash-trt verify finds the first that does"
    if (ratio := plain.seconds / answer.seconds) < SLOWER:
        why = "its drafts cost more than they bring here"
        if answer.tau is not None and answer.tau < NEAR_ZERO_TAU:
            why = "nearly every draft is rejected; dflash-trt verify measures it and names possible causes"
        yield f"slower: {1 / ratio:.1f} times plain decoding's time; {why}"


def _row(name: str, answer: Completion, plain: Completion) -> tuple[str, ...]:
    return (
        name,
        str(len(answer.token_ids)),
        number_text(answer.steps),
        number_text(answer.tau),
        f"{answer.seconds:.2f}",
        f"{len(answer.token_ids) / answer.seconds:.1f}",
        f"{plain.seconds / answer.seconds:.2f}x",
    )
