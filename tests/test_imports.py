# SPDX-License-Identifier: Apache-2.0
"""Imports inside dflash_trt point one way, and what is heavy is loaded where it is used."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

PACKAGE = REPOSITORY / "dflash_trt"
# The three circles (docs/structure.md), from the ground up: a room imports from the lines above it and from itself.
FLOORS = [
    {"errors", "_C", ""},  # "": the package itself, for its version
    {"files"},
    {"api"},
    # the mission
    {"checkpoint"},
    {"quantize"},
    {"device"},
    {"engine"},
    {"deploy"},
    {"trtllm"},
    {"triton"},
    # the rehearsal
    {"runtime/policy"},
    {"runtime/kvcache"},
    {"runtime/drafter", "runtime/targets"},
    {"runtime/cpu"},
    {"runtime"},
    {"runtime/measure", "runtime/server"},
    {"runtime/dynamo"},
    {"llm"},
    # the annex and the doors
    {"observe"},
    {"cli"},
    {"__main__"},
]
# Importing file and imported module: Triton also serves the embedded runtime.
EXCEPTIONS = {("triton/model.py", "dflash_trt.runtime.load")}
HEAVY = {
    "torch", "onnx", "onnxruntime", "tensorrt", "tensorrt_rtx_bindings", "transformers", "numpy", "huggingface_hub",
    "pynvml", "httpx2", "pyarrow", "matplotlib", "jinja2", "rich", "jsonschema",
}  # fmt: skip


def floor(room: str) -> int:
    return next(height for height, rooms in enumerate(FLOORS) if room in rooms)


def room_of(parts: tuple[str, ...]) -> str:
    """("checkpoint", "facts") -> checkpoint; ("runtime", "drafter", "open") -> runtime/drafter."""
    inner = "/".join(parts[:2])
    return inner if any(inner in rooms for rooms in FLOORS) else [*parts, ""][0]


def room_at(file: Path) -> str:
    """Room that a file lies in; "" for the package itself."""
    return room_of(file.relative_to(PACKAGE).with_suffix("").parts).replace("__init__", "")


def is_room(name: str) -> bool:
    """Whether dflash_trt.<name> is a module: the package's API has names that are none."""
    return any(PACKAGE.glob(f"{name}.py*")) or (PACKAGE / name).is_dir()


@cache
def tree(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


@cache
def imports(file: Path) -> list[tuple[int, str]]:
    """Line and name of every module that `file` imports, at any depth."""
    return list(_imports(file))


def _imports(file: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree(file)):
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
    assert rooms | modules | {""} == {room for rooms in FLOORS for room in rooms if "/" not in room}


def test_imports_point_down() -> None:
    assert [wrong for file in sources() for wrong in upward_imports(file)] == []


def imported_files(file: Path) -> set[Path]:
    """Files of the package that `file` imports, for type checkers too; not the package itself, whose API is lazy."""
    found: set[Path | None] = set()
    for node in ast.walk(tree(file)):
        if isinstance(node, ast.Import):
            found |= {module_file(alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {module_file(f"{node.module}.{a.name}") or module_file(f"{node.module}") for a in node.names}
    return {path for path in found if path is not None} - {PACKAGE / "__init__.py"}


@cache
def module_file(name: str) -> Path | None:
    """Source of a module of the package; None for other names."""
    path = PACKAGE.parent.joinpath(*name.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file.exists()), None)


def test_no_files_import_each_other() -> None:
    graph = {file: imported_files(file) for file in sources() if file != PACKAGE / "__init__.py"}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        cycle = " -> ".join(str(file.relative_to(PACKAGE)) for file in reversed(error.args[1]))
        pytest.fail(f"a cycle of imports: {cycle}")


def test_an_import_for_type_checkers_counts(tmp_path: Path) -> None:
    file = tmp_path / "planted.py"
    file.write_text("if TYPE_CHECKING:\n    from dflash_trt.engine.plans import machine\n")
    assert imported_files(file) == {PACKAGE / "engine" / "plans" / "machine.py"}


def test_every_exception_is_used() -> None:
    assert {
        (file, module) for file, module in EXCEPTIONS if module not in dict(imports(PACKAGE / file)).values()
    } == set()


def upward_imports(file: Path) -> Iterator[str]:
    """Imports of `file` from rooms that it may not use."""
    here, name = room_at(file), str(file.relative_to(PACKAGE))
    for line, module in imports(file):
        if module.partition(".")[0] != "dflash_trt" or here == "" or (name, module) in EXCEPTIONS:
            continue  # the package itself names its API, and loads it on demand
        there = room_of(tuple(module.split(".")[1:])).replace("__version__", "")
        if here != there and floor(there) >= floor(here):
            yield f"{name}:{line}: {here} may not import {there} ({module})"


def test_an_upward_import_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    file = PACKAGE / "deploy" / "planted.py"
    monkeypatch.setattr(Path, "read_text", lambda _: "def late():\n    from dflash_trt.runtime.kvcache import slots\n")
    expected = "deploy/planted.py:2: deploy may not import runtime/kvcache (dflash_trt.runtime.kvcache)"
    assert list(upward_imports(file)) == [expected]


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
    assert loaded_by("import dflash_trt.engine.graph.onnx_builder") >= {"numpy", "onnx"}


def test_the_decode_loop_knows_only_interfaces() -> None:
    """runtime/load.py alone chooses what runs a draft and a target here."""
    assert loaded_by("import dflash_trt.llm, dflash_trt.runtime.session") <= {"torch", "numpy", "pynvml"}


@pytest.mark.parametrize(
    ("arguments", "loaded"),
    [
        ("inspect DRAFT --target TARGET --json", set()),  # facts are a matter of headers
        ("build DRAFT --target TARGET -o OUTPUT", {"numpy", "onnx"}),  # nothing of an extra
        ("estimate build_configs/gpt-oss-120b.b300x8.latency.yaml --tau 4.7 --json", set()),
    ],
)
def test_commands_load_no_framework(
    arguments: str, loaded: set[str], draft_dir: Path, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(REPOSITORY)
    places = {"DRAFT": draft_dir, "TARGET": target_dir, "OUTPUT": tmp_path / "engine"}
    words = [str(places.get(word, word)) for word in arguments.split()]
    assert loaded_by(f"sys.argv[1:] = {words}; from dflash_trt.cli import main; main()") == loaded
