# SPDX-License-Identifier: Apache-2.0
"""`generate` and `verify` with `--runtime trtllm`: a deployment file, decoded by TensorRT-LLM."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
import msgspec
from click.core import ParameterSource

from dflash_trt.checkpoint.source import checkpoint_directory
from dflash_trt.cli.output import print_json, print_table
from dflash_trt.deploy.deployment_file import deployment_path, load_deployment
from dflash_trt.deploy.resolve import ResolvedDeployment, resolve
from dflash_trt.errors import RequestError, VerificationError
from dflash_trt.targets.tokenizer import encode, load_tokenizer
from dflash_trt.trtllm.llm_backend import Answer, generate, sampling_arguments

if TYPE_CHECKING:
    from dflash_trt.runtime.prompts import Prompt


EMBEDDED_OPTIONS = ("draft_length", "batch_size", "cache_gib", "device", "tp", "logprobs")
"""Of `generate`: what the deployment file says instead, or TensorRT-LLM does not return."""


def open_deployment(config: Path, target: str, *, refused: Sequence[str]) -> ResolvedDeployment:
    """The deployment in the file `config`, for the target that the command names.

    Raises UsageError for anything but a deployment file, and for options `refused`: what they say, the file says.
    """
    context = click.get_current_context()
    for name in refused:
        if context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            raise click.UsageError(f"--{name.replace('_', '-')} is not for --runtime trtllm")
    file = deployment_path(str(config))
    if file is None:
        raise click.UsageError(f"--runtime trtllm takes a deployment for ENGINE, by file or name, found {config}")
    return resolve(load_deployment(file), file.stem, target=target)


def generate_with_trtllm(
    config: Path,
    target: str,
    prompts: Sequence[list[int]] | str,
    sampling: dict[str, Any],
    *,
    chat: bool,
    baseline: bool,
    as_json: bool,
) -> None:
    """Decodes prompts of token ids, or a text, and again without the drafter for a `baseline`.

    `sampling` are our own options, as `sampling_options` gives them.
    """
    deployment = open_deployment(config, target, refused=EMBEDDED_OPTIONS)
    if isinstance(prompts, str):
        prompts = [encode(load_tokenizer(checkpoint_directory(target)), prompts, chat=chat)]
    sampling = {name: value for name, value in sampling.items() if name != "logprobs"}
    if baseline and sampling["temperature"] > 0:
        raise RequestError(
            "--baseline: expected greedy decoding, because TensorRT-LLM draws other tokens in every run, found"
            f" --temperature {sampling['temperature']}"
        )
    arguments = sampling_arguments(**sampling)
    answers = generate(deployment, "dflash", prompts, arguments)
    plain = generate(deployment, "none", prompts, arguments) if baseline else [None] * len(answers)
    documents = [_document(deployment, answer, other) for answer, other in zip(answers, plain, strict=True)]
    if as_json:
        print_json("generate", {"runtime": "trtllm", "requests": documents})
        return
    for answer, document in zip(answers, documents, strict=True):
        click.echo(answer.text)
        same = f", {'identical' if document['identical'] else 'OTHER'} tokens without the drafter" if baseline else ""
        tau = _shown(document["tau"])
        click.echo(f"{len(answer.token_ids)} tokens in {answer.iterations} iterations, tau {tau}{same}", err=True)


def verify_with_trtllm(
    deployment: ResolvedDeployment, prompts: Sequence[Prompt], max_tokens: int, *, chat: bool, as_json: bool
) -> None:
    """Decodes prompts with the drafter and without; VerificationError when a token differs."""
    from dflash_trt.measure.statistics import first_difference

    tokenizer = load_tokenizer(checkpoint_directory(deployment.target))
    ids = [prompt.encode(tokenizer, chat=chat) for prompt in prompts]
    arguments = sampling_arguments(max_tokens)
    answers = generate(deployment, "dflash", ids, arguments)
    plain = generate(deployment, "none", ids, arguments)
    results: list[dict[str, Any]] = [
        {
            "name": prompt.id,
            "num_prompt_tokens": len(tokens),
            "num_output_tokens": len(answer.token_ids),
            "iterations": answer.iterations,
            "tau": answer.tau(deployment.draft_tokens),
            "first_difference": first_difference(other.token_ids, answer.token_ids),
        }
        for prompt, tokens, answer, other in zip(prompts, ids, answers, plain, strict=True)
    ]
    differing = [result["name"] for result in results if result["first_difference"] is not None]
    taus = [result["tau"] for result in results if result["tau"] is not None]
    tau = sum(taus) / len(taus) if taus else None
    if as_json:
        print_json("verify", {"passed": not differing, "runtime": "trtllm", "tau": tau, "prompts": results})
    else:
        columns = ("prompt", "prompt tokens", "tokens", "iterations", "tau", "first difference")
        print_table(f"tau {_shown(tau)}", columns, [[_shown(value) for value in result.values()] for result in results])
    if differing:
        raise VerificationError(
            f"expected the tokens that TensorRT-LLM emits without the drafter, found others in {len(differing)} of"
            f" {len(results)} prompts; the first is {differing[0]!r}",
            hint="compare in the embedded runtime too: TensorRT-LLM's kernels round otherwise for other batch shapes",
        )


def _shown(value: Any) -> str:
    if isinstance(value, msgspec.Struct):  # a difference
        return ", ".join(f"{name} {part}" for name, part in msgspec.structs.asdict(value).items())
    return "-" if value is None else f"{value:.2f}" if isinstance(value, float) else str(value)


def _document(deployment: ResolvedDeployment, answer: Answer, plain: Answer | None) -> dict[str, Any]:
    document = msgspec.structs.asdict(answer) | {"tau": answer.tau(deployment.draft_tokens)}
    if plain is not None:
        document["baseline"] = msgspec.structs.asdict(plain)
        document["identical"] = plain.token_ids == answer.token_ids
    return document
