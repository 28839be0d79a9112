# SPDX-License-Identifier: Apache-2.0
"""A stored diagnosis of a healthy server."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import read_json
from dflash_trt.observe.diagnosis.diagnosis import SCHEMA, Diagnosis

HINT = "dflash-trt doctor URL --json > healthy.json, while the server is well"


def read_baseline(file: Path) -> Diagnosis:
    """Raises ConfigError for what is none, and for one that found something wrong itself."""
    baseline = read_json(file, Diagnosis, ConfigError, what="a diagnosis", hint=HINT)
    if baseline.schema != SCHEMA:
        raise ConfigError(f"{file}: expected {SCHEMA}, found {baseline.schema}", hint=HINT)
    if baseline.findings:
        raise ConfigError(
            f"{file}: expected the diagnosis of a healthy server, found: {baseline.findings[0].name}", hint=HINT
        )
    return baseline
