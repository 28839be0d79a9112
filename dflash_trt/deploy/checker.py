# SPDX-License-Identifier: Apache-2.0
"""Checks a runtime's configuration: against the release's schema, and against models and GPUs."""

from __future__ import annotations

from typing import Any

import msgspec

from dflash_trt.deploy.finding import Finding
from dflash_trt.deploy.resolved_deployment import ResolvedDeployment, served_by
from dflash_trt.deploy.rules import sglang_rules, trtllm_rules, vllm_rules
from dflash_trt.deploy.rules.catalog_rules import CATALOG_RULES
from dflash_trt.deploy.rules.checked_config import CheckedConfig
from dflash_trt.deploy.rules.choice_rules import chat_mode, choices, packed_weights, parsers, release, unchecked_method
from dflash_trt.deploy.rules.quantized_rules import quantized_draft
from dflash_trt.deploy.rules.target_rules import MODEL_RULES, remote_code
from dflash_trt.deploy.schema import Schema
from dflash_trt.deploy.schema_check import check_schema, coerce
from dflash_trt.deploy.vllm_speculation import with_short_flags

RULES = {"trtllm": trtllm_rules, "vllm": vllm_rules, "sglang": sglang_rules}


def check(config: CheckedConfig) -> list[Finding]:
    """Every finding, the schema's first."""
    document, coerced = coerce(config.schema, config.document)
    config = msgspec.structs.replace(config, document=document)
    findings = [*config.reading, *coerced]
    findings += check_schema(config.schema, document)
    if config.runtime == "vllm":
        document, twice = with_short_flags(document)
        config = msgspec.structs.replace(config, document=document)
        findings += twice
    if not config.is_whole:  # a rule would judge settings that the file changes
        return findings
    rules = RULES[config.runtime]
    dflash_rules = rules.DFLASH_RULES if config.method == "dflash" else ()
    for rule in (
        release,
        unchecked_method,
        packed_weights,
        remote_code,
        *MODEL_RULES,
        *CATALOG_RULES,
        quantized_draft,
        *rules.RULES,
        *dflash_rules,
        choices,
        parsers,
        chat_mode,
    ):
        findings += rule(config)
    return findings


def deployment_config(
    deployment: ResolvedDeployment, schema: Schema, document: dict[str, Any], environment: dict[str, str] | None = None
) -> CheckedConfig:
    """`document` with the models and GPUs of a deployment."""
    return CheckedConfig(
        schema=schema, document=document, served=served_by(deployment, schema.runtime), environment=environment or {}
    )
