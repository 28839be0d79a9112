# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt generate`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dflash_trt.cli.output import print_json, print_table
from dflash_trt.cli.sampling_options import sampling_options
from dflash_trt.errors import RequestError

if TYPE_CHECKING:
    from dflash_trt.runtime.completion import Completion
    from dflash_trt.runtime.decoder import Decoder
    from dflash_trt.runtime.draft_length import DraftLength
    from dflash_trt.runtime.request import Request
    from dflash_trt.runtime.sampling import SamplingParams
    from dflash_trt.runtime.session import Session


@click.command(short_help="Decode prompts with the drafter.")
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--target", required=True, help="Target checkpoint: directory or Hugging Face repository id.")
@click.option(
    "--token-ids", type=click.Path(path_type=Path), help="JSON file with a list of prompts as token-id lists."
)
@click.option("--chat", is_flag=True, help="Wrap PROMPT in the target's chat template.")
@sampling_options
@click.option(
    "--draft-length",
    metavar="LENGTH",
    help="Drafted tokens that a step verifies: a number, 1:7,8:3 (by batch size) or adaptive. Default: all.",
)
@click.option(
    "--batch-size", type=click.IntRange(min=1), default=1, show_default=True, help="Prompts decoded at once (--json)."
)
@click.option("--cache-gib", type=float, default=4.0, show_default=True, help="Room for the caches, in GiB.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option(
    "--tp",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Ranks that share the target (torchrun, mpiexec).",
)
@click.option(
    "--runtime",
    type=click.Choice(["embedded", "trtllm"]),
    default="embedded",
    show_default=True,
    help="trtllm: ENGINE is a deployment file, decoded by TensorRT-LLM.",
)
@click.option("--baseline", is_flag=True, help="Also decode without the drafter, and compare tokens and time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of streaming text.")
def generate(
    engine: Path,
    prompt: str | None,
    target: str,
    token_ids: Path | None,
    chat: bool,
    draft_length: str | None,
    batch_size: int,
    cache_gib: float,
    device: str,
    tp: int,
    runtime: str,
    baseline: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Decode PROMPT, or the prompts of --token-ids, with the drafter in the directory ENGINE.

    \b
    Example:
      dflash-trt generate engine --target openai/gpt-oss-120b --baseline "def quicksort("
    """
    if (prompt is None) == (token_ids is None):
        raise click.UsageError("give either PROMPT or --token-ids FILE")
    if token_ids is not None and chat:
        raise click.UsageError("--chat wraps text; --token-ids are taken as they are")
    if batch_size > 1 and not as_json:
        raise click.UsageError("--batch-size: answers decoded at once are printed with --json only")

    if runtime == "trtllm":
        from dflash_trt.cli.trtllm import generate_with_trtllm

        asked = _read_prompts(token_ids) if prompt is None else prompt
        generate_with_trtllm(engine, target, asked, sampling, chat=chat, baseline=baseline, as_json=as_json)
        return

    from transformers.utils import logging

    from dflash_trt.runtime.ranks.join import join
    from dflash_trt.runtime.sampling import SamplingParams
    from dflash_trt.runtime.session import Session

    params = SamplingParams(**sampling)
    if not sys.stderr.isatty():
        logging.disable_progress_bar()
    with join(tp, device) as ranks:
        token_prompts = _read_prompts(token_ids)
        num_slots = min(batch_size, len(token_prompts) or 1)  # an idle slot would take memory
        session = Session.open(engine, target, num_slots=num_slots, cache_gib=cache_gib, device=device, ranks=ranks)
        if ranks.rank > 0:
            session.follow()
            return
        prompts = token_prompts if prompt is None else [session.encode(prompt, chat=chat)]
        _generate(session, prompts, params, draft_length, baseline, as_json)


def _generate(
    session: Session,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    draft_length: str | None,
    baseline: bool,
    as_json: bool,
) -> None:
    from dflash_trt.runtime.draft_length import parse_draft_length

    num_draft_tokens = session.manifest.draft.num_draft_tokens
    length = parse_draft_length(draft_length or str(num_draft_tokens), num_draft_tokens)
    if baseline:
        session.warm_up(prompts[0])
        # Both ways draw with one seed: sampled tokens are then comparable, too.
        params = msgspec.structs.replace(params, seed=params.sampler().seed)
    if as_json:
        _print_answers(session, prompts, params, length, baseline)
        return
    for ids in prompts:
        _stream(session, ids, params, length, baseline)


def _read_prompts(file: Path | None) -> list[list[int]]:
    if file is None:
        return []
    try:
        prompts = msgspec.json.decode(file.read_bytes(), type=list[list[int]])
    except OSError as error:
        raise RequestError(f"{file}: expected a JSON file, found: {error.strerror}") from None
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"{file}: expected a list of token-id lists, found {error}") from None
    if not prompts:
        raise RequestError(f"{file}: expected at least one prompt, found an empty list")
    return prompts


def _print_answers(
    session: Session, prompts: Sequence[list[int]], params: SamplingParams, length: DraftLength, baseline: bool
) -> None:
    from dflash_trt.runtime.session import run

    def answers(decoder: Decoder) -> list[Completion]:
        return run(decoder, [session.request(ids, params) for ids in prompts])

    completions = answers(session.decoder(length))
    documents = [msgspec.structs.asdict(completion) for completion in completions]
    if baseline:
        for document, plain in zip(documents, answers(session.plain_decoder()), strict=True):
            document["baseline"] = {"token_ids": plain.token_ids, "steps": plain.steps, "seconds": plain.seconds}
            document["identical"] = plain.token_ids == document["token_ids"]
    print_json("generate", {"requests": documents})


def _stream(session: Session, ids: list[int], params: SamplingParams, length: DraftLength, baseline: bool) -> None:
    """Prompt and continuation as text, as they come; with a baseline its text and a table below."""
    completion = _echo(session, session.decoder(length), ids, params)
    if not baseline:
        click.echo()
        tau = "-" if completion.tau is None else f"{completion.tau:.2f}"
        click.echo(
            f"{len(completion.token_ids)} tokens in {completion.steps} steps, tau {tau},"
            f" {len(completion.token_ids) / completion.seconds:.1f} tokens/s",
            err=True,
        )
        return
    click.secho("\n\nwithout the drafter:", bold=True)
    plain = _echo(session, session.plain_decoder(), ids, params)
    click.echo("\n")
    _print_comparison(completion, plain)


def _echo(session: Session, decoder: Decoder, ids: list[int], params: SamplingParams) -> Completion:
    """Decodes one prompt and prints its text as it grows."""
    from dflash_trt.runtime.session import run

    def on_progress(request: Request) -> None:
        assert request.text is not None
        click.echo(request.text.next_text(), nl=False)

    request = session.request(ids, params, on_progress)
    click.secho(session.text(ids), nl=False, dim=True)
    return run(decoder, [request])[0]


def _print_comparison(completion: Completion, plain: Completion) -> None:
    def row(name: str, c: Completion) -> tuple[str, ...]:
        tau = "-" if c.tau is None else f"{c.tau:.2f}"
        return (
            name,
            str(len(c.token_ids)),
            str(c.steps),
            tau,
            f"{c.seconds:.2f}",
            f"{len(c.token_ids) / c.seconds:.1f}",
            f"{plain.seconds / c.seconds:.2f}x",
        )

    columns = ("decoding", "tokens", "steps", "tau", "seconds", "tokens/s", "time ratio")
    identical = completion.token_ids == plain.token_ids
    title = "identical tokens" if identical else "TOKENS DIFFER"
    print_table(title, columns, [row("plain", plain), row("DFlash", completion)])
