# SPDX-License-Identifier: Apache-2.0
"""Whatever comes from outside comes through `dflash_trt.files`: nobody opens, reads or parses a file past it."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from tests.paths import REPOSITORY

PACKAGE = REPOSITORY / "dflash_trt"
CALLS = {
    *[
        "open",
        "io.open",
        "os.open",
        "os.fdopen",
        "json.load",
        "json.loads",
        "msgspec.json.decode",
        "msgspec.yaml.decode",
        "yaml.load",
    ],
    *[
        "yaml.safe_load",
        "yaml.load_all",
        "yaml.safe_load_all",
        "yaml.full_load",
        "yaml.unsafe_load",
        "np.load",
        "numpy.load",
    ],
    *[
        "np.fromfile",
        "numpy.fromfile",
        "np.loadtxt",
        "torch.load",
        "pickle.load",
        "pickle.loads",
        "tomllib.load",
        "tomllib.loads",
    ],
    *["configparser.ConfigParser", "csv.reader"],
}
CLASS = re.compile(r"[A-Z]\w*[a-z]\w*$")
METHODS = {"read_text", "read_bytes", "open"}  # of any object: a Path's
EXCEPTIONS = {
    ("engine/engine_directory.py", "msgspec.json.decode"): "only whether it is a manifest, of a bounded file",
    ("checkpoint/safetensors_writer.py", "msgspec.json.decode"): "only who wrote it, of a bounded header",
    ("checkpoint/quantization.py", "open"): "four bytes at an offset of a header that was read",
    ("checkpoint/safetensors_writer.py", "open"): "copies tensors of a header that was read, and writes",
    ("engine/plans/plan_loader.py", "read_bytes"): "a plan of gigabytes, whose hash is checked already",
    ("engine/manifest.py", "open"): "hashes what the manifest names, block by block",
    ("runtime/server/limits.py", "msgspec.json.decode"): "a request's bounded body; fields are refused by name",
    ("cli/failure.py", "os.open"): "the null device, in the place of a stdout that failed",
    ("runtime/server/grammar_worker.py", "read_text"): "/proc/self/statm",
    ("runtime/server/channels.py", "msgspec.json.decode"): "a call that a model wrote; what is no JSON is text",
    ("runtime/targets/huggingface.py", "read_text"): "/proc/self/maps",
    ("triton/model.py", "json.loads"): "Triton's own argument",
}
"""By file and call: why it need not go through `dflash_trt.files`."""


def readers(source: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if name in CALLS:
                yield name
            elif isinstance(node.func, ast.Attribute) and node.func.attr in METHODS:
                is_class = CLASS.match(ast.unparse(node.func.value))  # Session.open makes an object
                if not is_class and not is_writing(node):
                    yield node.func.attr


def is_writing(call: ast.Call) -> bool:
    modes = [argument.value for argument in call.args if isinstance(argument, ast.Constant)]
    return any(isinstance(mode, str) and mode[:1] in ("w", "x", "a") for mode in modes)


def found() -> set[tuple[str, str]]:
    sources = [file for file in sorted(PACKAGE.rglob("*.py")) if file.parent.name != "files"]
    return {(str(file.relative_to(PACKAGE)), name) for file in sources for name in readers(file)}


def test_nobody_reads_past_the_one_reader() -> None:
    past = found() - EXCEPTIONS.keys()
    assert not past, f"expected these to read through dflash_trt.files: {sorted(past)}"


def test_no_exception_is_stale() -> None:
    assert EXCEPTIONS.keys() - found() == set()


def test_a_reader_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "new.py"
    source.write_text("import json\nfrom pathlib import Path\nx = json.loads(Path('a').read_text())\n")
    assert set(readers(source)) == {"json.loads", "read_text"}
