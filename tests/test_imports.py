# SPDX-License-Identifier: Apache-2.0
"""Imports inside dflash_trt point one way, and what is heavy is loaded where it is used."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

PACKAGE = REPOSITORY / "dflash_trt"
# A room imports from lower floors and from itself.
FLOORS = [
    {"errors", "_C", ""},  # "": the package itself, for its version
    {"files", "launch_environment", "progress_display"},
    {"checkpoint", "engine"},
    {"kvcache"},
    {"graph", "quantize", "drafter", "targets"},
    {"cpu"},
    {"runtime"},
    {"llm"},
    {"builder", "deploy", "doctor", "dynamo", "measure", "server", "triton", "trtllm"},
    {"quantize/search"},
    {"observe"},
    {"cli"},
    {"__main__"},
]
# The only steps sideways: the manifest holds specs; the CPU drafter and calibration run the graphs; Triton serves what
# TensorRT-LLM runs, and both read deployments; Dynamo's worker counts in the server's words.
SIDEWAYS = {
    ("engine", "checkpoint"), ("drafter", "graph"), ("quantize", "graph"),
    ("trtllm", "deploy"), ("triton", "deploy"), ("triton", "trtllm"),
    ("dynamo", "server"),
}  # fmt: skip
# Three circles (docs/structure.md): the mission, its rehearsal without a GPU, and the annex.
MISSION = {"checkpoint", "quantize", "graph", "engine", "builder", "deploy", "trtllm", "triton"}
REHEARSAL = {"kvcache", "targets", "cpu", "drafter", "runtime", "measure", "server", "dynamo", "llm"}
ANNEX = {"observe", "doctor"}
# What the mission may know of the rehearsal: the Backend protocol with its values, and of the drafter what runs inside
# TensorRT-LLM, too.
BOUNDARY = {
    "dflash_trt.runtime.acceptance", "dflash_trt.runtime.backend", "dflash_trt.runtime.completion",
    "dflash_trt.runtime.metrics", "dflash_trt.runtime.options", "dflash_trt.runtime.prompts",
    "dflash_trt.runtime.sampling", "dflash_trt.llm", "dflash_trt.targets.tokenizer",
    "dflash_trt.drafter.candidate_selector", "dflash_trt.drafter.executor",
    "dflash_trt.drafter.launcher", "dflash_trt.drafter.tensorrt_executor",
}  # fmt: skip
# The one module that chooses between the runtimes, and so looks up at TensorRT-LLM's.
CHOOSER = "runtime/open_backend.py"
HEAVY = {
    "torch",
    "onnx",
    "onnxruntime",
    "tensorrt",
    "transformers",
    "numpy",
    "huggingface_hub",
    "pynvml",
    "httpx",
    "pyarrow",
    "matplotlib",
    "jinja2",
    "rich",
    "jsonschema",
}


def floor(room: str) -> int:
    return next(height for height, rooms in enumerate(FLOORS) if room in rooms)


def room_of(module: str) -> str:
    """dflash_trt.checkpoint.draft_checkpoint -> checkpoint; what searches for a recipe measures, so it is a room."""
    return "quantize/search" if module.startswith("dflash_trt.quantize.search") else ([*module.split("."), ""])[1]


def room_at(file: Path) -> str:
    """The room that a file lies in; "" for the package itself."""
    module = ".".join(("dflash_trt", *file.relative_to(PACKAGE).with_suffix("").parts))
    return room_of(module).replace("__init__", "")


def is_room(name: str) -> bool:
    """Whether dflash_trt.<name> is a module: the package's API has names that are none."""
    return any(PACKAGE.glob(f"{name}.py*")) or (PACKAGE / name).is_dir()


@cache
def imports(file: Path) -> list[tuple[int, str]]:
    """Line and name of every module that `file` imports, at any depth."""
    return list(_imports(file))


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}:{node.lineno}: expected an absolute import"
            assert node.module is not None
            inner = [alias.name for alias in node.names if node.module == "dflash_trt" and is_room(alias.name)]
            yield from ((node.lineno, name) for name in [f"dflash_trt.{name}" for name in inner] or [node.module])


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def test_every_room_has_a_floor() -> None:
    rooms = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name != "__pycache__"}
    modules = {path.stem for path in PACKAGE.glob("*.py*")} - {"__init__"}
    assert rooms | modules | {"", "quantize/search"} == set().union(*FLOORS)


def test_imports_point_down() -> None:
    assert [wrong for file in sources() for wrong in upward_imports(file)] == []


def upward_imports(file: Path) -> Iterator[str]:
    """What `file` imports from a room that it may not look into."""
    here = room_at(file)
    for line, module in imports(file):
        if module.partition(".")[0] != "dflash_trt" or here == "":
            continue  # the package itself names its API, and loads it on demand
        there = room_of(module).replace("__version__", "")
        if str(file.relative_to(PACKAGE)) == CHOOSER and there in ("deploy", "trtllm"):
            continue
        if not (here == there or floor(there) < floor(here) or (here, there) in SIDEWAYS):
            yield f"{file.relative_to(PACKAGE)}:{line}: {here} may not import {there} ({module})"


def test_the_mission_knows_of_the_other_circles_by_the_backend_protocol_alone() -> None:
    assert [wrong for file in sources() for wrong in imports_across_circles(file)] == []


def test_only_the_command_line_imports_the_annex() -> None:
    importers = {
        room_at(file)
        for file in sources()
        for _, module in imports(file)
        if room_of(module) in ANNEX and room_at(file) != room_of(module)
    }
    assert importers <= {"cli"} | ANNEX


def imports_across_circles(file: Path) -> Iterator[str]:
    """What a file of the mission imports from another circle, beyond the boundary."""
    if room_at(file) in MISSION:
        for line, module in imports(file):
            if room_of(module) in REHEARSAL | ANNEX and module not in BOUNDARY:
                yield f"{file.relative_to(PACKAGE)}:{line}: {module}"


def test_an_import_across_circles_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    file = PACKAGE / "deploy" / "planted.py"
    monkeypatch.setattr(Path, "read_text", lambda _: "def late():\n    from dflash_trt.observe.estimate import step\n")
    assert list(imports_across_circles(file)) == ["deploy/planted.py:2: dflash_trt.observe.estimate"]


def test_an_upward_import_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = PACKAGE / "checkpoint" / "planted.py"
    monkeypatch.setattr(Path, "read_text", lambda _: "def late():\n    from dflash_trt.runtime import decoder\n")
    assert list(upward_imports(file)) == [
        "checkpoint/planted.py:2: checkpoint may not import runtime (dflash_trt.runtime)"
    ]


def loaded_by(script: str) -> set[str]:
    """The heavy packages in sys.modules after `script`."""
    code = f"import sys\nsys.argv[1:] = ['--help']\ntry:\n    {script}\nexcept SystemExit:\n    pass\n"
    report = "print('\\nloaded:', *{name.partition('.')[0] for name in sys.modules})"
    result = subprocess.run([sys.executable, "-c", code + report], capture_output=True, text=True, check=True)
    _, _, names = result.stdout.rpartition("loaded:")
    return HEAVY & set(names.split())


@pytest.mark.parametrize(
    "script", ["import dflash_trt", "import runpy; runpy.run_module('dflash_trt', run_name='__main__')"]
)
def test_nothing_heavy_is_loaded(script: str) -> None:
    assert loaded_by(script) == set()


def test_the_measure_works() -> None:
    assert loaded_by("import dflash_trt.graph.onnx_builder") >= {"numpy", "onnx"}


def test_inspect_loads_nothing_heavy(draft_dir: Path, target_dir: Path) -> None:
    """Reading facts is a matter of headers: no framework is in the way of `inspect --json`."""
    arguments = ["inspect", str(draft_dir), "--target", str(target_dir), "--json"]
    script = f"sys.argv[1:] = {arguments}; from dflash_trt.cli import main; main()"
    assert loaded_by(script) == set()


def test_build_needs_no_framework(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    """The extra `build` is the package onnx alone."""
    arguments = ["build", str(draft_dir), "--target", str(target_dir), "-o", str(tmp_path / "engine")]
    script = f"sys.argv[1:] = {arguments}; from dflash_trt.cli import main; main()"
    assert loaded_by(script) == {"numpy", "onnx"}


def test_estimate_loads_no_framework() -> None:
    config = REPOSITORY / "build_configs" / "gpt-oss-120b.b300x8.latency.yaml"
    arguments = ["estimate", str(config), "--tau", "4.7", "--json"]
    script = f"sys.argv[1:] = {arguments}; from dflash_trt.cli import main; main()"
    assert loaded_by(script) == set()
