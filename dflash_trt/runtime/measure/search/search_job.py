# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt search`: the smallest or fastest recipe within a budget of tau, as a YAML file."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import msgspec

from dflash_trt.api.runtime_options import choose_device
from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.number_formats import ACTIVATION_ALGORITHMS
from dflash_trt.checkpoint.safetensors_writer import PRODUCER
from dflash_trt.checkpoint.source import checkpoint_label
from dflash_trt.checkpoint.target_checkpoint import TargetCheckpoint
from dflash_trt.engine.engine_directory import BuildOptions, build_engine, describe_source
from dflash_trt.engine.manifest import sha256
from dflash_trt.errors import VerificationError, printable
from dflash_trt.files.write import OutputKind, bearing, new_file, sole_writer
from dflash_trt.quantize.bounds import Ranges, ranges_from_weights
from dflash_trt.quantize.loadable import LOADABLE, Runtime
from dflash_trt.quantize.recipe import LAYER, load_recipe, recipe_text
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.measure.calibrate import activation_ranges
from dflash_trt.runtime.measure.features import FeatureFacts, open_features
from dflash_trt.runtime.measure.journal import Journal, journal_file
from dflash_trt.runtime.measure.replay import BATCH_SIZE, Progress
from dflash_trt.runtime.measure.search.recipe_judge import Measurement, OpenChoice, RecipeJudge, split
from dflash_trt.runtime.measure.search.search import (
    DENSE,
    Price,
    RecipeChoice,
    SearchResult,
    Space,
    Trial,
    make_space,
    num_measurements,
    search,
)
from dflash_trt.runtime.measure.statistics import loss_text

MARK = "# dflash-trt search"
RECIPE = OutputKind(
    name="a recipe that this command searched", recognizes=bearing(MARK, len(MARK)), form="file", option="-o FILE"
)
"""First line of a searched recipe."""


class SearchOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of the command line; a journal fits a search with the same ones only."""

    features: Path
    held_out: Path | None
    """Another file to hold out; None holds half of `features` out."""
    max_tau_loss: float
    max_bytes: int | None
    loadable_by: Runtime
    formats: tuple[str, ...]
    context_tokens: int
    gpu: str | None
    """GPU whose estimated time to minimise; None: minimise bytes."""
    batch_size: int
    """Requests at once in that time."""
    calibration: str
    device: str
    """Device of the drafter: cpu, cuda or auto."""
    seed: int


def search_recipe(
    draft: DraftCheckpoint,
    name: str,
    options: SearchOptions,
    output: Path,
    *,
    price: Price | None,
    force: bool,
    progress: Progress,
) -> tuple[Space, Trial]:
    """Searches a recipe for `draft`, called `name`, and writes it to `output`; returns the best of what was tried.

    `price` is what to minimise in the place of bytes. An interrupted search continues. Raises VerificationError when
    --max-bytes cannot be met within --max-tau-loss.
    """
    options = msgspec.structs.replace(options, device=choose_device(options.device))
    with ExitStack() as stack:
        stack.enter_context(sole_writer(output, RECIPE, force=force))
        file, held_out = stack.enter_context(open_features(options.features, draft.spec)), None
        if options.held_out is not None:
            held_out = stack.enter_context(open_features(options.held_out, draft.spec))
        splits = split(file, held_out, options.seed)
        ranges = _ranges(draft, options)
        space = make_space(
            draft,
            LOADABLE[options.loadable_by],
            formats=options.formats,
            ranged=frozenset(ranges.inputs),
            context_tokens=options.context_tokens,
            price=price,
        )
        _check_max_bytes(min(map(space.checkpoint_bytes, _smallest(space))), options)
        advance = stack.enter_context(progress(num_measurements(space), "measuring recipes"))
        journal = Journal(
            journal_file(output), _fingerprint(draft, options), Measurement,
            of="measurements of this draft, these features and options",
        )  # fmt: skip
        opener = _opener(draft, space, ranges, file.facts, options.device)
        judge = RecipeJudge(opener, space.dense, splits, journal, advance)
        try:
            for is_held_out in (False, True):  # before the long work
                judge.loss(space.dense, held_out=is_held_out)
        except VerificationError:
            journal.remove()  # it would refuse other features
            raise
        result = search(space, judge, options.max_tau_loss)
        _check_max_bytes(space.checkpoint_bytes(result.best.choice), options, " within --max-tau-loss")
        with new_file(output, RECIPE, force=force) as temporary:
            temporary.write_text(recipe_file(space, result, _settings(name, options)), encoding="utf-8")
        journal.remove()
    return space, result.best


def _settings(name: str, options: SearchOptions) -> list[str]:
    """Comments on how the recipe was found; files by name, without their directories."""
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
    lines = [f"{fact}: {value}" for fact, value in facts.items() if value is not None]
    return [f"{MARK[2:]} of {printable(checkpoint_label(name))}", *map(printable, lines)]


def _ranges(draft: DraftCheckpoint, options: SearchOptions) -> Ranges:
    if options.calibration == "none":
        quantises_activations = options.context_tokens > 0 or any(a in ACTIVATION_ALGORITHMS for a in options.formats)
        return ranges_from_weights(draft) if quantises_activations else Ranges(inputs={}, k=(), v=())
    return activation_ranges(draft, Path(options.calibration), options.device)


def _check_max_bytes(smallest: int, options: SearchOptions, condition: str = "") -> None:
    """Raises VerificationError where --max-bytes is less than the smallest checkpoint."""
    if options.max_bytes is not None and smallest > options.max_bytes:
        raise VerificationError(
            f"--max-bytes: expected a checkpoint of at most {options.max_bytes} bytes,"
            f" found {smallest} as the smallest{condition}",
            hint="allow a larger --max-tau-loss, more bytes or more formats, or another --loadable-by",
        )


def _smallest(space: Space) -> Iterator[RecipeChoice]:
    """The choice of fewest bytes in each family."""
    space = msgspec.structs.replace(space, price=None)
    for family in space.families() or [()]:
        choice = space.dense
        while smaller := list(space.smaller(choice, family)):
            choice = min(smaller, key=space.bytes)
        yield choice


def _fingerprint(draft: DraftCheckpoint, options: SearchOptions) -> str:
    """One line that is the same for the same search."""
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


def _opener(draft: DraftCheckpoint, space: Space, ranges: Ranges, facts: FeatureFacts, device: str) -> OpenChoice:
    """Opener that quantises the draft by a choice, builds a temporary engine and opens its drafter."""
    target = TargetCheckpoint(directory=draft.directory, spec=facts.target, config=draft.config, weights={})
    modules = draft.spec.linear_modules()

    @contextmanager
    def opened(choice: RecipeChoice) -> Iterator[Drafter]:
        text = recipe_text(choice.name, space.modules(choice), modules, fp8_kv_cache=choice.fp8_context)
        with tempfile.TemporaryDirectory() as scratch:
            engine, recipe = Path(scratch) / "engine", Path(scratch) / "recipe.yaml"
            recipe.write_text(text, encoding="utf-8")
            options = BuildOptions(
                draft=draft, draft_name=choice.name, target=target, output=engine,
                recipe=load_recipe(str(recipe)), ranges=ranges,
            )  # fmt: skip
            yield open_drafter(engine, build_engine(options), num_slots=BATCH_SIZE, device=device)

    return opened


def recipe_file(space: Space, result: SearchResult, settings: Sequence[str]) -> str:
    """The file's text: `settings` and both tables as comments, then the recipe of the best choice."""
    best = result.best
    loss = loss_text(best.held_out)
    comments = [*settings, "", *_trials(space, result), "", *_errors(space, result)]
    recipe = recipe_text(
        f"found by search: loses {loss} of tau on prompts that were held out",
        space.modules(best.choice),
        space.draft.spec.linear_modules(),
        fp8_kv_cache=best.choice.fp8_context,
    )
    return "".join(f"# {line}".rstrip() + "\n" for line in comments) + recipe


def _trials(space: Space, result: SearchResult) -> Iterator[str]:
    yield "Every recipe that was replayed: bytes of its checkpoint, loss of tau with its 95 % interval."
    if space.price is not None:
        yield "pass: what a drafter's pass is estimated to take, in microseconds; this was to be small."
    yield "*: the one below; held out: measured for it and for the smaller ones that failed there."
    yield ""
    rows = [("", "bytes", *(["pass"] if space.price else []), "loss", "held out", "quantised")]
    for trial in result.trials:
        mark = "*" if trial.choice == result.best.choice else ""
        size = str(space.checkpoint_bytes(trial.choice))
        seconds = [f"{trial.cost * 1e6:.2f}"] if space.price else []
        rows.append(
            (mark, size, *seconds, loss_text(trial.loss), loss_text(trial.held_out), describe(space, trial.choice))
        )
    yield from _table(rows)


def _errors(space: Space, result: SearchResult) -> Iterator[str]:
    yield "What each change alone does to the drafter's hidden states, squared relative error, and the bytes it saves."
    yield ""
    dense = space.checkpoint_bytes(space.dense)
    rows = [("error", "saves", "quantised")]
    for change in sorted(result.errors, key=lambda choice: (result.errors[choice], choice.name)):
        saved = str(dense - space.checkpoint_bytes(change))
        rows.append((f"{result.errors[change]:.2e}", saved, describe(space, change)))
    yield from _table(rows)


def describe(space: Space, choice: RecipeChoice) -> str:
    """'FP8: o 0, 1; NVFP4: q k v, gate up 0' : projections by algorithm, with their layers where a group has one."""
    parts = []
    for algorithm in sorted(set(choice.algorithms) - {DENSE}):
        groups = [g for g, a in zip(space.groups, choice.algorithms, strict=True) if a == algorithm]
        parts.append(f"{algorithm}: {', '.join(map(group_name, groups))}")
    return "; ".join([*parts, *(["FP8 context"] if choice.fp8_context else [])]) or "nothing"


def group_name(group: Sequence[str]) -> str:
    """'gate up 3' for that layer's, 'q k v' for those of all layers."""
    layers = {module.split(".")[1] for module in group if LAYER.match(module)}
    names = list(dict.fromkeys(module.rpartition(".")[2].removesuffix("_proj") for module in group))
    return " ".join([*names, *(layers if len(layers) == 1 else [])])


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
