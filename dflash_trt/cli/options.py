# SPDX-License-Identifier: Apache-2.0
"""Options that several commands share, and checks of their values."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from dflash_trt.api.runtime_options import DEFAULTS, DEVICES, DTYPES, EXECUTORS
from dflash_trt.api.sampling_params import SAMPLER_FIELDS, SamplingParams
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.source import checkpoint_directory
from dflash_trt.checkpoint.target_checkpoint import read_pair
from dflash_trt.cli.completion import DRAFT, RECIPE, TARGET
from dflash_trt.cli.output import human_bytes
from dflash_trt.deploy.catalog import next_commands
from dflash_trt.deploy.deployment_path import refuse_deployment
from dflash_trt.deploy.gpus import FACTS_EXAMPLE, parse_gpu_facts
from dflash_trt.errors import EngineError
from dflash_trt.files.command import quoted
from dflash_trt.files.write import OutputKind, check_replaceable

if TYPE_CHECKING:
    from dflash_trt.quantize.bounds import Ranges
    from dflash_trt.quantize.convert import Summary
    from dflash_trt.quantize.recipe import Recipe


UNITS = {"": 1, "B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "KB": 10**3, "MB": 10**6, "GB": 10**9}
PATH = click.Path(path_type=Path)
FILE = click.Path(path_type=Path, dir_okay=False)
Command = TypeVar("Command", bound=Callable[..., Any])
T = TypeVar("T")


class EnginePath(click.Path):
    """An engine directory, and no deployment, which runs in another server, or repository that has yet to be built."""

    def convert(self, value: Any, parameter: click.Parameter | None, context: click.Context | None) -> Any:
        refuse_deployment(value)
        if not Path(value).exists() and (commands := next_commands(str(value))):
            raise EngineError(f"expected an engine directory, found the repository {value}", hint=commands)
        return super().convert(value, parameter, context)


ENGINE = EnginePath(path_type=Path)


def options(*decorators: Callable[[Command], Command]) -> Callable[[Command], Command]:
    """Several options as one decorator, which help lists in this order."""

    def decorate(command: Command) -> Command:
        for decorator in reversed(decorators):
            command = decorator(command)
        return command

    return decorate


def refuse_given(names: Collection[str], reason: str) -> None:
    """Raises UsageError, '--OPTION REASON', where one of these parameters of the running command is given."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if name in names and context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None):
            raise click.UsageError(f"{parameter.opts[0]} {reason}")


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


def num_bytes(text: str) -> int:
    """`400MiB`, `0.5 GB` and `4096` as bytes; ValueError for anything else."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?([KMG]i?B|B|)", text, flags=re.ASCII)
    if match is None:
        raise ValueError(f"expected bytes such as 400MiB or 4096, found {text!r}")
    return int(float(match[1]) * UNITS[match[2]])


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
chat_option = click.option("--chat", is_flag=True, help="Wrap text prompts in the target's chat template.")


def max_tokens_option(default: int, least: int) -> Callable[[Command], Command]:
    return click.option(
        "--max-tokens", "--max-new-tokens", "max_tokens", type=click.IntRange(min=least), default=default,
        show_default=True,
    )  # fmt: skip


sampling_options = options(
    max_tokens_option(SamplingParams().max_tokens, 1),
    *(
        click.option(f"--{name.replace('_', '-')}", type=field.type, default=field.default,
                     show_default=field.default is not None, help=field.bounds.help)
        for name, field in SAMPLER_FIELDS.items()
    ),
    click.option("--stop", multiple=True, metavar="TEXT", help="Text that ends the answer; may be repeated."),
    click.option("--ignore-eos", is_flag=True, help="Do not stop at the target's end-of-sequence tokens."),
    click.option("--logprobs", is_flag=True, help="Return the log probability of each token (with --json)."),
)  # fmt: skip
"""Options of a request: keyword arguments of `SamplingParams`."""

deployment_options = options(
    click.option("--acceptance", type=PATH, help="Document of `verify --json`: acceptance by position."),
    click.option("--tau", type=float, help="Tokens per verify pass with the whole block, in place of --acceptance."),
    click.option("--prompt-tokens", type=click.IntRange(1), default=1024, show_default=True),
    click.option("--output-tokens", type=click.IntRange(1), default=1024, show_default=True),
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

_RUNTIME_SETTINGS: dict[str, dict[str, Any]] = {
    "max_batch_size": {"type": click.IntRange(min=1), "help": "Requests at once. Default: the engine's, or 16."},
    "draft_length": {
        "metavar": "LENGTH",
        "help": "Drafted tokens that a step verifies: auto (the fastest), a number or 1:7,8:3 (by batch size).",
    },
    "cache_gib": {"type": float, "help": "Room for the caches, in GiB."},
    "enable_prefix_caching": {"help": "Begin a prompt with what earlier requests left in the caches."},
    "device": {"type": click.Choice(DEVICES)},
    "executor": {
        "type": click.Choice(EXECUTORS),
        "help": "Runs the drafter; auto: TensorRT plans or torch on a GPU, ONNX Runtime on a CPU.",
    },
    "dtype": {"type": click.Choice(DTYPES), "help": "Type that the target is computed in; auto: float32."},
    "num_ranks": {"type": click.IntRange(min=1), "help": "Ranks that share the target (torchrun, mpiexec)."},
}


def runtime_options(*names: str) -> Callable[[Command], Command]:
    """Options for these fields of `RuntimeOptions`, with its defaults."""

    def option(name: str) -> Callable[[Command], Command]:
        flag, default = "--tp" if name == "num_ranks" else f"--{name.replace('_', '-')}", getattr(DEFAULTS, name)
        flag = f"{flag}/--no-{flag[2:]}" if default is True else flag
        return click.option(flag, name, default=default, show_default=default is not None, **_RUNTIME_SETTINGS[name])

    return options(*map(option, names))


drain_option = click.option(
    "--drain-seconds", type=click.IntRange(min=0), default=60, show_default=True,
    help="Time for running requests at SIGTERM.",
)  # fmt: skip


recipe_option = click.option(
    "--recipe",
    type=RECIPE,
    required=True,
    help="Name of a recipe, or a YAML file; append +fp8-kv for an FP8 context cache.",
)
target_option = click.option("--target", type=TARGET, help="Target checkpoint that the draft is checked against.")
calibration_option = click.option(
    "--calibration", metavar="FILE|none", default="none", show_default=True,
    help="Features that `dflash-trt capture` wrote; none: exact bounds from the weights.",
)  # fmt: skip
force_option = click.option("--force", is_flag=True, help="Replace an existing output directory.")
features_option = click.option(
    "--features", required=True, metavar="FILE", type=PATH, help="Answers that `dflash-trt capture` wrote."
)


def read_checked_draft(draft: str, target: str | None) -> DraftCheckpoint:
    """The checkpoint; raises CheckpointError where it does not fit `target`."""
    checkpoint = read_draft(checkpoint_directory(draft)) if target is None else read_pair(draft, target)[0]
    say_dequantised(checkpoint, draft)
    return checkpoint


def say_dequantised(checkpoint: DraftCheckpoint, name: str) -> None:
    """Says on stderr what weights that another quantiser packed are read as."""
    if checkpoint.stored_as is not None:
        click.echo(f"{click.format_filename(name)}: {checkpoint.stored_as}", err=True)


def recipe_and_ranges(
    draft: DraftCheckpoint, recipe: str, calibration: str, device: str = "cpu"
) -> tuple[Recipe, Ranges | None]:
    """Loads --recipe and --calibration, which runs on `device`; ranges are None for bounds from the weights."""
    from dflash_trt.quantize.recipe import load_recipe

    loaded = load_recipe(recipe)
    if calibration == "none":
        return loaded, None
    if not loaded.needs_ranges(draft.spec.linear_modules()):
        raise click.UsageError(f"--recipe {recipe} quantises weights only and needs no --calibration")
    from dflash_trt.api.runtime_options import choose_device
    from dflash_trt.runtime.measure.calibrate import activation_ranges

    return loaded, activation_ranges(draft, Path(calibration), choose_device(device))


def build_command(draft: Path, target: str | None) -> str:
    """The command that makes an engine of a checkpoint that was written."""
    return f"dflash-trt build {quoted(draft)} --target {quoted(Path(target or 'TARGET'))} -o engine"


def describe(summary: Summary) -> str:
    """'15 linear layers: 14 NVFP4, 1 dense; 18 other tensors copied unchanged; 868 KiB -> 340 KiB'."""
    dense = {"dense": summary.dense_layers} if summary.dense_layers else {}
    counts = ", ".join(f"{count} {kind}" for kind, count in (summary.layers | dense).items())
    total = sum(summary.layers.values()) + summary.dense_layers
    return (
        f"{total} linear layers: {counts}; {summary.copied_tensors} other tensors copied unchanged;"
        f" {human_bytes(summary.source_bytes)} -> {human_bytes(summary.output_bytes)}"
    )
