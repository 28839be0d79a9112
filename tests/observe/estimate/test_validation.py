# SPDX-License-Identifier: Apache-2.0
"""`estimate` reports what was compared with published speeds, and marks what was not."""

from __future__ import annotations

import msgspec
import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.observe.estimate.acceptance_profile import from_tau
from dflash_trt.observe.estimate.constants import DATA, Band, rates
from dflash_trt.observe.estimate.curve import Traffic
from dflash_trt.observe.estimate.inputs import open_system
from dflash_trt.observe.estimate.report import estimate
from dflash_trt.observe.estimate.step import StepModel
from dflash_trt.observe.estimate.step_cost import StepLoad
from dflash_trt.observe.estimate.tables import tables
from dflash_trt.observe.estimate.validation import held_out, is_validated, mark, of_system, summary
from tests.observe.estimate.systems import DENSE, ENGINE, HYBRID, LATENT, MOE, model_of, system_of
from tools.estimate_tables import PAGE, compared, held_out_file, predict, predict_with_band, replace_tables
from tools.estimate_tables import system_of as published_system
from tools.published_points import published_points


def test_the_counts_are_those_of_the_points() -> None:
    """After a wanted change: python tools/estimate_tables.py"""
    points = []
    for published in published_points().points:
        system = published_system(published)
        value = predict(published, rates(system.gpu, system.runtime))
        points.append((published, Band(value, value, value)))
    assert held_out_file(points) == (DATA / "held_out.json").read_text()


@pytest.mark.full
def test_the_page_is_in_step_with_the_code() -> None:
    """After a wanted change: python tools/estimate_tables.py"""
    page = PAGE.read_text()
    assert replace_tables(page, compared()) == page


@pytest.mark.parametrize(
    "published", [p for p in published_points().points if p.id.startswith("trtllm-")], ids=lambda p: p.id
)
def test_the_range_holds_what_tensorrt_llm_publishes(published) -> None:  # type: ignore[no-untyped-def]
    """Why Hopper is predicted too fast at saturation is not known, so the ranges of the constants say how much."""
    band = predict_with_band(published)
    assert band.low <= published.published <= band.high


@pytest.mark.parametrize(
    "published", [p for p in published_points().points if p.id.startswith("six-")], ids=lambda p: p.id
)
def test_six_drafters_trained_alike(published) -> None:  # type: ignore[no-untyped-def]
    """The heads of DFlash2 and DSpark are priced, which alone separates them from DFlash at the same tau."""
    system = published_system(published)
    assert predict(published, rates(system.gpu, system.runtime)) == pytest.approx(published.published, rel=0.06)
    assert bool(system.draft.gemms.get("selector")) == bool(published.head)


def test_what_waits_for_other_ranks_costs_only_where_attention_is_divided_by_requests() -> None:
    load = StepLoad(batch=64, num_draft_tokens=0, context=1000)
    for attention_dp, factor in ((False, 1.0), (True, 2.0)):
        model = model_of(MOE)
        system = msgspec.structs.replace(model.system, attention_dp=attention_dp)
        once, twice = (
            StepModel(system, msgspec.structs.replace(model.rates, attention_dp_wait=wait)).price("none", load)
            for wait in (1.0, 2.0)
        )
        host = next(term.seconds for term in once.terms if term.name == "host")
        assert twice.seconds - host == pytest.approx(factor * (once.seconds - host))


def test_nodes_that_one_model_is_divided_among_are_refused() -> None:
    with pytest.raises(ConfigError, match="expected GPUs of one node, found b300x16"):
        open_system(MOE, "trtllm", None, None, gpus="b300x16", tensor_parallel=16)


def test_rows_that_nothing_validates_say_so() -> None:
    systems = {name: system_of(name) for name in (DENSE, ENGINE, MOE, LATENT, HYBRID)}
    assert mark(systems[ENGINE], "drafter", "layers")
    assert not mark(systems[MOE], "drafter", "layers")
    assert mark(systems[LATENT], "target", "latent projections")
    assert not mark(systems[HYBRID], "target", "delta nets, state")
    assert is_validated(systems[MOE], "dflash")
    assert not is_validated(systems[ENGINE], "dflash")
    assert "EAGLE-3 1 of 1, none with the drafter in TensorRT plans" in summary(systems[ENGINE])
    assert not is_validated(systems[DENSE], "dflash")
    assert of_system(systems[DENSE]) == []
    assert "none was like this (dense; h200), so what follows is not validated" in summary(systems[DENSE])
    assert "like this (experts; b300): EAGLE-3 1 of 1, DFlash 2 of 2" in summary(systems[MOE])
    assert all(each.within <= each.of for each in held_out())


def test_they_are_printed() -> None:
    """No server with our plans has been measured; EAGLE-3's was."""
    system, traffic = system_of(ENGINE), Traffic()
    result = estimate(
        "of plans", system, traffic, {"dflash": from_tau(4.7, 9), "eagle3": from_tau(2.6, 3)}, source="assumed"
    )
    titles = [table.title for table in tables(result)]
    assert titles[0] == "throughput per GPU at a given speed; not validated: plain, DFlash"
    begins = [title.partition(":")[0] for title in titles if "memory allows" in title]
    assert begins == ["plain (not validated)", "EAGLE-3", "DFlash (not validated)"]
    (step,) = (table for table in tables(result) if table.title.startswith("one step, DFlash"))
    assert ("drafter", "layers (not validated)") in {row[:2] for row in step.rows}
