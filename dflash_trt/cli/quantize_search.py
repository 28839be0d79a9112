# SPDX-License-Identifier: Apache-2.0
"""`quantize --search`: the smallest or fastest recipe within a budget of tau, as a YAML file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.source import checkpoint_label
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.cli.output import human_bytes
from dflash_trt.cli.verify_features import progress
from dflash_trt.errors import BuildError, VerificationError, printable
from dflash_trt.files.read import open_file
from dflash_trt.files.write import Kind, check_replaceable, new_file
from dflash_trt.quantize.loadable import LOADABLE, Runtime

if TYPE_CHECKING:
    from dflash_trt.drafter.drafter import Drafter
    from dflash_trt.quantize.features import FeatureFacts, FeatureFile
    from dflash_trt.quantize.ranges import Ranges
    from dflash_trt.quantize.search.recipe_choice import Choice, Price, Space
    from dflash_trt.quantize.search.recipe_judge import OpenChoice, Split
    from dflash_trt.quantize.search.search import Found

MARK = "# dflash-trt quantize --search"
"""How a searched recipe begins."""


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What the command line asks for; the journal of a search is good for the same options only."""

    features: Path
    held_out: Path | None
    """Another file to hold out; None holds half of `features` out."""
    max_tau_loss: float
    max_bytes: int | None
    loadable_by: Runtime
    formats: tuple[str, ...]
    context_tokens: int
    gpu: str | None
    """Whose estimated time is to be small; None: bytes are."""
    batch_size: int
    """Requests at once in that time."""
    calibration: str
    seed: int


def write_searched(draft: DraftCheckpoint, name: str, options: SearchOptions, output: Path, *, force: bool) -> None:
    """Searches a recipe for `draft`, which the user called `name`, and writes it; says on stderr what it came to.

    What was measured is kept beside `output` until it is written, so that the same command goes on after a kill.
    Raises VerificationError when --max-bytes cannot be met within --max-tau-loss.
    """
    from dflash_trt.quantize.features import open_features
    from dflash_trt.quantize.search.recipe_choice import make_space
    from dflash_trt.quantize.search.recipe_judge import Journal, RecipeJudge, halves
    from dflash_trt.quantize.search.search import num_measurements, search
    from dflash_trt.quantize.search.search_report import recipe_file

    kind = Kind(name="a recipe that this command searched", recognizes=_is_ours, form="file", option="-o FILE")
    check_replaceable(output, kind, force=force)
    ranges = _ranges(draft, options)
    space = make_space(
        draft,
        LOADABLE[options.loadable_by],
        formats=options.formats,
        ranged=frozenset(ranges.inputs),
        context_tokens=options.context_tokens,
        price=_price(draft, options),
    )
    _check_size(space, options.max_bytes)
    with ExitStack() as stack:
        file = stack.enter_context(open_features(options.features, draft.spec))
        splits = halves(file, options.seed)
        if options.held_out is not None:
            held_out = stack.enter_context(open_features(options.held_out, draft.spec))
            splits = _whole(file), _whole(held_out)
        advance = stack.enter_context(progress(num_measurements(space), "measuring recipes"))
        journal = Journal(output.with_name(f"{output.name}.journal"), _fingerprint(draft, options))
        opener = _opener(draft, space, ranges, file.facts)
        found = search(space, RecipeJudge(opener, space.dense, splits, journal, advance), options.max_tau_loss)
    _check_size(space, options.max_bytes, found)
    with new_file(output, kind, force=force) as temporary:
        temporary.write_text(recipe_file(space, found, _settings(name, options)), encoding="utf-8")
    journal.remove()
    best = found.best
    if space.price is not None:
        before, after = space.cost(space.dense), best.cost
        click.echo(
            f"a drafter's pass on {options.gpu}: {before * 1e6:.1f} -> {after * 1e6:.1f} us, estimated", err=True
        )
    click.echo(
        f"{human_bytes(space.checkpoint_bytes(space.dense))} -> {human_bytes(space.checkpoint_bytes(best.choice))};"
        f" next: dflash-trt quantize {name} --recipe {output} --calibration {options.calibration} -o DIR",
        err=True,
    )


def _settings(name: str, options: SearchOptions) -> list[str]:
    """What the file says of its making: names of files and repositories, and of those no directory."""
    facts = {
        "searched on": options.features.name,
        "held out": "half of it" if options.held_out is None else options.held_out.name,
        "max-tau-loss": f"{options.max_tau_loss:.2%}",
        "max-bytes": options.max_bytes,
        "loadable-by": options.loadable_by,
        "formats": ", ".join(options.formats),
        "context-tokens": options.context_tokens,
        "objective": "bytes" if options.gpu is None else f"step-time on {options.gpu}, batch {options.batch_size}",
        "calibration": Path(options.calibration).name,
        "seed": options.seed,
    }
    given = [f"{fact}: {value}" for fact, value in facts.items() if value is not None]
    return [f"{MARK[2:]} of {printable(checkpoint_label(name))}", *map(printable, given)]


def _is_ours(file: Path) -> bool:
    with open_file(file, BuildError) as stream:
        return stream.read(len(MARK)) == MARK.encode()


def _whole(file: FeatureFile) -> Split:
    from dflash_trt.quantize.search.recipe_judge import Split

    return Split(features=file, numbers=tuple(range(file.facts.num_sequences)))


def _price(draft: DraftCheckpoint, options: SearchOptions) -> Price | None:
    """Seconds of a drafter's pass on --gpu; ConfigError for one whose rates are not known."""
    if options.gpu is None:
        return None
    from dflash_trt.observe.estimate.constants import rates
    from dflash_trt.observe.estimate.drafter_pass import DrafterLoad, drafter_pass

    constants = rates(options.gpu, "trtllm")

    def seconds(algorithms: Mapping[str, str], fp8_context: bool) -> float:
        load = DrafterLoad(batch=options.batch_size, context_tokens=options.context_tokens, fp8_context=fp8_context)
        return round(drafter_pass(draft.spec, algorithms, constants, load).seconds, 15)  # what costs alike is equal

    return seconds


def _ranges(draft: DraftCheckpoint, options: SearchOptions) -> Ranges:
    if options.calibration == "none":
        from dflash_trt.quantize.bounds import ranges_from_weights

        return ranges_from_weights(draft)
    from dflash_trt.quantize.calibrate import activation_ranges

    return activation_ranges(draft, Path(options.calibration))


def _check_size(space: Space, max_bytes: int | None, found: Found | None = None) -> None:
    """Raises VerificationError where a checkpoint of at most `max_bytes` was not found, or cannot be."""
    if max_bytes is None:
        return
    if found is not None:
        size, loss = space.checkpoint_bytes(found.best.choice), " within --max-tau-loss"
    else:
        size, loss = min(space.checkpoint_bytes(choice) for choice in _smallest(space)), ""
    if size > max_bytes:
        raise VerificationError(
            f"--max-bytes: expected a checkpoint of at most {max_bytes} bytes, found {size} as the smallest{loss}",
            hint="allow a larger --max-tau-loss, more bytes or more formats, or another --loadable-by",
        )


def _smallest(space: Space) -> Iterator[Choice]:
    """The choice of fewest bytes in each family."""
    space = msgspec.structs.replace(space, price=None)
    for family in space.families() or [()]:
        choice = space.dense
        while smaller := list(space.smaller(choice, family)):
            choice = min(smaller, key=space.bytes)
        yield choice


def _fingerprint(draft: DraftCheckpoint, options: SearchOptions) -> str:
    """One line that is the same for the same search."""
    from dflash_trt.builder.engine_directory import describe_source
    from dflash_trt.checkpoint.producer import PRODUCER
    from dflash_trt.engine.manifest import sha256

    files = [options.features, options.held_out, Path(options.calibration)]
    hashes = [sha256(file) for file in files if file is not None and file.is_file()]
    facts = {
        "made_by": PRODUCER,
        "draft": describe_source(draft, "draft").sha256,
        "files": hashes,
        "options": {
            fact: value
            for fact, value in msgspec.structs.asdict(options).items()
            if fact not in ("features", "held_out", "calibration", "max_tau_loss", "max_bytes", "gpu", "batch_size")
        },
    }
    return msgspec.json.encode(facts, order="deterministic").decode()


def _opener(draft: DraftCheckpoint, space: Space, ranges: Ranges, facts: FeatureFacts) -> OpenChoice:
    """What quantises the draft as a choice says, builds its engine in a temporary directory and opens its drafter."""
    from dflash_trt.builder.engine_directory import build_engine, describe_source
    from dflash_trt.drafter.open import open_drafter
    from dflash_trt.measure.replay import BATCH_SIZE
    from dflash_trt.quantize.convert import quantize_checkpoint
    from dflash_trt.quantize.recipe import load_recipe, recipe_text

    target = TargetCheckpoint(directory=draft.directory, spec=facts.target, config=draft.config, weights={})
    modules = draft.spec.linear_modules()

    @contextmanager
    def opened(choice: Choice) -> Iterator[Drafter]:
        text = recipe_text(choice.name, space.modules(choice), modules, fp8_kv_cache=choice.fp8_context)
        with tempfile.TemporaryDirectory() as scratch:
            checkpoint, engine = Path(scratch) / "draft", Path(scratch) / "engine"
            recipe = Path(scratch) / "recipe.yaml"
            recipe.write_text(text, encoding="utf-8")
            quantize_checkpoint(draft, load_recipe(str(recipe)), checkpoint, ranges=ranges)
            quantized = read_draft(checkpoint)
            manifest = build_engine(quantized, target, engine, source=describe_source(draft, choice.name))
            yield open_drafter(engine, manifest, num_slots=BATCH_SIZE)

    return opened
