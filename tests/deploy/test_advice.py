# SPDX-License-Identifier: Apache-2.0
"""Each edit that a finding names is made, and leads neither to the finding again nor to another error."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import yaml

from dflash_trt.deploy.deployment_file import DeploymentFile, load_deployment
from dflash_trt.deploy.finding import ERROR, UNCHECKED, Finding
from dflash_trt.deploy.render import render
from dflash_trt.deploy.resolve import resolve
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.errors import ConfigError
from tests.deploy.broken.case import Case, changed, checked
from tests.deploy.broken.cases import CASES
from tests.deploy.broken.edits import Edit, applied, named_edits
from tests.deploy.deployments import BUILD_CONFIGS
from tests.paths import REPOSITORY

LEAST = 60
"""Findings whose edits are made: fewer, and the broken configurations were not looked at."""


def errors(found: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.rule, finding.key) for finding in found if finding.severity == ERROR}


def what_comes(directory: Path, case: Case, document: dict[str, Any], finding: Finding, edits: list[Edit]) -> str:
    """What is wrong with an edit; empty for one that helps."""
    before = errors(checked(directory, document, case))
    after = checked(directory, applied(document, edits), case)
    if new := errors(after) - before:
        return f"{finding}\n  {edits} leads to {new}"
    again = [f for f in after if (f.rule, f.key) == (finding.rule, finding.key) and f.severity != UNCHECKED]
    return f"{finding}\n  {edits} leaves {again[0]}" if again else ""


@pytest.mark.full
def test_every_edit_that_is_named_helps(tmp_path: Path) -> None:
    """One of several that are offered to choose from; each where alternatives are named."""
    seen = set[tuple[str, str, str, str]]()
    failures, made = [], 0
    for case in CASES.values():
        document, schema = changed(case.runtime, case.change), load_schema(case.runtime, case.version)
        for finding in checked(tmp_path, document, case):
            text = (case.runtime, finding.rule, finding.key, finding.fix)
            alternatives = [] if text in seen else named_edits(finding, document, schema)
            seen.add(text)
            came = [what_comes(tmp_path, case, document, finding, edits) for edits in alternatives]
            made += bool(came)
            failures += [] if "one of them" in finding.fix and not all(came) else [each for each in came if each]
    assert failures == [], "\n".join(failures)
    assert made >= LEAST


GOLDEN = REPOSITORY / "tests" / "golden" / "findings.txt"


def findings_text(directory: Path) -> str:
    """What a check says of each broken configuration beyond what it says of the good one."""
    lines = []
    for name, case in CASES.items():
        good = set(map(str, checked(directory, changed(case.runtime, {}), case)))
        found = checked(directory, changed(case.runtime, case.change), case)
        lines += [f"{name}", *(f"  {finding}" for finding in found if str(finding) not in good)]
    return "".join(f"{line}\n" for line in lines)


@pytest.mark.full
def test_texts_are_frozen(tmp_path: Path) -> None:
    """After a wanted change: python -m tests.deploy.test_advice"""
    assert findings_text(tmp_path) == GOLDEN.read_text()


REFUSED: list[tuple[Runtime, dict[str, Any]]] = [
    ("vllm", {"tensor_parallel": 3}),
    ("vllm", {"expert_parallel": 3}),
    ("vllm", {"tensor_parallel": 4, "expert_parallel": 3}),
    ("trtllm", {"num_ranks": 2}),
    ("trtllm", {"num_ranks": 8}),
    ("trtllm", {"mode": "engine", "num_ranks": 3}),
    ("trtllm", {"mode": "engine", "num_ranks": 8, "enable_attention_dp": True, "runtimes": ["trtllm"]}),
    ("trtllm", {"enable_attention_dp": True}),
    ("trtllm", {"draft_schedule": {1: 5, 17: 3}}),
    ("trtllm", {"draft_schedule": {1: 9, 17: 4, 33: 0}}),
    ("sglang", {"draft_schedule": {1: 9, 17: 4}}),
    ("sglang", {"runtimes": ["vllm"]}),
]
"""Changes of a deployment, each refused with a hint that names an edit."""
DEPLOYMENT = BUILD_CONFIGS / "gpt-oss-120b.b300x8.latency.yaml"


def written(runtime: Runtime, changes: dict[str, Any]) -> None:
    """Resolves and renders the deployment, changed."""
    values = msgspec.to_builtins(load_deployment(DEPLOYMENT)) | changes
    kept = {key: value for key, value in values.items() if value is not None}
    render(resolve(msgspec.convert(kept, DeploymentFile), "x"), runtime, "dflash", host="127.0.0.1", port=8000)


def hinted(runtime: Runtime, changes: dict[str, Any], refused: ConfigError) -> list[tuple[Runtime, dict[str, Any]]]:
    """Each edit that a refusal's hint names, made."""
    (subject,) = re.findall(r"^x: (\w+):", refused.message) or [""]
    edited: list[tuple[Runtime, dict[str, Any]]] = []
    for part in re.split(r",? or |; ", refused.hint or ""):
        if found := re.fullmatch(r"set (it|\w+) to (.+)", part):
            subject = subject if found[1] == "it" else found[1]
            value = changes["draft_schedule"][1] if found[2] == "the length at batch 1" else yaml.safe_load(found[2])
            edited.append((runtime, {**changes, subject: value}))
        elif part.isdigit():  # set num_ranks to 1 or 8
            edited.append((runtime, {**changes, subject: int(part)}))
        elif found := re.fullmatch(r"remove (it|\w+)", part):
            edited.append((runtime, {**changes, (subject if found[1] == "it" else found[1]): None}))
        elif part.startswith("add "):
            edited.append((runtime, changes | yaml.safe_load(part.removeprefix("add "))))
        elif part.startswith("write 1"):
            schedule = {at: max(1, length) for at, length in changes["draft_schedule"].items()}
            edited.append((runtime, {**changes, "draft_schedule": schedule}))
        elif part.startswith("give --runtime "):
            edited.append((part.split()[-1], changes))  # type: ignore[arg-type]
    return edited


@pytest.mark.parametrize(("runtime", "changes"), REFUSED)
def test_every_edit_that_a_refused_deployment_names_helps(runtime: Runtime, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError) as refused:
        written(runtime, changes)
    edited = hinted(runtime, changes, refused.value)
    assert edited, refused.value.hint
    for each in edited:
        written(*each)


if __name__ == "__main__":
    with TemporaryDirectory() as folder:
        GOLDEN.write_text(findings_text(Path(folder)))
