# SPDX-License-Identifier: Apache-2.0
"""A conversation in the terminal: messages, streamed answers and their cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, TextIO

import click

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.errors import printable

if TYPE_CHECKING:
    from dflash_trt.api.completion import Completion
    from dflash_trt.runtime.embedded_backend import EmbeddedBackend
    from dflash_trt.runtime.server.channels import ChannelTokens


class TerminalChat:
    """The conversation so far; each answer is streamed and then becomes one of its messages."""

    def __init__(self, backend: EmbeddedBackend, params: SamplingParams, system: str | None) -> None:
        from dflash_trt.runtime.server.channels import ChannelTokens

        self._backend = backend
        self._params = params
        self._channels: ChannelTokens | None = ChannelTokens.read(backend.tokenizer)
        self.system = system
        self.reset()

    def reset(self) -> None:
        """Clears the messages except the system message."""
        self._messages = [] if self.system is None else [{"role": "system", "content": self.system}]
        self._answers: list[Completion] = []

    @property
    def stats(self) -> str:
        """Total cost of the remembered answers."""
        answers = self._answers
        acceptance = sum((each.acceptance for each in answers if each.acceptance is not None), Acceptance())
        return f"{len(answers)} answers, {_costs(answers, acceptance.tau)}"

    async def ask(self, message: str) -> None:
        """Streams the answer and prints its cost; only a complete answer is remembered."""
        from dflash_trt.api.completion import FinishReason
        from dflash_trt.runtime.server.channels import Channels

        messages = [*self._messages, {"role": "user", "content": message}]
        tokenizer, stop = self._backend.tokenizer, self._params.stop_texts
        channels = None if self._channels is None else Channels(self._channels, tokenizer, stop)
        content = ""
        prompt = self._backend.encode_chat(messages)
        async with aclosing(self._backend.stream(prompt, self._params)) as chunks:
            async for chunk in chunks:
                reasoning, text = "", chunk.text
                if channels is not None:
                    reasoning, text, _ = channels.push(chunk.token_ids, is_last=chunk.completion is not None)
                if reasoning:
                    click.secho(shown(reasoning, sys.stderr), nl=False, dim=True, err=True)
                click.echo(shown(text, sys.stdout), nl=False)
                content += text
                answer = chunk.completion
        click.echo()
        assert answer is not None
        costs = _costs([answer], answer.tau)
        if answer.finish_reason == FinishReason.LENGTH:
            costs += f"; cut at --max-tokens {self._params.max_tokens}"
        click.secho(costs, err=True, dim=True)
        self._messages = [*messages, {"role": "assistant", "content": content}]
        self._answers.append(answer)


def _costs(answers: Sequence[Completion], tau: float | None) -> str:
    tokens, seconds = sum(len(each.token_ids) for each in answers), sum(each.seconds for each in answers)
    speed = f"{tokens / seconds:.1f}" if seconds else "-"
    return f"{tokens} tokens, tau {'-' if tau is None else f'{tau:.2f}'}, {speed} tokens/s"


def shown(text: str, stream: TextIO) -> str:
    """Escapes control characters for a terminal, so that the model cannot control it; a pipe gets the raw text."""
    if not stream.isatty():
        return text
    return "\t".join(map(printable, text.split("\t")))
