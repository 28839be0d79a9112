# SPDX-License-Identifier: Apache-2.0
"""The rooms of the repository hold what they are for, and nothing else."""

import ast
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.paths import REPOSITORY

FRAGMENT = re.compile(r"\s*(?:(?:Of|That|Those|The same|And|Or|As|Its|Until|Also)\b|\.\.\.)")
QUOTED_FRAGMENT = re.compile(rf"""['"]{FRAGMENT.pattern}""")


def docstrings(file: Path) -> list[ast.Constant]:
    """Strings that are statements, of a file with a fragment: docstrings, and those below fields and constants."""
    if not re.search(f'"""{FRAGMENT.pattern}', text := file.read_text()):
        return []
    expressions = [node.value for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Expr)]
    return [value for value in expressions if isinstance(value, ast.Constant) and isinstance(value.value, str)]


@pytest.mark.parametrize("room", ["dflash_trt", "tests", "benchmarks", "tools"])
def test_docstrings_stand_alone(room: str) -> None:
    files = [file for file in sorted((REPOSITORY / room).rglob("*.py")) if QUOTED_FRAGMENT.search(file.read_text())]
    found = [(file, text) for file in files for text in docstrings(file) if FRAGMENT.match(str(text.value))]
    assert [f"{file.relative_to(REPOSITORY)}:{text.lineno}: {text.value!r}" for file, text in found] == []


TOP_LEVEL = {
    "pyproject.toml", "dflash_trt", "plugins", "build_configs", "cpp", "tests", "Makefile", "README.md",
    "LICENSE", "NOTICE", "CHANGELOG.md", "SECURITY.md", "docs", "benchmarks", "findings", "tools", ".ci",
    "zensical.toml",
}  # fmt: skip
CPP_SUFFIXES = {".cpp", ".h"}
CUDA_SUFFIXES = {".cu", ".cuh"}
FOREIGN_INCLUDE = re.compile(r'^\s*#\s*include\s*[<"](torch|ATen|c10|Python\.h|pybind11|nanobind)', re.MULTILINE)


def tracked() -> list[str]:
    """Every file that git tracks."""
    if shutil.which("git") is None or not (REPOSITORY / ".git").exists():
        pytest.skip("not a git checkout: run the tests in a clone")
    command = ["git", "ls-files", "-z", "--cached"]
    output = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return sorted(name for name in output.split("\0") if name and (REPOSITORY / name).exists())


def below(room: str) -> list[str]:
    return [str(path.relative_to(REPOSITORY)) for path in (REPOSITORY / room).rglob("*") if path.is_file()]


def test_top_level_is_the_agreed_set() -> None:
    found = {name.partition("/")[0] for name in tracked()}
    dotfiles = {name for name in found if name.startswith(".")}
    assert found - dotfiles <= TOP_LEVEL
    assert found >= TOP_LEVEL


def test_no_build_products_are_tracked() -> None:
    products = re.compile(r"(^|/)(__pycache__|build/cp|dist)/|\.(pyc|so|o|plan|engine)$")
    assert [name for name in tracked() if products.search(name)] == []


def test_cpp_holds_no_device_code() -> None:
    files = below("cpp")
    assert [name for name in files if name.endswith(tuple(CUDA_SUFFIXES))] == []
    sources = [name for name in files if name.endswith(tuple(CPP_SUFFIXES))]
    assert sources
    assert [name for name in sources if "__global__" in (REPOSITORY / name).read_text()] == []


def test_plugins_know_neither_torch_nor_python() -> None:
    sources = [name for name in below("plugins") if name.endswith(tuple(CPP_SUFFIXES | CUDA_SUFFIXES))]
    assert [name for name in sources if FOREIGN_INCLUDE.search((REPOSITORY / name).read_text())] == []
    assert [name for name in below("plugins") if name.endswith((".py", ".yaml", ".yml"))] == []
    for line in ("#include <torch/extension.h>", '  # include "Python.h"', "#include <nanobind/nanobind.h>"):
        assert FOREIGN_INCLUDE.search(f"\n{line}\n")
    assert not FOREIGN_INCLUDE.search('#include "params.h"\n// #include <torch/torch.h>\n')


@pytest.mark.parametrize("room", ["cpp", "plugins"])
def test_every_cpp_source_is_built(room: str) -> None:
    """A source that no CMakeLists names compiles nowhere and rots."""
    listed = (REPOSITORY / room / "CMakeLists.txt").read_text()
    sources = [name.removeprefix(f"{room}/") for name in below(room) if name.endswith((".cpp", ".cu"))]
    assert sources
    assert [name for name in sources if name not in listed] == []


def test_build_configs_are_data() -> None:
    assert [name for name in below("build_configs") if not name.endswith((".yaml", ".md", ".gitkeep"))] == []


def test_every_source_names_its_licence() -> None:
    suffixes = (".py", ".cpp", ".h", ".cu", ".cuh")
    ours = [name for name in tracked() if name.startswith(("dflash_trt/", "cpp/", "plugins/", "benchmarks/"))]
    sources = [name for name in ours if name.endswith(suffixes) and (REPOSITORY / name).stat().st_size]
    assert [name for name in sources if "SPDX-License-Identifier" not in (REPOSITORY / name).read_text()[:200]] == []


def rooms() -> list[Path]:
    """The packages of dflash_trt, those inside others too; data folders and what TensorRT-LLM imports aside."""
    package = REPOSITORY / "dflash_trt"
    found = [file.parent for file in sorted(package.rglob("__init__.py")) if "modules" not in file.parts]
    return [room for room in found if room != package]


def test_a_room_says_what_it_is_for() -> None:
    silent = [room for room in rooms() if not ast.get_docstring(ast.parse((room / "__init__.py").read_text()))]
    assert silent == [], "expected a docstring in their __init__.py"


def test_the_map_names_every_room() -> None:
    text = (REPOSITORY / "docs" / "structure.md").read_text()
    top = [room.name for room in rooms() if room.parent.name == "dflash_trt"]
    assert [name for name in top if f"| `dflash_trt/{name}/` |" not in text] == []
    assert [name for name in re.findall(r"`dflash_trt/(\w+)/`", text) if name not in top] == []


def test_no_module_shares_its_name_with_one_of_another_room() -> None:
    """A name in a traceback or a search says which module it is; modules of cli/ are named after their commands."""
    homes: dict[str, list[str]] = {}
    for file in sorted((REPOSITORY / "dflash_trt").rglob("*.py")):
        if not file.name.startswith("__") and file.parent.name != "cli":
            homes.setdefault(file.name, []).append(str(file.relative_to(REPOSITORY)))
    assert {name: files for name, files in homes.items() if len(files) > 1} == {}
