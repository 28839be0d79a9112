# SPDX-License-Identifier: Apache-2.0
"""The recipes that a search chooses among: an algorithm for each group of layers that share a GEMM."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint
from dflash_trt.checkpoint.quantization import BLOCK, FP8, Quantization
from dflash_trt.quantize.convert import checkpoint_bytes
from dflash_trt.quantize.loadable import Loadable
from dflash_trt.quantize.recipe import ACTIVATION_ALGORITHMS
from dflash_trt.quantize.scales import scale_groups

DENSE = "none"
Price = Callable[[Mapping[str, str], bool], float]
"""Seconds of a drafter's pass, by the algorithms of its quantised modules and whether its context is FP8."""


class RecipeChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One recipe."""

    algorithms: tuple[str, ...]
    """By group; `none` for a dense one."""
    fp8_context: bool = False

    @property
    def name(self) -> str:
        """'none FP8 NVFP4 +fp8-kv': the same for the same choice."""
        return " ".join([*self.algorithms, *(["+fp8-kv"] if self.fp8_context else [])])

    def with_group(self, group: int, algorithm: str) -> RecipeChoice:
        """The choice with another algorithm in one group."""
        changed = (*self.algorithms[:group], algorithm, *self.algorithms[group + 1 :])
        return msgspec.structs.replace(self, algorithms=changed)

    def changes(self) -> Iterator[RecipeChoice]:
        """The choices of one change each that add up to this one."""
        dense = RecipeChoice(algorithms=(DENSE,) * len(self.algorithms))
        for group, algorithm in enumerate(self.algorithms):
            if algorithm != DENSE:
                yield dense.with_group(group, algorithm)
        if self.fp8_context:
            yield msgspec.structs.replace(dense, fp8_context=True)

    def changed(self, change: RecipeChoice) -> RecipeChoice:
        """This choice with what `change` has that is not dense."""
        pairs = zip(self.algorithms, change.algorithms, strict=True)
        algorithms = tuple(old if new == DENSE else new for old, new in pairs)
        return RecipeChoice(algorithms=algorithms, fp8_context=self.fp8_context or change.fp8_context)


class Space(msgspec.Struct, frozen=True, kw_only=True):
    """All choices for one draft."""

    draft: DraftCheckpoint
    groups: tuple[tuple[str, ...], ...]
    """Modules that share a GEMM, and so an algorithm."""
    options: tuple[tuple[str, ...], ...]
    """By group: the algorithms that it may have besides `none`."""
    is_mixed: bool
    """Whether groups may differ in algorithm, `none` aside."""
    context_tokens: int
    """Tokens whose context cache counts as bytes; with 0 it stays as it is."""
    has_fp8_context: bool
    price: Price | None = None
    """Seconds of a choice, where they are to be few; None: bytes are."""

    @property
    def dense(self) -> RecipeChoice:
        """The unquantised draft."""
        return RecipeChoice(algorithms=(DENSE,) * len(self.groups))

    def modules(self, choice: RecipeChoice) -> dict[str, str]:
        """Algorithm by quantised module."""
        named = zip(self.groups, choice.algorithms, strict=True)
        return {module: algorithm for group, algorithm in named if algorithm != DENSE for module in group}

    def checkpoint_bytes(self, choice: RecipeChoice) -> int:
        """Of the tensors that `quantize` writes."""
        return checkpoint_bytes(self.draft, Quantization(modules=self.modules(choice), fp8_kv_cache=choice.fp8_context))

    def cost(self, choice: RecipeChoice) -> float:
        """What a search minimises: `bytes`, or seconds at the space's price."""
        return self.bytes(choice) if self.price is None else self.price(self.modules(choice), choice.fp8_context)

    def bytes(self, choice: RecipeChoice) -> int:
        """The checkpoint, and the context cache of `context_tokens`, BF16 or FP8."""
        per_token = self.draft.spec.context_bytes_per_token(fp8=choice.fp8_context)
        return self.checkpoint_bytes(choice) + self.context_tokens * per_token

    def smaller(self, choice: RecipeChoice, algorithms: Sequence[str]) -> Iterator[RecipeChoice]:
        """Choices that differ in one thing, with an algorithm out of `algorithms`, and cost less."""
        candidates = [
            choice.with_group(group, algorithm)
            for group, options in enumerate(self.options)
            for algorithm in options
            if algorithm in algorithms and algorithm != choice.algorithms[group]
        ]
        if self.has_fp8_context and not choice.fp8_context:
            candidates.append(msgspec.structs.replace(choice, fp8_context=True))
        cost = self.cost(choice)
        yield from (candidate for candidate in candidates if self.cost(candidate) < cost)

    def families(self) -> list[tuple[str, ...]]:
        """The algorithms that may stand side by side: all, or each alone."""
        used = sorted({algorithm for options in self.options for algorithm in options})
        return [tuple(used)] if self.is_mixed else [(algorithm,) for algorithm in used]


def make_space(
    draft: DraftCheckpoint,
    loadable: Loadable,
    *,
    formats: Sequence[str],
    ranged: frozenset[str] | None = None,
    context_tokens: int = 0,
    price: Price | None = None,
) -> Space:
    """What a runtime loads of `draft`; `ranged` are the modules whose input's range is known, None: all."""
    groups = tuple(scale_groups(draft.spec))

    def allows(module: str, algorithm: str) -> bool:
        suits = algorithm == FP8 or draft.weights[f"{module}.weight"].shape[1] % BLOCK == 0
        has_range = ranged is None or module in ranged or algorithm not in ACTIVATION_ALGORITHMS
        return suits and has_range and loadable.allows(module, algorithm)

    return Space(
        draft=draft,
        groups=groups,
        options=tuple(tuple(a for a in formats if all(allows(module, a) for module in group)) for group in groups),
        is_mixed=loadable.is_mixed,
        context_tokens=context_tokens,
        has_fp8_context=loadable.has_fp8_context and context_tokens > 0,
        price=price,
    )
