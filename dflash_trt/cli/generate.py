# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt generate`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from dflash_trt.cli.dtype_option import DTYPE_HELP
from dflash_trt.cli.output import progress_line
from dflash_trt.cli.sampling_options import draft_length_option, sampling_options
from dflash_trt.deploy.deployment_file import deployment_path
from dflash_trt.errors import RequestError
from dflash_trt.files.json_file import MAX_BYTES, json_value
from dflash_trt.files.read import read_bytes
from dflash_trt.targets.dtype import DTYPES

if TYPE_CHECKING:
    from dflash_trt.cli.decode import Job


@click.command(short_help="Decode prompts with the drafter.")
@click.argument("engine", type=click.Path(path_type=Path))
@click.argument("prompt", required=False)
@click.option("--target", required=True, help="Target checkpoint: directory or Hugging Face repository id.")
@click.option(
    "--token-ids", type=click.Path(path_type=Path), help="JSON file with a list of prompts as token-id lists."
)
@click.option("--chat", is_flag=True, help="Wrap PROMPT in the target's chat template.")
@sampling_options
@draft_length_option
@click.option("--batch-size", type=click.IntRange(min=1), show_default="1", help="Prompts decoded at once (--json).")
@click.option("--cache-gib", type=float, show_default="4.0", help="Room for the caches, in GiB.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), show_default="auto")
@click.option("--dtype", type=click.Choice(DTYPES), show_default="auto", help=DTYPE_HELP)
@click.option(
    "--tp", type=click.IntRange(min=1), show_default="1", help="Ranks that share the target (torchrun, mpiexec)."
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
    batch_size: int | None,
    cache_gib: float | None,
    device: str | None,
    dtype: str | None,
    tp: int | None,
    baseline: bool,
    as_json: bool,
    **sampling: Any,
) -> None:
    """Decode PROMPT, or the prompts of --token-ids, with a drafter.

    ENGINE is an engine directory, which runs here, or a deployment, by file or name, which TensorRT-LLM runs.

    \b
    Example:
      dflash-trt generate engine --target openai/gpt-oss-120b --baseline "def quicksort("
    """
    if (prompt is None) == (token_ids is None):
        raise click.UsageError("give either PROMPT or --token-ids FILE")
    if token_ids is not None and chat:
        raise click.UsageError("--chat wraps text; --token-ids are taken as they are")
    if (batch_size or 1) > 1 and not as_json:
        raise click.UsageError("--batch-size: answers decoded at once are printed with --json only")

    from dflash_trt.cli.decode import Job
    from dflash_trt.runtime.sampling import SamplingParams

    asked: str | list[list[int]] = _read_prompts(token_ids) if token_ids else str(prompt)
    job = Job(asked, SamplingParams(**sampling), chat=chat, baseline=baseline, as_json=as_json)
    settings: dict[str, Any] = {
        "draft_length": draft_length, "batch_size": batch_size, "cache_gib": cache_gib, "device": device,
        "dtype": dtype, "tp": tp,
    }  # fmt: skip
    settings = {name: value for name, value in settings.items() if value is not None}
    if (config := deployment_path(str(engine))) is not None:
        _run_deployment(config, target, job, **settings)
    else:
        _run_engine(engine, target, job, **settings)


def _run_engine(
    engine: Path,
    target: str,
    job: Job,
    *,
    draft_length: str | None = None,
    batch_size: int = 1,
    cache_gib: float = 4.0,
    device: str = "auto",
    dtype: str = "auto",
    tp: int = 1,
) -> None:
    """Decodes with an engine directory in the embedded runtime; on ranks but 0, follows rank 0."""
    from dflash_trt.runtime.checked_pair import CheckedPair
    from dflash_trt.runtime.draft_length import FixedLength
    from dflash_trt.runtime.embedded_backend import EmbeddedBackend
    from dflash_trt.runtime.prompts import check_prompt
    from dflash_trt.runtime.ranks.join import join

    with join(tp, device) as ranks:
        pair = CheckedPair.read(engine, target)
        length = pair.draft_length(draft_length)
        job.encode(pair.tokenizer)
        for ids in job.prompts:
            check_prompt(ids, job.params.max_tokens, pair.manifest.draft, pair.target.spec)
        num_slots = min(batch_size, len(job.prompts))  # an idle slot would take memory
        with progress_line(f"loading {target}"):
            from dflash_trt.runtime.session import Session  # it loads torch: seconds

            session = Session.load(
                pair, num_slots=num_slots, cache_gib=cache_gib, device=device, dtype=dtype, ranks=ranks
            )
        if ranks.rank > 0:
            session.follow()
            return
        if job.baseline:
            session.warm_up(job.prompts[0])
            job.fix_seed()
        job.run(lambda method: EmbeddedBackend(session, length if method == "dflash" else FixedLength(0)))


def _run_deployment(config: Path, target: str, job: Job, **settings: object) -> None:
    """Decodes with what a deployment file says in TensorRT-LLM."""
    if settings:
        name = next(iter(settings)).replace("_", "-")
        raise click.UsageError(f"--{name} is for an engine directory: the deployment file {config} says it")
    from dflash_trt.checkpoint.source import configuration_directory
    from dflash_trt.deploy.deployment_file import load_deployment
    from dflash_trt.deploy.resolve import resolve
    from dflash_trt.targets.tokenizer import load_tokenizer
    from dflash_trt.trtllm.llm_backend import TrtllmBackend

    deployment = resolve(load_deployment(config), config.stem, target=target)
    if job.baseline and job.params.temperature > 0:
        raise RequestError(
            "--baseline: expected greedy decoding, because TensorRT-LLM draws other tokens in every run, found"
            f" --temperature {job.params.temperature}"
        )
    job.encode(load_tokenizer(configuration_directory(target)))
    job.run(lambda method: TrtllmBackend.open(deployment, method))


def _read_prompts(file: Path) -> list[list[int]]:
    content = read_bytes(file, RequestError, limit=MAX_BYTES, may_be_pipe=True)
    prompts = json_value(content, file, list[list[int]], RequestError, what="a list of token-id lists")
    if not prompts:
        raise RequestError(f"{file}: expected at least one prompt, found an empty list")
    return prompts
