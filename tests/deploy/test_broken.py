# SPDX-License-Identifier: Apache-2.0
"""Deliberately broken configurations, each with the message that it must get."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import yaml

from dflash_trt.deploy.checker import check, deployment_config, file_config
from dflash_trt.deploy.finding import ERROR, UNCHECKED
from dflash_trt.deploy.schema import Runtime, load_schema
from dflash_trt.deploy.schema_check import check_schema
from tests.deploy.broken import CASES
from tests.deploy.broken.case import SPEC, Case
from tests.deploy.broken.configuration import changed, checked
from tests.deploy.deployments import rendered, resolved


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_broken(tmp_path: Path, case: Case) -> None:
    found = checked(tmp_path, changed(case.runtime, case.change), case)
    matching = [f for f in found if (f.rule, f.key) == (case.rule, case.key)]
    assert len(matching) == 1, "\n".join(map(str, found))
    line = str(matching[0])
    assert case.words in line
    assert matching[0].severity == case.severity
    assert "\n" not in line
    assert matching[0].fix
    assert {f.rule for f in found if f.severity == ERROR} - {case.rule} == set(case.also)


@pytest.mark.parametrize("runtime", ["trtllm", "vllm", "sglang"])
def test_the_good_configuration_is_good(tmp_path: Path, runtime: Runtime) -> None:
    found = checked(tmp_path, changed(runtime, {}), Case(runtime=runtime, rule="", key="", words=""))
    assert {f.rule for f in found} <= {"backbone", "draft-facts", "draft-place", "hybrid-cache"}
    assert ERROR not in {f.severity for f in found}


def test_at_least_twenty_and_every_rule() -> None:
    assert len(CASES) >= 20


def test_an_empty_name_is_no_directory(tmp_path: Path) -> None:
    """Path("") is the working directory."""
    found = checked(tmp_path, changed("trtllm", {f"{SPEC}.speculative_model": ""}), Case(rule="", key="", words=""))
    assert ("draft-length", UNCHECKED) in {(f.rule, f.severity) for f in found}


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    document = changed("trtllm", {"zz_typo_free": 1, "max_batch_siz": 1, "stream_interval": 0, "max_seq_len": "x"})
    found = checked(tmp_path, document, Case(rule="", key="", words=""))
    assert {"zz_typo_free", "max_batch_siz", "stream_interval", "max_seq_len"} <= {f.key for f in found}


def test_problems_come_in_the_order_of_the_document_and_one_at_a_time() -> None:
    """Whatever order the schema has; a word of the wrong type is not also none of the choices."""
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
    found = check(file_config(file, load_schema("trtllm", None), gpus=None, target=None, draft=None))
    assert {f.rule for f in found if f.severity == UNCHECKED} == {"draft-length", "memory"}
    document = changed("trtllm", {f"{SPEC}.attention_backend": "TRTLLM"})
    file.write_text(yaml.safe_dump(document))
    found = check(file_config(file, load_schema("trtllm", None), gpus=None, target=None, draft=None))
    assert "draft-attention" in {f.rule for f in found if f.severity == UNCHECKED}
