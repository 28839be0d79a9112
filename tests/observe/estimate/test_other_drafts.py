# SPDX-License-Identifier: Apache-2.0
"""MTP layers and n-grams beside DFlash: their cost, whose acceptance is known, and what is refused."""

from __future__ import annotations

import re

import msgspec
import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.observe.estimate.inputs import open_system
from dflash_trt.observe.estimate.other_drafts import mtp_shape, ngram_shape, with_other_drafts
from dflash_trt.observe.estimate.report import memory_items
from dflash_trt.observe.estimate.shapes import Method
from dflash_trt.observe.estimate.step import StepModel
from dflash_trt.observe.estimate.step_cost import StepCost, StepLoad
from tests.cli.commands import run
from tests.observe.estimate.systems import HYBRID, LATENT, MOE, model_of, target_of
from tools.estimate_tables import error_of, predict_with_band
from tools.published_points import published_points

HAS_MTP, SILENT = "qwen3.5-35b-a3b.b200x1.latency", "qwen3-coder-next.h200x2.latency"


def price(name: str, method: Method, num_draft_tokens: int) -> StepCost:
    model = model_of(name)
    system = msgspec.structs.replace(model.system, mtp=mtp_shape(model.system.target, 7), ngram=ngram_shape(5))
    load = StepLoad(batch=4, num_draft_tokens=num_draft_tokens, context=1000)
    return StepModel(system, model.rates).price(method, load)


def test_a_pass_is_one_layer_of_the_target_and_its_head() -> None:
    target = target_of(HYBRID)
    layer = mtp_shape(target, 3)
    heads, groups = target.num_attention_heads * 256, 2 * target.cache.num_key_value_heads * 256
    attention = target.hidden_size * (3 * heads + groups)  # q has an output gate
    shared = 3 * target.hidden_size * target.shared_intermediate_size
    (gemm,) = layer.gemms["layers"]
    assert gemm.params == 2 * target.hidden_size**2 + attention + shared
    assert (layer.num_expert_layers, layer.num_key_value_heads, layer.head_dim) == (1, 2, 256)
    assert mtp_shape(target_of(LATENT), 3).head_dim * 2 == 512 + 64, "one latent row in place of K and V"


@pytest.mark.parametrize("name", [MOE, HYBRID, LATENT])
def test_every_draft_costs_one_more_pass(name: str) -> None:
    one, three = (
        sum(term.seconds for term in price(name, "mtp", k).terms if term.part == "drafter") for k in (1, 3)
    )  # fmt: skip
    assert three == pytest.approx(3 * one, rel=0.01)
    heads = [term for term in price(name, "mtp", 3).terms if (term.part, term.name) == ("drafter", "lm_head")]
    assert heads[0].bytes == pytest.approx(
        3 * model_of(name).system.target.head_params * 2 / model_of(name).system.dense_ranks
    )
    assert any((term.part, term.name) == ("drafter", "experts") for term in price(name, "mtp", 3).terms)


def test_n_grams_cost_the_gpu_nothing() -> None:
    parts = {term.part for term in price(MOE, "ngram", 5).terms}
    assert "drafter" not in parts
    plain, ngram = price(MOE, "none", 0), price(MOE, "ngram", 5)
    assert ngram.seconds > plain.seconds, "six tokens are verified in place of one"


def test_memory_has_the_layer_and_its_cache() -> None:
    deployment, system = open_system(HAS_MTP, "trtllm", None, None)
    others = with_other_drafts(deployment, system, (), None, 1.5).system
    methods: tuple[Method, ...] = ("mtp", "none", "ngram")
    mtp, plain, ngram = (
        {item.name: item.bytes for item in memory_items(others, method, 4, 1000)} for method in methods
    )
    target = others.target
    assert mtp["drafter weights"] > target.num_experts * target.expert_params * target.expert_bits / 8
    assert mtp["caches of requests"] - plain["caches of requests"] == 4 * 1000 * 2 * 2 * 256 * others.kv_bytes
    assert ngram == plain


def test_one_curve_where_the_target_has_mtp_layers_with_a_published_acceptance() -> None:
    lines = run("estimate", HAS_MTP).stdout.splitlines()
    assert len(lines) <= 40
    assert re.search(r"plain decoding at batch 1 and .*\(MTP: \d\.\dx and \d\.\dx\)", lines[0])
    assert "MTP: tau 6.4, the mean of 5.2 (MT-Bench) to 7.1 (HumanEval) for 15 drafts, arXiv 2602.06036v2" in lines[2]
    (columns,) = (line for line in lines if "tokens/s/user ┃" in line and "GPU" in line and "EAGLE-3" in line)
    assert re.findall(r"(plain|n-gram|MTP|EAGLE-3|DFlash), ", columns) == ["plain", "MTP", "EAGLE-3", "DFlash"]
    given = run("estimate", HAS_MTP, "--mtp-tau", "2.5", "--ngram-tau", "1.4").stdout
    assert "MTP: tau 2.5 at 3 drafts; n-gram: tau 1.4 at 5 drafts" in given
    assert "n-gram / plain" in given


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([MOE, "--method", "mtp"], "expected MTP layers, found none in openai/gpt-oss-120b"),
        ([MOE, "--mtp-tau", "2"], "expected MTP layers, found none in openai/gpt-oss-120b"),
        ([SILENT, "--method", "mtp"], "whether Qwen/Qwen3-Coder-Next has MTP layers is not known"),
        (
            ["qwen3.6-27b.h200x1.latency", "--tau", "5", "--method", "mtp"],
            "--method mtp), and give what dflash-trt doctor URL prints as --mtp-tau X",
        ),
        ([MOE, "--method", "ngram"], "--method ngram), and give what dflash-trt doctor URL prints as --ngram-tau X"),
        ([MOE, "--ngram-tau", "7"], "tau: expected 1 to 6 for 5 drafts, found 7"),
        ([HAS_MTP, "--mtp-tau", "5"], "tau: expected 1 to 4 for 3 drafts, found 5"),
    ],
)
def test_what_is_not_known_is_refused_by_name(arguments: list[str], words: str) -> None:
    result = run("estimate", *arguments)
    assert result.returncode == 1
    assert words in " ".join(result.stderr.split())
    assert result.stdout == ""


def test_targets_without_a_published_acceptance_are_compared_without_mtp() -> None:
    deployment, system = open_system("qwen3.6-27b.h200x1.latency", "trtllm", None, None)
    others = with_other_drafts(deployment, system, (), None, None)
    assert (others.system.methods, others.acceptances, others.sources) == (("none", "eagle3", "dflash"), {}, ())
    with pytest.raises(ConfigError, match="found none published"):
        with_other_drafts(deployment, system, ("mtp",), None, None)


def test_published_speeds_of_mtp() -> None:
    """Seen while the draft length was chosen, so that they count as open."""
    points = [point for point in published_points().points if point.method == "mtp"]
    assert len(points) == 9
    assert all(abs(error_of(point, predict_with_band(point).value)) < 0.25 for point in points)
    assert {point.use for point in points} == {"open"}
