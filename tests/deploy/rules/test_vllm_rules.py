# SPDX-License-Identifier: Apache-2.0
"""vLLM's ways of giving a draft, arguments of earlier releases, and topologies that were not looked up."""

from __future__ import annotations

import json

import pytest

from dflash_trt.deploy.finding import ERROR, UNCHECKED, WARNING
from dflash_trt.deploy.schema import load_schema, renamed_flags
from dflash_trt.deploy.vllm_speculation import inferred_method, with_short_flags
from tests.deploy.rules.commands import found, vllm

DRAFT = "z-lab/Qwen3-8B-DFlash-b16"
SHORT = f"vllm serve Qwen/Qwen3-8B --spec-method dflash --spec-model {DRAFT} --spec-tokens 24"


def test_short_flags() -> None:
    """Rules see the draft that --spec-model names, and JSON keys with dashes."""
    dashes = json.dumps({"method": "dflash", "model": DRAFT, "num-speculative-tokens": 24})
    for command in (SHORT, f"vllm serve m --speculative-config '{dashes}'"):
        assert [finding.severity for finding in found(command, "draft-length")] == [ERROR]
    (finding,) = found(f"{SHORT} --speculative-config.method dflash", "twice")
    assert (finding.severity, finding.key) == (ERROR, "speculative_config.method")
    assert with_short_flags({"port": 1}) == ({"port": 1}, [])
    assert with_short_flags({"speculative_config": "x"}) == ({"speculative_config": "x"}, [])


@pytest.mark.parametrize(
    ("model", "architectures", "expected"),
    [
        ("a/dflash-eagle3", [], "eagle3"),
        ("a/EAGLE-dflash", [], "eagle"),
        ("a/DFlash", ["Qwen3DSparkModel"], "dflash"),
        ("a/b", ["Qwen3DSparkModel"], "dspark"),
        ("a/b", ["DFlashDraftModel"], "draft_model"),
        ("[ngram]", [], "ngram"),
        (None, [], "draft_model"),
    ],
)
def test_inferred_methods(model: str | None, architectures: list[str], expected: str) -> None:
    assert inferred_method({"model": model}, architectures) == expected


def test_renamed_arguments_exist_under_their_new_names_alone() -> None:
    for runtime, names in [*renamed_flags().renamed.items(), *renamed_flags().deprecated.items()]:
        schema = load_schema(runtime)
        for old, new in names.items():
            outer, _, inner = new.partition(".")
            assert old not in schema.names()
            assert outer in schema.properties()
            assert not inner or inner in schema.properties("SpeculativeConfig")


@pytest.mark.parametrize(
    ("command", "severity", "fix"),
    [
        ("vllm serve m --speculative-model d", ERROR, "write speculative_config.model"),
        ("vllm serve m --rope-scaling '{}'", ERROR, "write hf_overrides"),
        ("sglang serve --model m --mamba-scheduler-strategy x", ERROR, "write mamba_radix_cache_strategy"),
        ("sglang serve --model m --cuda-graph-max-bs 8", ERROR, "write cuda_graph_max_bs_decode"),
        ("sglang serve --model m --speculative-dflash-draft-window-size 8", ERROR,
         "write speculative_draft_window_size"),
        ("sglang serve --model m --disable-cuda-graph", WARNING, "write cuda_graph_backend_decode"),
    ],
)  # fmt: skip
def test_arguments_of_earlier_releases(command: str, severity: str, fix: str) -> None:
    (finding,) = found(command, "renamed-key")
    assert (finding.severity, finding.fix) == (severity, fix)


@pytest.mark.parametrize(
    "command",
    [
        """vllm serve m --engine-args '{"max-num-seqs": 8}'""",
        """sglang serve --model m --engine-args '{"tp_size": 8}'""",
        "cat > c.yaml <<E\nmax_batch_size: 1\nengine: {max_seq_len: 8}\nE\ntrtllm-serve m --config c.yaml",
    ],
)
def test_an_unknown_key_that_holds_known_ones(command: str) -> None:
    (finding,) = found(command, "nested-keys")
    assert (finding.severity, finding.fix) == (ERROR, "move them out of it")


@pytest.mark.parametrize(
    ("flags", "rule"),
    [
        ("""--kv-transfer-config '{"kv_connector": "NixlConnector"}'""", "disaggregated"),
        ("--pipeline-parallel-size 2", "pipeline"),
        ("""--hf-overrides '{"rope_parameters": {"rope_type": "yarn"}}'""", "rope-overrides"),
    ],
)
def test_what_was_not_looked_up(flags: str, rule: str) -> None:
    assert [finding.severity for finding in found(f"{vllm(DRAFT)} {flags}", rule)] == [UNCHECKED]
    assert found(f"vllm serve m {flags}", rule) == []
