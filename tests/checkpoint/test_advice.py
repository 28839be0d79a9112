# SPDX-License-Identifier: Apache-2.0
"""Each value that a refused config.json is told to have leads back to the draft's facts, or the refusal says that two
values contradict each other.

One key after another of every dialect is removed or changed; what the message then names is written into the file.
"""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_spec import DraftSpec
from dflash_trt.checkpoint.facts import CONFLICT
from dflash_trt.errors import CheckpointError
from tests.checkpoint.dialect_samples import WRITERS

REMOVED = object()
Path_ = tuple[str, ...]
REFUSAL = re.compile(
    r"config\.json: (?:missing key )?([\w.]+): expected (.*?)(?:, which is what is computed)?(?:, found .*)?$"
)


def keys(config: dict[str, Any], outer: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    for key, value in config.items():
        yield (*outer, key), value
        if isinstance(value, dict):
            yield from keys(value, (*outer, key))


def wrong(value: Any) -> Iterator[Any]:
    """Other values than a file's, some of its type."""
    yield REMOVED
    if isinstance(value, bool) or value is None:
        yield not value
    elif isinstance(value, int):
        yield from (value + 1, 0)
    elif isinstance(value, list):
        yield from (value[:-1], [])
    yield "other"


def edited(config: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(config)
    place = result
    for key in path[:-1]:
        place = place.setdefault(key, {})
    if value is REMOVED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return result


def named(expected: str) -> list[Any]:
    """The values that a message names; none where it gives a range or a type."""
    text = re.sub(r" \(.*\)$|, which have .*$|, the causality .*$", "", expected)
    if text.startswith("one of "):
        return text.removeprefix("one of ").split(", ")
    parts = ["true", "false"] if text == "true or false" else re.split(r" or (?!true with)", text)
    try:
        return [json.loads(part.replace("'", '"')) for part in parts]
    except ValueError:
        return []


def refused(draft: Path, config: dict[str, Any]) -> CheckpointError | DraftSpec:
    (draft / "config.json").write_text(json.dumps(config))
    try:
        return read_draft(draft).spec
    except CheckpointError as error:
        return error


def facts(spec: CheckpointError | DraftSpec) -> object:
    """All but the backbone's name, which no tensor tells, and nothing is computed from."""
    return spec if isinstance(spec, CheckpointError) else msgspec.structs.replace(spec, model_type="")


@pytest.mark.full
@pytest.mark.parametrize("name", WRITERS)
def test_every_value_that_is_named_is_right(name: str, tmp_path: Path) -> None:
    draft = WRITERS[name](tmp_path / "draft")
    config = json.loads((draft / "config.json").read_text())
    right, made = facts(refused(draft, config)), 0
    assert isinstance(right, DraftSpec)
    failures = []
    for path, value in keys(config):
        for other in wrong(value):
            broken = edited(config, path, other)
            error = refused(draft, broken)
            if not isinstance(error, CheckpointError) or error.hint == CONFLICT:
                continue
            found = REFUSAL.search(error.message)
            values = [] if found is None else named(found[2])
            if not values:
                continue
            assert found is not None
            made += 1
            results = [facts(refused(draft, edited(broken, tuple(found[1].split(".")), each))) for each in values]
            if right not in results:
                failures.append(f"{error.message}: {results[0]}")
    assert failures == [], "\n".join(failures)
    assert made >= 5
