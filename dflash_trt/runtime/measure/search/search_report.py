# SPDX-License-Identifier: Apache-2.0
"""A searched recipe as a YAML file, with what was measured as comments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dflash_trt.quantize.recipe import LAYER, recipe_text
from dflash_trt.runtime.measure.search.recipe_choice import DENSE, RecipeChoice, Space
from dflash_trt.runtime.measure.search.search import SearchResult
from dflash_trt.runtime.measure.statistics import loss_text


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
