# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, how their values are read, and checks of files that they name."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, TypeVar

import click
import msgspec
from click.core import ParameterSource

from dflash_trt.api.chat_template import TemplateOptions
from dflash_trt.cli.completion import DRAFT, TARGET
from dflash_trt.deploy.catalog import next_commands
from dflash_trt.deploy.deployment_file import deployment_path, refuse_deployment
from dflash_trt.deploy.gpus import FACTS_EXAMPLE, parse_gpu_facts
from dflash_trt.errors import EngineError, shown
from dflash_trt.files.write import OutputKind, check_replaceable

PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)
Command = TypeVar("Command", bound=Callable[..., Any])
T = TypeVar("T")
MAX_SECONDS = 86400
"""A day: longer than anyone waits, and far from what breaks the timers of threads."""
UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}


class EnginePath(click.Path):
    """An engine directory; with `takes_deployments` also a deployment, with `takes_ids` a repository to be built."""

    def __init__(self, *, takes_deployments: bool = False, takes_ids: bool = False) -> None:
        super().__init__(path_type=Path)
        self._takes_deployments, self._takes_ids = takes_deployments, takes_ids

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        if not self._takes_deployments:
            refuse_deployment(value)
        elif deployment_path(str(value)) is not None:
            return super().convert(value, parameter, context)
        if not self._takes_ids and not Path(value).exists() and (commands := next_commands(str(value))):
            raise EngineError(f"{value} is a repository, not an engine directory", hint=commands)
        return super().convert(value, parameter, context)


class FiniteFloat(click.types.FloatParamType):
    """A number; NaN and infinity are none."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> float:
        number = super().convert(value, parameter, context)
        if not math.isfinite(number):
            self.fail(f"expected a finite number, found {shown(value)}", parameter, context)
        return number


FINITE = FiniteFloat()


class FiniteRange(click.FloatRange, FiniteFloat):
    """A number within bounds, which NaN and infinity would pass."""


ENGINE = EnginePath()
ENGINE_OR_ID = EnginePath(takes_ids=True)
ENGINE_ID_OR_DEPLOYMENT = EnginePath(takes_deployments=True, takes_ids=True)
ENGINE_OR_DEPLOYMENT = EnginePath(takes_deployments=True)


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, which help lists in this order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def parsed(parse: Callable[[str], T]) -> Callable[[click.Context, click.Parameter, str | None], T | None]:
    """Callback of an option whose text `parse` reads; its ValueError is a usage error."""

    def read(context: click.Context, parameter: click.Parameter, text: str | None) -> T | None:
        try:
            return None if text is None else parse(text)
        except ValueError as problem:
            raise click.BadParameter(str(problem), context, parameter) from None

    return read


def share(text: str) -> float:
    """`3%` and `0.03` as 0.03; ValueError for anything that is no share from 0 up to, but without, 1."""
    match = re.fullmatch(r"(\d*\.?\d+(?:e-\d+)?|\d+\.)(%?)", text, flags=re.ASCII)
    if match is None or (value := float(match[1]) / (100 if match[2] else 1)) >= 1:
        raise ValueError(f"expected a share such as 3% or 0.03, found {text!r}")
    return value


def json_object(text: str) -> dict[str, Any]:
    """A JSON object; ValueError for anything else."""
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeEncodeError, RecursionError):
        raise ValueError(f'expected a JSON object such as {{"reasoning_effort": "low"}}, found {shown(text)}') from None


def num_bytes(text: str) -> int:
    """`400MiB`, `0.5 GB` and `4096` as bytes; ValueError for anything else."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d+)?) ?([KMG]i?B|B|)", text, flags=re.ASCII)
    if match is None:
        raise ValueError(f"expected bytes such as 400MiB or 4096, found {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


def refuse_given(names: Collection[str], reason: str) -> None:
    """Raises UsageError, '--OPTION REASON', where one of these parameters of the running command is given."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in names and context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None):
            raise click.UsageError(f"{parameter.opts[0]} {reason}")


def check_output_file(option: str, file: Path | None, suffix: str, kind: OutputKind) -> None:
    """Raises UsageError or BuildError, before the work, where `file` cannot be written or is not of this `kind`."""
    if file is None:
        return
    if file.suffix != suffix or not file.parent.is_dir():
        raise click.UsageError(f"{option}: expected a {suffix} file in an existing directory, found {file}")
    check_replaceable(file, kind, force=True)


def check_picture(file: Path | None) -> None:
    """Raises UsageError, BuildError or ModuleNotFoundError where --plot cannot draw a PNG into `file`."""
    if file is not None:
        from dflash_trt.observe.plots.picture import PICTURE

        check_output_file("--plot", file, ".png", PICTURE)
        import matplotlib  # noqa: F401 - it is used once the work is done


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
required_target_option = click.option(
    "--target", type=TARGET, required=True, help="Target checkpoint: directory or Hugging Face repository id."
)
engine_target_option = click.option(
    "--target",
    type=TARGET,
    help="Target checkpoint: directory or Hugging Face repository id. Default: what the engine or deployment names.",
)
source_options = options(
    click.option("--target", type=TARGET, help="Target, in place of what SOURCE names: directory or repository id."),
    click.option("--draft", type=DRAFT,
                 help="Draft, in place of what SOURCE names: checkpoint or engine directory, or repository id."),
)  # fmt: skip
gpu_facts_option = click.option(
    "--gpu-facts", metavar=FACTS_EXAMPLE,
    callback=lambda _, option, text: None if text is None else parse_gpu_facts(text, option.opts[0]),
    help="Facts of a GPU that dflash-trt does not know, under the name that --gpus gives it: gigabytes, GB/s and"
    " compute capability.",
)  # fmt: skip
template_options = options(
    click.option("--chat-template-kwargs", metavar="JSON", callback=parsed(json_object),
                 help="Variables of the chat template: '{\"reasoning_effort\": \"low\"}'."),
    click.option("--no-thinking", is_flag=True, help="Turn thinking off where the chat template has a switch for it."),
)  # fmt: skip
chat_options = options(
    click.option("--chat", is_flag=True, help="Wrap text prompts in the target's chat template."), template_options
)


def take_template(settings: dict[str, Any]) -> TemplateOptions | None:
    """Takes `chat_options`, or `template_options` alone, out of a command's parameters; UsageError without --chat."""
    variables, no_thinking = settings.pop("chat_template_kwargs"), settings.pop("no_thinking")
    if settings.pop("chat", True):
        return TemplateOptions(variables=variables or {}, no_thinking=no_thinking)
    refuse_given(("chat_template_kwargs", "no_thinking"), "is for --chat")
    return None


deployment_options = options(
    click.option("--acceptance", type=PATH, help="Document of `verify --json`: acceptance by position."),
    click.option("--tau", type=FINITE, help="Tokens per verify pass with the whole block, in place of --acceptance."),
    click.option("--prompt-tokens", type=click.IntRange(1), default=1024, show_default=True,
                 help="Tokens of each prompt."),
    click.option("--output-tokens", type=click.IntRange(1), default=1024, show_default=True,
                 help="Tokens of each answer."),
    click.option("--runtime", type=click.Choice(["trtllm", "vllm", "sglang"]),
                 help="Default: trtllm, or what the deployment is for."),
    click.option(
        "--target",
        type=TARGET,
        help="Target, in place of the deployment's: directory or repository id; only its config.json is read.",
    ),
    click.option("--draft", type=DRAFT, help="Draft, in place of the deployment's: directory or repository id."),
)  # fmt: skip
"""Options of the load that `estimate` and `tune` predict."""

tp_option = click.option(
    "--tp", "num_ranks", type=click.IntRange(min=1), default=1, show_default=True,
    help="Ranks that share the target, started by torchrun or mpiexec.",
)  # fmt: skip
drain_option = click.option(
    "--drain-seconds", type=click.IntRange(0, MAX_SECONDS), default=60, show_default=True,
    help="Time for running requests at SIGTERM.",
)  # fmt: skip


force_option = click.option("--force", is_flag=True, help="Replace an existing output directory.")
