# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt generate`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dflash_trt.cli.output import print_json, print_table
from dflash_trt.errors import RequestError

if TYPE_CHECKING:
    from dflash_trt.runtime.completion import Completion
    from dflash_trt.runtime.session import Session


@click.command(short_help="Decode prompts with the drafter.")
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--target", required=True, help="Target checkpoint: directory or Hugging Face repository id.")
@click.option(
    "--token-ids", type=click.Path(path_type=Path), help="JSON file with a list of prompts as token-id lists."
)
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--chat", is_flag=True, help="Wrap PROMPT in the target's chat template.")
@click.option("--ignore-eos", is_flag=True, help="Do not stop at the target's end-of-sequence tokens.")
@click.option("--baseline", is_flag=True, help="Also decode without the drafter, and compare tokens and time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of streaming text.")
def generate(
    engine: Path,
    prompt: str | None,
    target: str,
    token_ids: Path | None,
    max_new_tokens: int,
    chat: bool,
    ignore_eos: bool,
    baseline: bool,
    as_json: bool,
) -> None:
    """Decode PROMPT, or the prompts of --token-ids, greedily with the drafter in the directory ENGINE.

    \b
    Example:
      dflash-trt generate engine --target openai/gpt-oss-120b --baseline "def quicksort("
    """
    if (prompt is None) == (token_ids is None):
        raise click.UsageError("give either PROMPT or --token-ids FILE")
    if token_ids is not None and chat:
        raise click.UsageError("--chat wraps text; --token-ids are taken as they are")

    token_prompts = [] if token_ids is None else _read_prompts(token_ids)

    from transformers.utils import logging

    from dflash_trt.runtime.session import Session

    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    session = Session.open(engine, target, ignore_eos=ignore_eos)
    prompts = token_prompts if prompt is None else [session.encode(prompt, chat=chat)]
    if baseline:
        session.warm_up(prompts[0])
    if as_json:
        requests = [_request(session, ids, max_new_tokens, baseline) for ids in prompts]
        print_json("generate", {"requests": requests})
    else:
        for ids in prompts:
            _stream(session, ids, max_new_tokens, baseline)


def _read_prompts(file: Path) -> list[list[int]]:
    try:
        prompts = msgspec.json.decode(file.read_bytes(), type=list[list[int]])
    except OSError as error:
        raise RequestError(f"{file}: expected a JSON file, found: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{file}: expected a list of token-id lists, found {error}") from None
    if not prompts:
        raise RequestError(f"{file}: expected at least one prompt, found an empty list")
    return prompts


def _request(session: Session, ids: list[int], max_new_tokens: int, baseline: bool) -> dict[str, object]:
    completion = session.generate(ids, max_new_tokens)
    request = {"text": session.decode(completion.output_ids), **msgspec.structs.asdict(completion)}
    if baseline:
        plain = session.generate_plain(ids, max_new_tokens)
        request["baseline"] = {"output_ids": plain.output_ids, "steps": plain.steps, "seconds": plain.seconds}
        request["identical"] = plain.output_ids == completion.output_ids
    return request


def _stream(session: Session, ids: list[int], max_new_tokens: int, baseline: bool) -> None:
    """Prompt and continuation as text, as they come; with a baseline its text and a table below."""

    def echo(text: str) -> None:
        click.echo(text, nl=False)

    click.secho(session.decode(ids), nl=False, dim=True)
    completion = session.generate(ids, max_new_tokens, on_text=echo)
    click.echo()
    if not baseline:
        tau = "-" if completion.tau is None else f"{completion.tau:.2f}"
        click.echo(
            f"{len(completion.output_ids)} tokens in {completion.steps} steps, tau {tau},"
            f" {len(completion.output_ids) / completion.seconds:.1f} tokens/s",
            err=True,
        )
        return
    click.secho("\nwithout the drafter:", bold=True)
    click.secho(session.decode(ids), nl=False, dim=True)
    plain = session.generate_plain(ids, max_new_tokens, on_text=echo)
    click.echo("\n")
    _print_comparison(completion, plain)


def _print_comparison(completion: Completion, plain: Completion) -> None:
    def row(name: str, c: Completion) -> tuple[str, ...]:
        tau = "-" if c.tau is None else f"{c.tau:.2f}"
        return (
            name,
            str(len(c.output_ids)),
            str(c.steps),
            tau,
            f"{c.seconds:.2f}",
            f"{len(c.output_ids) / c.seconds:.1f}",
            f"{plain.seconds / c.seconds:.2f}x",
        )

    columns = ("decoding", "tokens", "steps", "tau", "seconds", "tokens/s", "time ratio")
    identical = completion.output_ids == plain.output_ids
    title = "identical tokens" if identical else "TOKENS DIFFER"
    print_table(title, columns, [row("plain", plain), row("DFlash", completion)])
