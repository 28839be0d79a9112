# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import click
import msgspec

from dflash_trt.checkpoint.dialects.recognise import is_draft, read_config
from dflash_trt.checkpoint.dialects.refused import inner_drafter
from dflash_trt.checkpoint.dialects.speculators import defaults, disagreement
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.exclude_list import exclude_list_problem
from dflash_trt.checkpoint.hub import fetch_weights
from dflash_trt.checkpoint.pair import check_pair, read_partner
from dflash_trt.checkpoint.safetensors_file import StoredTensor
from dflash_trt.checkpoint.source import configuration_directory, is_local
from dflash_trt.checkpoint.target_checkpoint import TargetSpec, read_target
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.cli.completion import CHECKPOINT, TARGET
from dflash_trt.cli.options import json_option
from dflash_trt.cli.output import human_bytes, print_json, print_table
from dflash_trt.deploy.catalog import catalog
from dflash_trt.deploy.trained_target import TrainedTarget, pair_warnings, shapes_fit, trained_target
from dflash_trt.engine.manifest import MANIFEST, Manifest, read_manifest, read_parts, target_path
from dflash_trt.engine.plans.plan import PlanOptions
from dflash_trt.engine.plans.preview import drafter_memory
from dflash_trt.errors import CheckpointError, UnreachableError, printable
from dflash_trt.files.command import quoted


@click.command(short_help="Show and check the facts of a checkpoint or an engine directory.")
@click.argument("path", type=CHECKPOINT)
@click.option("--target", type=TARGET, help="Target checkpoint that a draft or engine is checked against.")
@json_option
def inspect(path: str, target: str | None, as_json: bool) -> None:
    """Show and check the facts of PATH: a draft checkpoint, a target checkpoint or an engine directory.

    PATH and --target are directories or Hugging Face repository ids. If a draft cannot be fetched
    now, its published facts are shown with a warning, unless --target asks for a check.

    \b
    Example:
      dflash-trt inspect z-lab/gpt-oss-120b-DFlash --target openai/gpt-oss-120b
    """
    try:
        document = _describe(path, target)
    except UnreachableError as error:
        known = None if target is not None else _catalogued(path)
        if known is None:
            raise
        document = known
        click.echo(
            f"warning: {error.message}; this is what the catalogue knows, read {document['read']}: nothing was checked",
            err=True,
        )
    if licence := document.get("licence"):
        click.echo(f"warning: {path}: its licence, {licence}, forbids commercial use", err=True)
    if elsewhere := document.get("elsewhere"):
        click.echo(f"warning: {path}: {elsewhere}", err=True)
    if problem := document.get("exclude_list"):
        click.echo(
            f"warning: {path}: {problem}; `dflash-trt convert --to zlab` writes the list from the tensors", err=True
        )
    warnings = document.get("warnings", [])
    assert isinstance(warnings, list)
    for warning in warnings:
        click.echo(f"warning: {warning}", err=True)
    if as_json:
        print_json("inspect", document)
    else:
        if isinstance(facts := document["facts"], Manifest):
            plans = document["tensorrt_plans"]
            assert isinstance(plans, list)
            _print_summary(path, facts, plans)
        _print(msgspec.to_builtins(document))
        if target is not None:
            trained = document.get("trained_for")
            assert trained is None or isinstance(trained, TrainedTarget)
            click.echo(shapes_fit(str(document["path"]), click.format_filename(target), trained))


def _describe(path: str, target: str | None) -> dict[str, object]:
    directory = configuration_directory(path)
    draft: DraftSpec | None = None
    inner: str | None = None
    facts: Manifest | DraftSpec | TargetSpec
    config = read_config(directory)
    if (directory / MANIFEST).is_file():
        manifest = read_manifest(directory)
        kind, facts, weights = "engine", manifest, read_weights(directory)
        draft, quantization = manifest.draft, manifest.quantization
        trained = trained_target(manifest.source.name, None)
    elif is_draft(config):
        fetch_weights(directory)
        checkpoint = read_draft(directory, config)
        kind, facts, weights = "draft", checkpoint.spec, checkpoint.weights
        draft, quantization = checkpoint.spec, checkpoint.quantization
        trained = trained_target(path, config)
    else:
        inner = inner_drafter(config)
        if target is not None:
            read_partner(target, path, config)  # says where they are swapped
        try:
            target_checkpoint = read_target(directory, config)
        except CheckpointError as error:
            raise error if inner is None else CheckpointError(f"{error.message}; the target holds {inner}") from None
        kind, facts, weights = "target", target_checkpoint.spec, target_checkpoint.weights
    document: dict[str, object] = {
        "kind": kind,
        "path": click.format_filename(path),
        "facts": facts,
        "tensors": _tensors(weights),
    }
    if inner is not None:
        document["holds"] = inner
    if licence := next((known.licence for known in catalog().drafts if known.draft == path), None):
        document["licence"] = licence
    if draft is not None:
        document["method"], document["num_draft_tokens"] = draft.kind, draft.num_draft_tokens
        if kind == "draft":  # an engine's manifest names its own
            document["quantization"] = quantization
            if checkpoint.stored_as is not None:
                document["stored_as"] = checkpoint.stored_as
            if checkpoint.prefix:
                document["tensor_prefix"] = checkpoint.prefix
            if by_default := defaults(config):
                document["defaults"] = by_default
            if (elsewhere := disagreement(config, draft)) is not None:
                document["elsewhere"] = elsewhere
            if (problem := exclude_list_problem(checkpoint)) is not None:
                document["exclude_list"] = problem
        if trained is not None:
            document["trained_for"] = trained
        fp8 = quantization.fp8_kv_cache
        document["context_bytes_per_token"] = draft.context_bytes_per_token(fp8=fp8)
        if isinstance(facts, Manifest):
            parts = read_parts(directory, facts)
            document["tensorrt_plans"] = sorted(parts[0][1].plans)
            document["tensorrt_memory"] = _memory(*parts[0])
        if target is not None:
            partner = read_partner(target, path, config)
            check_pair(draft, partner.spec, draft_name=path, target_name=target)
            document["target"] = partner.spec
            warnings = list(pair_warnings(path, draft, trained, target, partner))
            if isinstance(facts, Manifest) and (built := _other_target(facts, target)) is not None:
                warnings.append(f"{path} was built for {built}, not for {target}")
            document["warnings"] = warnings
    elif target is not None:
        raise click.UsageError(f"--target is for a draft or an engine; {path} is a target itself")
    return document


def _other_target(manifest: Manifest, target: str) -> str | None:
    """The repository that an engine was built for, where `target` is another one."""
    source = manifest.target_source
    is_repository = source is not None and source.revision is not None and not is_local(target)
    return source.name if is_repository and source is not None and source.name != target else None


def _catalogued(path: str) -> dict[str, object] | None:
    """The catalogue's facts of a draft, by repository id; None where it has no entry."""
    known = next((known for known in catalog().drafts if known.draft == path), None)
    if known is None or (facts := known.facts) is None:
        return None
    document: dict[str, object] = {
        "kind": "catalogued draft", "path": path, "facts": facts, "method": facts.kind,
        "num_draft_tokens": facts.num_draft_tokens, "known_target": known.target,
        "weight_bytes": known.weight_bytes(), "source": known.source or catalog().source, "read": known.read,
    }  # fmt: skip
    return document if known.licence is None else document | {"licence": known.licence}


def _print_summary(path: str, manifest: Manifest, plans: Sequence[str]) -> None:
    """Summary of an engine in three lines, above the table of all facts."""
    source, target, engine = manifest.source, manifest.target_source, quoted(Path(path))
    recipe = "unquantised" if source.recipe is None else source.recipe
    name = manifest.target.model_type if target is None else target_path(Path(path), target)
    num_drafts = manifest.draft.num_draft_tokens
    origin = printable(f"{source.name}, {recipe}, for {name}")
    click.echo(f"{origin}: {manifest.draft.num_layers} layers, {num_drafts} drafts a step")
    ranks = f" of each of the {manifest.num_ranks} ranks that share it" if manifest.num_ranks > 1 else ""
    click.echo(f"plans{ranks}: {', '.join(plans) or 'none; it runs with ONNX Runtime'}")
    click.echo(f"next: dflash-trt verify {engine} --prompts FILE; then: dflash-trt serve {engine}\n")


def _memory(directory: Path, manifest: Manifest) -> dict[str, object]:
    """Memory that TensorRT plans take on one GPU, and the sizes they serve."""
    options = manifest.plan_options or PlanOptions()
    sizes = {name: getattr(options, name) for name in ("max_batch_size", "max_seq_len", "max_num_tokens")}
    return sizes | msgspec.structs.asdict(drafter_memory(manifest, options, directory))


def _tensors(weights: dict[str, StoredTensor]) -> dict[str, object]:
    return {
        "count": len(weights),
        "bytes": sum(tensor.num_bytes for tensor in weights.values()),
        "dtypes": dict(sorted(Counter(tensor.dtype for tensor in weights.values()).items())),
    }


def _print(document: dict[str, object]) -> None:
    shown = document.keys() - {"kind", "path", "warnings"}
    rows = [row for key, value in document.items() if key in shown for row in _rows(key, value)]
    print_table(f"{document['kind']} {Path(str(document['path'])).name}", ("fact", "value"), rows)


def _rows(key: str, value: object) -> list[tuple[str, str]]:
    """One row a leaf, dotted names, lists of plain values and profiles on one line, quantised modules only counted."""
    if key == "quantization.modules" and isinstance(value, dict):
        counts = sorted(Counter(value.values()).items())
        return [(key, ", ".join(f"{count} {algorithm}" for algorithm, count in counts) or "none")]
    if key.endswith(".profiles") and isinstance(value, (list, tuple)):
        return [(key, _profiles(value))]
    if isinstance(value, dict):
        prefix = "" if key == "facts" else f"{key}."
        return [row for name, item in value.items() for row in _rows(f"{prefix}{name}", item)]
    if isinstance(value, (list, tuple)) and any(isinstance(item, dict) for item in value):
        return [row for index, item in enumerate(value) for row in _rows(f"{key}[{index}]", item)]
    if key.endswith("bytes") and isinstance(value, int):
        return [(key, f"{value} ({human_bytes(value)})")]
    return [(key, ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value))]


def _profiles(profiles: Sequence[dict[str, dict[str, int]]]) -> str:
    """By axis, the sizes that the profiles of a plan have: "B 1, 2, 4; pages 1 to 8192"."""

    def sizes(axis: str) -> Iterator[str]:
        for profile in profiles:
            low, high = profile[axis]["min"], profile[axis]["max"]
            yield str(high) if low == high else f"{low} to {high}"

    return "; ".join(f"{axis} {', '.join(dict.fromkeys(sizes(axis)))}" for axis in profiles[0])
