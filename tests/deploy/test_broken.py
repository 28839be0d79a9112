# SPDX-License-Identifier: Apache-2.0
"""Deliberately broken configurations: the message that each must get, and that each edit that it names helps."""

from __future__ import annotations

import json
import re
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import pytest
import yaml

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.deploy.checker import check, deployment_config
from dflash_trt.deploy.deployment_file import DeploymentFile, load_deployment
from dflash_trt.deploy.file_configs import file_configs
from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING, Finding
from dflash_trt.deploy.render import render
from dflash_trt.deploy.resolve import resolve
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.deploy.schema_check import check_schema
from dflash_trt.errors import ConfigError
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from tests.cli.commands import run_here
from tests.deploy.broken.cases import CASES, SPEC, Case, changed, checked
from tests.deploy.broken.edits import Edit, applied, named_edits
from tests.deploy.deployments import BUILD_CONFIGS, rendered, resolved
from tests.paths import FIXTURES, REPOSITORY


def write_draft(tmp_path: Path, **config: object) -> Path:
    """The fixture draft with some keys of its config.json changed."""
    directory = tmp_path / "draft"
    shutil.copytree(FIXTURES / "tiny-gpt-oss-dflash", directory)
    values = json.loads((directory / "config.json").read_text()) | config
    (directory / "config.json").write_text(json.dumps(values))
    return directory


def test_native_backbone_of_a_checkpoint(tmp_path: Path) -> None:
    """gpt_oss leads to layers without qkv_proj; qwen3 to a dense backbone, whatever DFlash architecture is named."""
    case = Case()
    document = changed("trtllm", {f"{SPEC}.max_draft_len": 7})
    gpt_oss = checked(tmp_path, document, case, draft=str(FIXTURES / "tiny-gpt-oss-dflash"))
    (finding,) = [f for f in gpt_oss if f.rule == "backbone"]
    assert finding.severity == ERROR
    assert "found 'gpt_oss'; write qwen3 there and keep attention_bias" in str(finding)
    quantize_checkpoint(read_draft(FIXTURES / "tiny-gpt-oss-dflash"), load_recipe("bf16"), tmp_path / "bf16")
    for draft in (write_draft(tmp_path, model_type="qwen3"), tmp_path / "bf16"):
        assert [f for f in checked(tmp_path, document, case, draft=str(draft)) if f.rule == "backbone"] == []


def test_facts_of_a_checkpoint(tmp_path: Path) -> None:
    draft = write_draft(tmp_path, model_type="qwen3")
    mask = json.loads((draft / "config.json").read_text())["dflash_config"]["mask_token_id"]
    case = Case()
    taps = json.loads((draft / "config.json").read_text())["dflash_config"]["target_layer_ids"]
    good = {f"{SPEC}.max_draft_len": 7, f"{SPEC}.mask_token_id": mask, f"{SPEC}.target_layer_ids": taps}
    document = changed("trtllm", {**good, f"{SPEC}.mask_token_id": mask + 1})
    found = checked(tmp_path, document, case, draft=str(draft))
    assert any(f.rule == "draft-facts" and f"expected {mask}" in f.problem for f in found)
    document = changed("trtllm", good)
    assert not [f for f in checked(tmp_path, document, case, draft=str(draft)) if f.rule == "draft-facts"]


@pytest.mark.parametrize(("recipe", "is_refused"), [("nvfp4", True), ("nvfp4-native", False)])
def test_quantised_projections_in_native_mode(tmp_path: Path, recipe: str, is_refused: bool) -> None:
    draft = tmp_path / "quantised"
    run_here("quantize", FIXTURES / "tiny-qwen3-dflash", "-o", draft, "--recipe", recipe)
    document = changed("trtllm", {f"{SPEC}.max_draft_len": 7})
    found = checked(tmp_path, document, Case(), draft=str(draft))
    refusals = [str(f) for f in found if f.rule == "quantized-context"]
    assert bool(refusals) == is_refused
    if is_refused:
        assert "found layers.0.self_attn.q_proj and" in refusals[0]
        assert "in NVFP4; quantise with --recipe nvfp4-native, or serve in engine mode" in refusals[0]
    vllm = Case(runtime="vllm")
    document = changed("vllm", {f"{SPEC}.num_speculative_tokens": 7})
    warned = [f for f in checked(tmp_path, document, vllm, draft=str(draft)) if f.rule == "quantized-context"]
    assert [f.severity for f in warned] == ([WARNING] if is_refused else [])


GOLDEN = REPOSITORY / "tests" / "golden" / "findings.txt"


@cache
def good(runtime: Runtime) -> frozenset[str]:
    """Findings of the good configuration."""
    with TemporaryDirectory() as folder:
        return frozenset(map(str, checked(Path(folder), changed(runtime, {}), Case(runtime=runtime))))


def said(directory: Path, case: Case) -> str:
    """Findings that the good configuration does not have, each on a line; its own for itself."""
    known = frozenset() if case == Case(runtime=case.runtime) else good(case.runtime)
    found = checked(directory, changed(case.runtime, case.change), case)
    return "".join(f"  {finding}\n" for finding in found if str(finding) not in known)


@pytest.mark.parametrize("name", CASES)
def test_broken(tmp_path: Path, name: str) -> None:
    """After a wanted change: python -m tests.deploy.test_broken"""
    assert f"\n{name}\n{said(tmp_path, CASES[name])}\n" in f"\n{GOLDEN.read_text()}"


def test_no_golden_finding_is_left_over() -> None:
    assert [line for line in GOLDEN.read_text().splitlines() if line and not line.startswith(" ")] == list(CASES)


def test_empty_names_and_several_problems(tmp_path: Path) -> None:
    """Path("") is the working directory."""
    found = checked(tmp_path, changed("trtllm", {f"{SPEC}.speculative_model": ""}), Case())
    assert ("draft-length", UNCHECKED) in {(f.rule, f.severity) for f in found}
    document = changed("trtllm", {"zz_typo_free": 1, "max_batch_siz": 1, "stream_interval": 0, "max_seq_len": "x"})
    found = checked(tmp_path, document, Case())
    assert {"zz_typo_free", "max_batch_siz", "stream_interval", "max_seq_len"} <= {f.key for f in found}


def test_problems_come_in_the_order_of_the_document_and_one_at_a_time() -> None:
    """The order of the schema does not matter; a word of the wrong type is not also reported as an invalid choice."""
    spec = {"attention_backend": 3, "decoding_type": "DFlash", "max_draft_lenn": 1, "max_draft_len": -1}
    document = {"stream_interval": 0, "zz": 1, SPEC: spec, "max_batch_size": "x", "backend": 1}
    found = [(f.key, f.rule) for f in check_schema(load_schema("trtllm", None), document)]
    assert found == [
        ("stream_interval", "out-of-range"), ("zz", "unknown-key"), (f"{SPEC}.attention_backend", "wrong-type"),
        (f"{SPEC}.max_draft_lenn", "unknown-key"), (f"{SPEC}.max_draft_len", "out-of-range"),
        ("max_batch_size", "wrong-type"), ("backend", "wrong-type"),
    ]  # fmt: skip


def test_engine_mode_needs_a_release_that_it_knows() -> None:
    deployment = resolved("gpt-oss-120b.b300x8.nvfp4")
    schema = load_schema("trtllm", None)
    later = msgspec.structs.replace(schema, rules={k: v for k, v in schema.rules.items() if k != "engine_mode"})
    document = rendered("gpt-oss-120b.b300x8.nvfp4", "trtllm").arguments
    assert not any(f.rule == "engine-mode" for f in check(deployment_config(deployment, schema, document)))
    (finding,) = [f for f in check(deployment_config(deployment, later, document)) if f.rule == "engine-mode"]
    assert finding.severity == ERROR
    assert "found tensorrt_llm 1.4.0rc1; serve the draft checkpoint in native mode" in str(finding)


def test_what_cannot_be_checked_is_said(tmp_path: Path) -> None:
    file = tmp_path / "config"
    file.write_text(yaml.safe_dump(changed("trtllm", {f"{SPEC}.speculative_model": "someone/draft"})))
    found = check(file_configs(file, load_schema("trtllm", None), gpus=None, target=None, draft=None)[0])
    assert {f.rule for f in found if f.severity == UNCHECKED} == {"context-length", "draft-length", "memory"}
    document = changed("trtllm", {f"{SPEC}.attention_backend": "TRTLLM"})
    file.write_text(yaml.safe_dump(document))
    found = check(file_configs(file, load_schema("trtllm", None), gpus=None, target=None, draft=None)[0])
    assert "draft-attention" in {f.rule for f in found if f.severity == UNCHECKED}


LEAST = 60
"""Findings whose edits are made: fewer, and the broken configurations were not looked at."""


def errors(found: list[Finding]) -> set[tuple[str, str]]:
    return {(finding.rule, finding.key) for finding in found if finding.severity == ERROR}


def what_comes(directory: Path, case: Case, document: dict[str, Any], finding: Finding, edits: list[Edit]) -> str:
    """Problem of an edit; empty for one that helps."""
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
        elif found := re.match(r"serve-config --runtime (\w+)", part):
            edited.append((found[1], changes))  # type: ignore[arg-type]
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
        GOLDEN.write_text("\n".join(f"{name}\n{said(Path(folder), case)}" for name, case in CASES.items()) + "\n")
