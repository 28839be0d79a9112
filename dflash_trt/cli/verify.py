# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt verify`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
import msgspec

from dflash_trt.api.acceptance import POOREST_TAU
from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.cli.options import (
    ENGINE_OR_DEPLOYMENT,
    FILE,
    PATH,
    chat_options,
    check_picture,
    engine_target_option,
    json_option,
    options,
    parsed,
    refuse_given,
    share,
    take_template,
    tp_option,
)
from dflash_trt.cli.output import print_json
from dflash_trt.cli.settings import max_tokens_option, runtime_options
from dflash_trt.cli.verify_tables import print_replay_report, print_report
from dflash_trt.deploy.deployment_file import deployment_path
from dflash_trt.errors import DFlashError
from dflash_trt.runtime.progress_display import progress_bar, progress_line

if TYPE_CHECKING:
    from dflash_trt.api.chat_template import TemplateOptions
    from dflash_trt.api.prompts import PromptLine
    from dflash_trt.runtime.measure.verification import TokenPrompt
    from dflash_trt.runtime.measure.verification_report import VerificationReport
    from dflash_trt.runtime.ranks.roles import Follower, Leader

Report = TypeVar("Report", bound=msgspec.Struct)
DECODING = (
    "target", "prompt_file", "chat", "chat_template_kwargs", "no_thinking", "max_tokens", "dtype", "num_ranks", "plot",
)  # fmt: skip
"""Parameters without effect on captured answers."""
MIN_TOKENS = 3
"""The first token is the prefill's and the last one a bonus: fewer leave nothing to draft."""


@click.command(short_help="Check that an engine is lossless, and what quantisation cost.")
@click.argument("engine", type=ENGINE_OR_DEPLOYMENT)
@options(
    engine_target_option,
    click.option("--prompts", "prompt_file", type=PATH,
                 help='JSON Lines: {"prompt": text} or {"token_ids": [...]}, optionally with "id".'),
    click.option("--features", type=PATH,
                 help="File that `capture` wrote; its answers are replayed in place of --prompts."),
    click.option("--reference", type=PATH,
                 help="Unquantised engine of the same draft; with --features, also of another."),
    chat_options,
    max_tokens_option(128, MIN_TOKENS),
    runtime_options("device", "executor", "dtype"),
    tp_option,
    click.option("--max-tau-loss", metavar="SHARE", callback=parsed(share),
                 help="Fail when the mean loss of acceptance length (tau) exceeds this, e.g. 3%; needs --reference."),
    json_option,
    click.option("--plot", type=FILE, help="Also plot acceptance and error by layer to this PNG file."),
)  # fmt: skip
def verify(
    engine: Path, target: str | None, prompt_file: Path | None, features: Path | None, reference: Path | None,
    max_tokens: int, num_ranks: int, max_tau_loss: float | None, as_json: bool, plot: Path | None,
    **settings: Any,
) -> None:  # fmt: skip
    """Decode prompts with the drafter, without it, and with an unquantised reference.

    ENGINE is an engine directory, which runs here, or a deployment, by file or name, which runs in TensorRT-LLM's LLM
    API on this machine's GPUs.

    With --features nothing but the drafter runs: on captured answers the steps are those of decoding, and the tokens
    are the target's own.

    Exits with 1 if a token differs from greedy decoding without speculation, if nearly every draft is rejected
    (acceptance length below 1.25), or if --max-tau-loss is exceeded.

    \b
    Example:
      dflash-trt verify engine --prompts prompts.jsonl --reference engine-bf16 --max-tau-loss 3%
      dflash-trt verify engine --features features.safetensors --reference engine-bf16
    """
    if max_tau_loss is not None and reference is None:
        raise click.UsageError("--max-tau-loss needs --reference, the engine that tau is compared with")
    if features is not None:
        refuse_given(DECODING, "cannot be used with --features")
    template = take_template(settings)
    runtime = RuntimeOptions(max_batch_size=1, **settings)
    if features is not None:
        _verify_features(engine, features, reference, max_tau_loss, runtime, as_json=as_json)
        return
    if prompt_file is None:
        raise click.UsageError("expected --prompts or --features")

    from dflash_trt.api.prompts import read_prompts

    if (config := deployment_path(str(engine))) is not None:
        refused = ("reference", "max_tau_loss", "plot", "device", "executor", "dtype", "num_ranks")
        refuse_given(refused, f"is for engine directories, found the deployment {config}")
        from dflash_trt.cli.verify_deployment import verify_deployment

        verify_deployment(config, target, read_prompts(prompt_file), max_tokens, template, as_json=as_json)
        return

    from dflash_trt.runtime.measure.verification_verdict import find_failure
    from dflash_trt.runtime.ranks.join import join

    with join(num_ranks, runtime.device) as ranks:
        check_picture(plot)
        report = _decode(engine, target, reference, read_prompts(prompt_file), max_tokens, template, runtime, ranks)
        failure = find_failure(report, max_tau_loss)
        _print_verdict(report, print_report, failure, max_tau_loss, as_json=as_json)
        if plot is not None:
            from dflash_trt.observe.plots.picture import draw_verification

            draw_verification(report, plot)
        if report.comparison is not None and report.comparison.tau_loss is not None:
            _warn_of_few(report.comparison.tau_loss.num_prompts)
        if failure is not None:
            raise failure
        click.echo(_verdict(report, engine), err=True)


def _decode(
    engine: Path, target: str | None, reference: Path | None, prompts: list[PromptLine], max_tokens: int,
    template: TemplateOptions | None, options: RuntimeOptions, ranks: Leader | Follower,
) -> VerificationReport:  # fmt: skip
    """Decodes the prompts plainly and with the engines."""
    from dflash_trt.runtime.checked_pair import CheckedPair, check_prompt
    from dflash_trt.runtime.measure.verification import Verification, tokenize

    pair = CheckedPair.read(engine, target)

    def check(token_ids: list[int]) -> None:
        check_prompt(token_ids, max_tokens, pair.manifest.draft, pair.target.spec)

    tokenize(prompts, pair.tokenizer, check, template)  # fails before minutes of loading
    with progress_line(f"loading {pair.target_name}"):
        verification = Verification.open(pair, reference, options, ranks)
    click.echo(verification.target_summary, err=True)
    return verification.run(_progress(verification.tokenize(prompts, max_tokens, template)), max_tokens)


def _verify_features(
    engine: Path, features: Path, reference: Path | None, max_tau_loss: float | None, options: RuntimeOptions,
    *, as_json: bool,
) -> None:  # fmt: skip
    """Prints the report of replaying captured answers; VerificationError where too much of tau is lost."""
    from dflash_trt.runtime.measure.replay import verify_features
    from dflash_trt.runtime.measure.verification_verdict import find_loss, find_useless

    report = verify_features(
        engine, features, reference, progress_bar, device=options.device, executor=options.executor
    )
    loss = None if report.comparison is None else report.comparison.tau_loss
    failure = (None if max_tau_loss is None else find_loss(loss, max_tau_loss)) or find_useless(report.engine)
    _print_verdict(report, print_replay_report, failure, max_tau_loss, as_json=as_json)
    _warn_of_few(len(report.engine.prompts))
    if failure is not None:
        raise failure


def _print_verdict(
    report: Report, print_tables: Callable[[Report], None], failure: DFlashError | None, max_tau_loss: float | None,
    *, as_json: bool,
) -> None:  # fmt: skip
    if as_json:
        verdict = {"passed": failure is None, "max_tau_loss": max_tau_loss}
        print_json("verify", {**verdict, **msgspec.structs.asdict(report)})
    else:
        print_tables(report)


def _verdict(report: VerificationReport, engine: Path) -> str:
    """Verdict on an engine that passed, and the next command."""
    found = report.engine
    assert found.tau is not None, "find_useless refuses it"
    verdict = f"verdict: the tokens of plain decoding; tau {found.tau:.2f} in {found.steps} verify passes"
    if found.tau < POOREST_TAU:
        verdict += f", below the lowest published for DFlash ({POOREST_TAU})"
        return f"{verdict}\nnext: dflash-trt verify {engine} --reference BF16_ENGINE, and prompts of its use"
    return f"{verdict}\nnext: dflash-trt serve {engine}"


def _progress(prompts: list[TokenPrompt]) -> Iterator[TokenPrompt]:
    with progress_bar(len(prompts), "prompts") as advance:
        for prompt in prompts:
            yield prompt
            advance()


def _warn_of_few(num_prompts: int) -> None:
    from dflash_trt.runtime.measure.statistics import MIN_PROMPTS

    if num_prompts < MIN_PROMPTS:
        click.echo(f"warning: intervals mean little below {MIN_PROMPTS} prompts, found {num_prompts}", err=True)
