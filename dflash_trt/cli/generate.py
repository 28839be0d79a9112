# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt generate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec

from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.cli.options import (
    ENGINE_ID_OR_DEPLOYMENT,
    PATH,
    chat_options,
    engine_target_option,
    options,
    take_template,
    tp_option,
)
from dflash_trt.cli.settings import refuse_runtime_options, runtime_options, sampling_options, take_runtime_options
from dflash_trt.deploy.deployment_file import deployment_path
from dflash_trt.errors import RequestError
from dflash_trt.files.json_file import MAX_BYTES, json_value
from dflash_trt.files.read import read_bytes
from dflash_trt.runtime.progress_display import progress_line

if TYPE_CHECKING:
    from dflash_trt.api.runtime_options import RuntimeOptions
    from dflash_trt.cli.decode import Job


@click.command(short_help="Decode prompts with the drafter.")
@click.argument("engine", type=ENGINE_ID_OR_DEPLOYMENT)
@click.argument("prompt", required=False)
@options(
    engine_target_option,
    click.option("--token-ids", type=PATH, help="JSON file with a list of prompts as token-id lists."),
    chat_options,
    sampling_options,
    click.option("--max-batch-size", "--batch-size", type=click.IntRange(min=1), default=1, show_default=True,
                 help="Prompts decoded at once (--json)."),
    runtime_options("draft_length", "cache_gib", "device", "executor", "dtype", "acceptance_rule"),
    tp_option,
    click.option("--baseline", is_flag=True,
                 help="Also decode without the drafter; compare tokens, and speeds in turns for up to 20 s."),
    click.option("--json", "as_json", is_flag=True, help="Print one JSON document instead of streaming text."),
)  # fmt: skip
def generate(
    engine: Path, prompt: str | None, target: str | None, token_ids: Path | None, num_ranks: int,
    baseline: bool, as_json: bool, **settings: Any,
) -> None:  # fmt: skip
    """Decode PROMPT, or the prompts of --token-ids, with a drafter.

    ENGINE is an engine directory, or the repository id of a draft or target of the catalogue, which run here, or a
    deployment, by file or name, which runs in TensorRT-LLM's LLM API on this machine's GPUs.

    \b
    Example:
      dflash-trt generate engine --baseline "def quicksort("
    """
    if (prompt is None) == (token_ids is None):
        raise click.UsageError("give either PROMPT or --token-ids FILE")
    template = take_template(settings)
    if token_ids is not None and template is not None:
        raise click.UsageError("--chat wraps text; --token-ids are taken as they are")
    if settings["max_batch_size"] > 1 and not as_json:
        raise click.UsageError("--max-batch-size: answers decoded at once are printed with --json only")

    from dflash_trt.cli.decode import Job

    prompts: str | list[list[int]] = _read_prompts(token_ids) if token_ids else str(prompt)
    runtime = take_runtime_options(settings)
    job = Job(prompt=prompts, params=SamplingParams(**settings), template=template, baseline=baseline, as_json=as_json)
    if (config := deployment_path(str(engine))) is not None:
        refuse_runtime_options(config)
        _run_deployment(config, target, job)
    else:
        _run_engine(engine, target, job, runtime, num_ranks)


def _run_engine(engine: Path, target: str | None, job: Job, options: RuntimeOptions, num_ranks: int) -> None:
    """Decodes with an engine directory in the embedded runtime."""
    from dflash_trt.runtime.cached_engine import engine_of
    from dflash_trt.runtime.checked_pair import CheckedPair, check_prompt
    from dflash_trt.runtime.embedded_backend import EmbeddedBackend
    from dflash_trt.runtime.ranks.join import join

    with join(num_ranks, options.device) as ranks:
        pair = CheckedPair.read(*engine_of(str(engine), target))
        job.encode(pair.tokenizer)
        for ids in job.prompts:
            check_prompt(ids, job.params.max_tokens, pair.manifest.draft, pair.target.spec)
        fewest = min(options.max_batch_size or 1, len(job.prompts))  # an idle slot would take memory
        options = msgspec.structs.replace(options, max_batch_size=fewest)
        with progress_line(f"loading {pair.target_name}"):
            from dflash_trt.runtime.load import load_session  # it loads torch: seconds

            session = load_session(pair, options, ranks=ranks)
        if job.baseline:
            session.warm_up(job.prompts[0])
            job.fix_seed()
        by_method = {"dflash": options, "none": msgspec.structs.replace(options, draft_length=0)}
        job.run(lambda method: EmbeddedBackend(session, by_method[method]), takes_turns=True)


def _run_deployment(config: Path, target: str | None, job: Job) -> None:
    """Decodes with what a deployment file says in TensorRT-LLM."""
    from dflash_trt.trtllm.llm_backend import deployment_tokenizer, open_deployment

    if job.baseline and job.params.temperature > 0:
        raise RequestError(
            "--baseline: expected greedy decoding, because TensorRT-LLM draws other tokens in every run, found"
            f" --temperature {job.params.temperature}"
        )
    job.encode(deployment_tokenizer(config, target))
    job.run(lambda method: open_deployment(config, target, method))


def _read_prompts(file: Path) -> list[list[int]]:
    content = read_bytes(file, RequestError, limit=MAX_BYTES, may_be_pipe=True)
    prompts = json_value(content, file, list[list[int]], RequestError, what="a list of token-id lists")
    if not prompts:
        raise RequestError(f"{file}: expected at least one prompt, found an empty list")
    return prompts
