# SPDX-License-Identifier: Apache-2.0
"""The search on drafts whose losses are known: within the budget on both splits, and small."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from dflash_trt.checkpoint.draft_checkpoint import DraftCheckpoint, read_draft
from dflash_trt.checkpoint.number_formats import FORMATS
from dflash_trt.errors import BuildError
from dflash_trt.observe.estimate.drafter_pass import drafter_seconds
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.loadable import LOADABLE, Runtime
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.runtime.measure.journal import Journal
from dflash_trt.runtime.measure.search.recipe_judge import Measurement
from dflash_trt.runtime.measure.search.search import RecipeChoice, Space, Trial, make_space, search
from dflash_trt.runtime.measure.search.search_job import recipe_file
from dflash_trt.runtime.measure.statistics import TauLoss
from tests.paths import FIXTURES
from tests.runtime.measure.feature_samples import full_disk


@pytest.fixture(scope="module")
def draft() -> DraftCheckpoint:
    return read_draft(FIXTURES / "tiny-qwen3-dflash")


def space_for(draft: DraftCheckpoint, runtime: Runtime, context_tokens: int = 0) -> Space:
    ranged = frozenset(module for module in draft.spec.linear_modules() if module != "fc")
    return make_space(draft, LOADABLE[runtime], formats=FORMATS, ranged=ranged, context_tokens=context_tokens)


class KnownLosses:
    """Losses that are sums over groups; those of the held-out split are `more` times as large."""

    def __init__(self, more: float = 1) -> None:
        self._more = more
        self.held_out: list[RecipeChoice] = []

    def of(self, choice: RecipeChoice) -> float:
        share = {"none": 0, "FP8": 0.001, "W4A16_AWQ": 0.0025, "W4A16_NVFP4": 0.003, "NVFP4": 0.006}
        sizes = enumerate(choice.algorithms, start=1)
        return sum(share[algorithm] * (number % 4 + 1) for number, algorithm in sizes) + 0.002 * choice.fp8_context

    def error(self, choice: RecipeChoice) -> float:
        return self.of(choice) / 10

    def loss(self, choice: RecipeChoice, *, held_out: bool) -> TauLoss:
        if held_out:
            self.held_out.append(choice)
        loss = self.of(choice) * (self._more if held_out else 1)
        return TauLoss(loss=loss, low=loss - 0.01, high=loss + 0.01, num_prompts=16)


@pytest.mark.parametrize("batch", [1, 256])
def test_the_fastest_within_the_budget(draft: DraftCheckpoint, batch: int) -> None:
    """By the seconds of a pass. At 256 requests GEMMs compute: formats that quantise inputs too are faster, then."""
    price = drafter_seconds(draft.spec, "b300", batch, 0)
    ranged = frozenset(module for module in draft.spec.linear_modules() if module != "fc")
    space = make_space(draft, LOADABLE["engine"], formats=FORMATS, ranged=ranged, price=price)
    judge = KnownLosses()
    found = search(space, judge, 0.02)
    assert held_out_loss(found.best) <= 0.02
    assert found.best.cost == price(space.modules(found.best.choice), False) < space.cost(space.dense)
    assert found.best.cost == min(t.cost for t in found.trials if t.held_out is not None and held_out_loss(t) <= 0.02)
    used = set(found.best.choice.algorithms)
    assert ("W4A16_AWQ" in used) == (batch == 1), "weights alone save no arithmetic"
    assert "W4A16_NVFP4" not in used, "INT4 takes the time of it, and loses less"
    assert "pass: what a drafter's pass is estimated to take" in recipe_file(space, found, [])


def held_out_loss(trial: Trial) -> float:
    return trial.held_out.loss


@pytest.mark.parametrize("budget", [0.0, 0.01, 1.0])
def test_the_best_is_within_the_budget_and_near_the_smallest(draft: DraftCheckpoint, budget: float) -> None:
    space = space_for(draft, "engine")
    judge = KnownLosses()
    best = search(space, judge, budget).best
    assert held_out_loss(best) == judge.of(best.choice) <= budget
    smallest = fewest_bytes(space, judge, budget)
    assert smallest <= best.cost <= smallest + 0.06 * space.bytes(space.dense)
    if budget in (0.0, 1.0):
        assert best.cost == smallest


def fewest_bytes(space: Space, judge: KnownLosses, budget: float) -> int:
    """By dynamic programming over the groups, losses in thousandths."""
    dense = space.bytes(space.dense)
    limit = min(round(budget * 1000), 1000)
    saved = [0] * (limit + 1)
    for group, options in enumerate(space.options):
        changes = [space.dense.with_group(group, algorithm) for algorithm in options]
        priced = [(round(judge.of(change) * 1000), dense - space.bytes(change)) for change in changes]
        saved = [
            max([saved[spent], *(saved[spent - loss] + gain for loss, gain in priced if loss <= spent)])
            for spent in range(limit + 1)
        ]
    return dense - saved[limit]


@pytest.mark.parametrize("more", [1.5, 1000])
def test_what_loses_too_much_of_the_held_out_is_never_returned(draft: DraftCheckpoint, more: float) -> None:
    space = space_for(draft, "engine")
    judge = KnownLosses(more)
    found = search(space, judge, 0.02)
    assert held_out_loss(found.best) <= 0.02
    failed = [trial for trial in found.trials if trial.held_out is not None and trial != found.best]
    assert failed, "the smallest within the budget on the search split must have failed here"
    assert all(held_out_loss(trial) > 0.02 and trial.cost <= found.best.cost for trial in failed)
    assert judge.held_out == sorted(judge.held_out, key=space.bytes), "the smallest first, and none after the best"
    if more == 1000:
        assert found.best.choice == space.dense


def test_what_runtimes_load(draft: DraftCheckpoint) -> None:
    def best(runtime: Runtime, context_tokens: int = 0) -> tuple[dict[str, str], bool]:
        space = space_for(draft, runtime, context_tokens)
        choice = search(space, KnownLosses(), 0.05).best.choice
        return space.modules(choice), choice.fp8_context

    native, _ = best("trtllm-native")
    assert native
    assert not [module for module in native if re.search(r"fc|[qkv]_proj", module)]
    assert len(set(native.values())) == 1
    old, new = best("vllm-0.32")[0], best("vllm-0.33")[0]
    assert len(set(old.values())) == 1
    assert len(set(new.values())) == 2, "mixed, which 0.33 loads"
    assert not {"W4A16_NVFP4", "W4A16_AWQ"} & {*native.values(), *old.values(), *new.values()}
    assert "fc" not in {*old, *new}
    engine, has_fp8_context = best("engine")
    assert engine["fc"] == "W4A16_NVFP4", "weights only: its input has no range here"
    assert not has_fp8_context
    assert best("engine", 1000)[1]
    assert not best("vllm-0.33", 1000)[1]


def test_what_another_algorithm_dominates_is_never_chosen(draft: DraftCheckpoint) -> None:
    """Even where noise says that it loses nothing."""

    class Noise(KnownLosses):
        def loss(self, choice: RecipeChoice, *, held_out: bool) -> TauLoss:
            is_lucky = "NVFP4" in choice.algorithms
            return (
                TauLoss(loss=0, low=0, high=0, num_prompts=9) if is_lucky else super().loss(choice, held_out=held_out)
            )

    space = space_for(draft, "engine")
    assert not [trial for trial in search(space, Noise(), 0.01).trials if "NVFP4" in trial.choice.algorithms]
    alone = make_space(draft, LOADABLE["engine"], formats=["NVFP4"])
    assert "NVFP4" in search(alone, Noise(), 0.01).best.choice.algorithms


def test_layers_that_share_a_gemm_share_an_algorithm(draft: DraftCheckpoint) -> None:
    space = space_for(draft, "engine")
    modules = space.modules(search(space, KnownLosses(), 0.02).best.choice)
    for group in space.groups:
        assert len({modules.get(module) for module in group}) == 1


@pytest.mark.parametrize("fp8_context", [False, True])
def test_bytes_are_those_that_quantize_writes(draft: DraftCheckpoint, fp8_context: bool, tmp_path: Path) -> None:
    """Checks that the file says what was chosen."""
    space = space_for(draft, "engine", 1)
    algorithms = itertools.cycle(["FP8", "none", "W4A16_NVFP4", "W4A16_AWQ", "NVFP4"])
    choice = RecipeChoice(
        algorithms=tuple(a if a in options else "none" for a, options in zip(algorithms, space.options, strict=False)),
        fp8_context=fp8_context,
    )
    found = search(space, KnownLosses(), 0.0)
    trial = Trial(choice=choice, cost=0, loss=found.best.loss)
    text = recipe_file(space, type(found)(best=trial, trials=[trial], errors=found.errors), ["settings"])
    (tmp_path / "recipe.yaml").write_text(text)
    recipe = load_recipe(str(tmp_path / "recipe.yaml"))
    assert recipe.algorithms(draft.spec.linear_modules()) == space.modules(choice)
    assert recipe.fp8_kv_cache == fp8_context
    summary = quantize_checkpoint(draft, recipe, tmp_path / "draft", threads=1)
    assert summary.output_bytes == space.checkpoint_bytes(choice)
    assert space.bytes(choice) - summary.output_bytes == draft.spec.context_bytes_per_token(fp8=fp8_context)


def test_a_journal_survives_a_cut_and_refuses_another_search(tmp_path: Path) -> None:
    file = tmp_path / "journal"
    measured: list[str] = []

    def measure(journal: Journal[Measurement], key: str) -> float | None:
        def now() -> Measurement:
            measured.append(key)
            return Measurement(key=key, error=len(measured) / 3)

        return journal.measure(key, now).error

    first = Journal(file, "this search", Measurement, of="this search")
    values = [measure(first, key) for key in "ab"]
    file.write_bytes(file.read_bytes()[:-3])
    again = Journal(file, "this search", Measurement, of="this search")
    assert [measure(again, key) for key in "aab"] == [values[0], values[0], 1.0]
    assert measured == ["a", "b", "b"]
    with pytest.raises(BuildError, match="expected another search, found others"):
        Journal(file, "another search", Measurement, of="another search")
    with full_disk(), pytest.raises(BuildError, match=f"cannot write {file}: File too large"):
        again.record(Measurement(key="c" * 1000, error=1.0))
