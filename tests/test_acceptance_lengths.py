# SPDX-License-Identifier: Apache-2.0
"""One acceptance length for a pair and its prompts, on all pages and in all data."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator

from dflash_trt.deploy.gpus import DATA
from dflash_trt.observe.bench.report.published_rows import published_sets
from dflash_trt.observe.diagnosis.published_tau import published_draft_tau, published_taus
from tests.paths import REPOSITORY
from tools.published_points import published_points

PAGES = (REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md")))
CATALOG = json.loads((DATA / "catalog.json").read_text())
STATED = re.compile(r"(?:tau|acceptance length) (?:of )?(\d+\.\d+)")
Key = tuple[str, str, int]
"""Target, prompts and draft length."""


def stated() -> Iterator[tuple[Key, float, str]]:
    """Every figure at temperature 0 without thinking in a runtime, and its place."""
    lengths = {entry.target: entry.num_draft_tokens for entry in published_taus()}
    for entry in published_taus():
        of = (entry.target, entry.num_draft_tokens)
        yield (of[0], entry.prompts, of[1]), entry.lowest, "published_tau.json"
        yield (of[0], entry.highest_prompts, of[1]), entry.highest, "published_tau.json"
    for row in published_sets()["paper"].rows:
        is_average = row.task is None and row.prompts != "Alpaca"
        is_other_draft = row.where.startswith("transformers") and row.target in ("Qwen/Qwen3-8B", "Qwen/Qwen3-4B")
        if row.dflash.tau is None or is_average or row.temperature or row.thinking:
            continue
        if is_other_draft and row.prompts != "MT-Bench":
            continue  # transformers counts otherwise: 7.87 on Math500, where SGLang has 8.01
        yield (row.target, row.prompts, lengths[row.target]), row.dflash.tau, row.table
    for draft in CATALOG["drafts"]:
        figure = re.match(r"([\d.]+) \(its card, (\w+), block (\d+)\)", draft.get("tau", ""))
        if figure:
            yield (draft["target"], figure[2], int(figure[3]) - 1), float(figure[1]), "catalog.json"


def test_data_agree() -> None:
    found = defaultdict(list)
    for key, tau, place in stated():
        found[key].append((tau, place))
    several = {key: figures for key, figures in found.items() if len(figures) > 1}
    assert len(several) >= 15
    for key, figures in several.items():
        values = [tau for tau, _ in figures]
        assert max(values) - min(values) < 0.051, f"{key}: {figures}"


def test_a_mean_lies_between_its_ends() -> None:
    assert all(entry.lowest <= entry.mean <= entry.highest <= entry.num_draft_tokens + 1 for entry in published_taus())


def test_the_six_kinds_have_the_figures_that_estimate_is_held_against() -> None:
    points = {point.kind: point.tau for point in published_points().points if point.id.startswith("six-gsm8k-")}
    gains = {kind: each["tau"] for kind, each in CATALOG["kinds"]["gains"].items()}
    assert gains.items() <= points.items()
    assert points.keys() - gains.keys() == {"LiLiCorr+conv"}


def test_pages_state_the_mean_that_estimate_takes() -> None:
    """gpt-oss-120b's, the only pair whose figure stands on pages that say no prompts."""
    published = published_draft_tau("z-lab/gpt-oss-120b-DFlash")
    assert published is not None
    found = []
    for page in PAGES:
        for paragraph in re.split(r"\n\s*\n|\n(?=\|)", page.read_text()):
            if "gpt-oss-120b" in paragraph:
                text = " ".join(paragraph.split())
                found += [(page.name, float(figure)) for figure in STATED.findall(text)]
    assert {name for name, _ in found} >= {"deployment.md"}
    assert {figure for _, figure in found} == {published.mean}
    commands = re.findall(r"gpt-oss-120b\S* .*--tau ([\d.]+)", "\n".join(page.read_text() for page in PAGES))
    assert {float(tau) for tau in commands} == {published.mean}
