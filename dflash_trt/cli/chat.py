# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt chat`: a conversation in the terminal, with streamed answers and their cost."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import aclosing, closing, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import click

from dflash_trt.api.acceptance import Acceptance
from dflash_trt.api.completion import Completion, FinishReason
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.cli.options import (
    ENGINE_ID_OR_DEPLOYMENT,
    engine_target_option,
    options,
    take_template,
    template_options,
)
from dflash_trt.cli.settings import refuse_runtime_options, runtime_options, sampling_options, take_runtime_options
from dflash_trt.deploy.deployment_file import deployment_path
from dflash_trt.errors import RequestError, printable

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from dflash_trt.api.backend import Backend
    from dflash_trt.api.chat_template import TemplateOptions
    from dflash_trt.api.runtime_options import RuntimeOptions
    from dflash_trt.runtime.server.calls.channels import ChannelTokens

COMMANDS = {
    "/help": "show these commands",
    "/system": "TEXT: begin anew with this system message; without TEXT: show it",
    "/reset": "begin anew, with the same system message",
    "/stats": "show tokens, tau and tokens/s of this conversation",
    "/quit": "end; so do /exit and Ctrl-D",
}
HELP = "/help shows the commands, /quit ends, Ctrl-C stops an answer"


@click.command(short_help="Talk to an engine in the terminal.")
@click.argument("engine", type=ENGINE_ID_OR_DEPLOYMENT)
@options(
    engine_target_option,
    click.option("--system", metavar="TEXT", help="System message that begins the conversation."),
    template_options,
    sampling_options,
    runtime_options("draft_length", "cache_gib", "device", "executor", "dtype", "acceptance_rule"),
)
def chat(engine: Path, target: str | None, system: str | None, **settings: Any) -> None:
    """Talk to ENGINE in the target's chat template; /help shows the commands.

    ENGINE is an engine directory, or the repository id of a draft or target of the catalogue, which run here, or a
    deployment, by file or name, which runs in TensorRT-LLM's LLM API on this machine's GPUs.

    If stdin is not a terminal, all of it is one message, and only the answer goes to stdout. After each answer, tokens,
    acceptance length, tokens/s and whether it was cut go to stderr.

    \b
    Example:
      dflash-trt chat engine --max-tokens 512
    """
    template = take_template(settings)
    assert template is not None, "without --chat there is always one"
    runtime = take_runtime_options(settings, max_batch_size=1)
    params = SamplingParams(**settings)
    if params.logprobs:
        raise click.UsageError("--logprobs: a conversation shows none; generate --json does")
    tokenizer, open_backend = _prepared(engine, target, runtime)
    template.encode(tokenizer, [{"role": "user", "content": "x"}])  # fails before minutes of loading
    message = None if sys.stdin.isatty() else _read_message()
    with closing(open_backend()) as backend:
        conversation = TerminalChat(backend, params, system, template)
        if message is not None:
            asyncio.run(conversation.ask(message))
        else:
            _talk(conversation)


def _prepared(
    engine: Path, target: str | None, options: RuntimeOptions
) -> tuple[PreTrainedTokenizerBase, Callable[[], Backend]]:
    """Tokenizer of an engine directory or a deployment, and a function that opens it."""
    if (config := deployment_path(str(engine))) is not None:
        refuse_runtime_options(config)
        from dflash_trt.trtllm.llm_backend import deployment_tokenizer, open_deployment

        return deployment_tokenizer(config, target), lambda: open_deployment(config, target, "dflash")
    from dflash_trt.runtime.cached_engine import engine_of
    from dflash_trt.runtime.checked_pair import CheckedPair

    pair = CheckedPair.read(*engine_of(str(engine), target))

    def open_backend() -> Backend:
        from dflash_trt.runtime.load import open_embedded  # it loads torch: seconds

        return open_embedded(pair, options)

    return pair.tokenizer, open_backend


class TerminalChat:
    """The conversation so far; each answer is streamed and then becomes one of its messages."""

    def __init__(self, backend: Backend, params: SamplingParams, system: str | None, template: TemplateOptions) -> None:
        from dflash_trt.runtime.server.calls.channels import ChannelTokens

        self._backend = backend
        self._params = params
        self._template = template
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
        from dflash_trt.runtime.server.calls.channels import Channels

        messages = [*self._messages, {"role": "user", "content": message}]
        tokenizer, stop = self._backend.tokenizer, self._params.stop_texts
        channels = None if self._channels is None else Channels(self._channels, tokenizer, stop)
        content = ""
        prompt = self._template.encode(tokenizer, messages)
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


def _read_message() -> str:
    try:
        text = sys.stdin.buffer.read().decode().strip()
    except UnicodeDecodeError as error:
        raise RequestError(f"stdin: expected UTF-8, found {error.reason} at byte {error.start}") from None
    if not text:
        raise RequestError("stdin: expected a message, found nothing")
    return text


def _talk(conversation: TerminalChat) -> None:
    with suppress(ImportError):
        import readline  # noqa: F401  # input() then edits and recalls lines

    click.secho(HELP, err=True, dim=True)
    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        except UnicodeDecodeError as error:
            click.echo(f"error: expected UTF-8, found {error.reason} at byte {error.start}", err=True)
            continue
        if line in ("/quit", "/exit"):
            return
        if line.startswith("/"):
            click.secho(_obey(conversation, *line.split(maxsplit=1)), err=True, dim=True)
        elif line:
            _ask(conversation, line)


def _obey(conversation: TerminalChat, command: str, text: str = "") -> str:
    """Runs a command other than /quit and returns its reply."""
    if command not in COMMANDS or (text and command != "/system"):
        return f"{command} {text}".strip() + f": expected one of {', '.join(COMMANDS)}"
    if command == "/help":
        return "\n".join(f"{name:8} {meaning}" for name, meaning in COMMANDS.items())
    if command == "/stats":
        return conversation.stats
    if command == "/system" and not text:
        return conversation.system or "no system message"
    conversation.system = text or conversation.system
    conversation.reset()
    return "a new conversation"


def _ask(conversation: TerminalChat, line: str) -> None:
    """Streams one answer; a failed or interrupted one does not end the conversation."""
    try:
        asyncio.run(conversation.ask(line))
    except KeyboardInterrupt:
        click.secho("\nstopped; this answer is forgotten", err=True, dim=True)
    except RequestError as error:
        click.echo(f"error: {error.message}", err=True)
