# SPDX-License-Identifier: Apache-2.0
"""Reads onnx_operators.json: what TensorRT's ONNX parser imports, by release."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

OPERATORS: dict[str, Any] = json.loads((Path(__file__).parent / "onnx_operators.json").read_text())
RELEASES = tuple(OPERATORS["releases"])
TYPES: dict[str, list[str]] = OPERATORS["types"]
ADDED: dict[str, str] = OPERATORS["added"]


def importable(op_type: str, release: str) -> bool:
    """Whether the parser of a release has an importer for the operator."""
    return op_type in TYPES and (op_type not in ADDED or release >= ADDED[op_type])
