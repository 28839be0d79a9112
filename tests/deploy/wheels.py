# SPDX-License-Identifier: Apache-2.0
"""Functions of vLLM's and SGLang's wheels, taken out of their files and run without the packages around them."""

from __future__ import annotations

import ast
import fcntl
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

VLLM, SGLANG = ("vllm", "0.33.0"), ("sglang", "0.5.23")
PLACE = Path(tempfile.gettempdir()) / "dflash-trt-wheels"


@cache
def sources(name: str, version: str) -> Path:
    """Folder of a wheel's Python files, downloaded once a machine (0.3 GB); skips where no index is reached."""
    PLACE.mkdir(exist_ok=True)
    folder = PLACE / f"{name}-{version}"
    with (PLACE / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if folder.is_dir():
            return folder
        with tempfile.TemporaryDirectory(dir=PLACE) as scratch:
            command = [
                sys.executable,
                "-m",
                "pip",
                "download",
                "--quiet",
                "--no-deps",
                "-d",
                scratch,
                f"{name}=={version}",
            ]
            if subprocess.run(command, capture_output=True, check=False).returncode:
                pytest.skip(f"{name} {version} cannot be downloaded here")
            (wheel,) = Path(scratch).glob("*.whl")
            inner = Path(scratch) / "files"
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(inner, [member for member in archive.namelist() if member.endswith(".py")])
            inner.rename(folder)
    return folder


def definitions(file: Path, names: Iterable[str], namespace: dict[str, Any], *, methods: Iterable[str] = ()) -> None:
    """Run the definitions of some names of a file in `namespace`; of classes only the named methods and constants."""
    wanted, kept = set(names), tuple(methods)
    body: list[ast.stmt] = [ast.ImportFrom("__future__", [ast.alias("annotations")], 0)]
    for node in ast.parse(file.read_text()).body:
        if _name(node) not in wanted:
            continue
        if isinstance(node, ast.ClassDef) and kept:
            node.body = [part for part in node.body if _name(part).startswith(kept)] or [ast.Pass()]
            node.decorator_list = []
        elif isinstance(node, ast.FunctionDef):
            node.decorator_list = []
        body.append(node)
    assert {_name(node) for node in body} >= wanted
    tree = ast.fix_missing_locations(ast.Module(body, []))
    exec(compile(tree, str(file), "exec"), namespace)


def module(name: str, file: Path, **stubs: ModuleType) -> ModuleType:
    """A file that needs little else, run as a module, with modules in the place of those that it imports."""
    found, before = ModuleType(name), dict(sys.modules)
    sys.modules.update(stubs)
    try:
        exec(compile(file.read_text(), str(file), "exec"), found.__dict__)
    finally:
        for stub in stubs:
            sys.modules.pop(stub, None)
            sys.modules.update({stub: before[stub]} if stub in before else {})
    return found


def _name(node: ast.AST) -> str:
    if isinstance(node, ast.ClassDef | ast.FunctionDef):
        return node.name
    target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
    return target.id if isinstance(target, ast.Name) else ""
