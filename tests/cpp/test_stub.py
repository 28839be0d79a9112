# SPDX-License-Identifier: Apache-2.0
"""The compiled module's description."""

from __future__ import annotations

import ast

from dflash_trt import _C
from tests.paths import REPOSITORY


def test_the_stub_names_what_the_module_has() -> None:
    """dflash_trt/_C.pyi is written by hand."""
    stub = ast.parse((REPOSITORY / "dflash_trt" / "_C.pyi").read_text())
    described = {node.name for node in stub.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    constants = {ast.unparse(node.target) for node in stub.body if isinstance(node, ast.AnnAssign)}
    described |= {name for name in constants if not name.startswith("_")}
    assert described == {name for name in dir(_C) if not name.startswith("__")}
