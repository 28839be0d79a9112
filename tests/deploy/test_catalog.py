# SPDX-License-Identifier: Apache-2.0
"""The catalogue is in step with what it is made of, and docs/checkpoints.md with it."""

from __future__ import annotations

import json
import re

import pytest

from dflash_trt.checkpoint.dialects.recognise import DIALECTS
from dflash_trt.deploy.catalog import catalog, row, trained_for
from dflash_trt.deploy.published import published_drafts
from tests.cli.commands import run
from tests.paths import REPOSITORY
from tools.catalog_page import replace_catalogue


def test_the_page_is_what_the_data_says() -> None:
    """After a change of the data: make catalog"""
    text = (REPOSITORY / "docs" / "checkpoints.md").read_text()
    assert replace_catalogue(text) == text


def test_every_published_draft_and_every_deployment_is_in_it() -> None:
    drafts = {known.draft: known for known in catalog().drafts}
    assert published_drafts().keys() <= drafts.keys()
    for draft, known in drafts.items():
        if draft in published_drafts():
            assert known.target == published_drafts()[draft].target
    files = {
        file.name: re.search(r"^draft: *(\S+)", file.read_text(), re.M)[1]  # type: ignore[index]
        for file in (REPOSITORY / "build_configs").glob("*.yaml")
    }
    assert {name: draft for draft, known in drafts.items() for name in known.deployments} == files


def test_families_and_dialects_are_known_ones() -> None:
    names = {dialect.name for dialect in DIALECTS}
    assert {known.family for known in catalog().drafts} == catalog().families.keys()
    assert {family.dialect for family in catalog().families.values()} - {None} <= names


def test_memory_follows_from_the_facts() -> None:
    """gpt-oss-120b's draft: 8 x 92.9 M parameters and an fc of 41.5 M (its card: 1.46 GiB in BF16)."""
    known = next(known for known in catalog().drafts if known.draft == "z-lab/gpt-oss-120b-DFlash")
    sizes = known.weight_bytes()
    assert sizes is not None
    assert sizes["BF16"] == 2 * (8 * (2880 * 4096 * 2 + 2880 * 512 * 2 + 3 * 2880 * 7680) + 5 * 2880 * 2880)
    assert row(known)[-3:] == ("1.57 GB", "0.83 GB", "0.50 GB")


def test_inspect_shows_it() -> None:
    document = json.loads(run("inspect", "--catalog", "--json").stdout)
    assert len(document["catalog"]["drafts"]) == len(catalog().drafts)
    both = run("inspect", "--catalog", "somewhere")
    assert (both.returncode, "give PATH or --catalog" in both.stderr) == (2, True)


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("openai/gpt-oss-120b", None),
        ("nvidia/gpt-oss-120b-Eagle3", None),
        ("Qwen/Qwen3-8B", "openai/gpt-oss-120b"),
        ("tests", None),
    ],
)
def test_the_target_that_a_draft_was_trained_for(target: str, expected: str | None) -> None:
    assert trained_for("z-lab/gpt-oss-120b-DFlash", target) == expected
    assert trained_for("tests", target) is None
