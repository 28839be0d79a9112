# SPDX-License-Identifier: Apache-2.0
"""Input from outside is bounded, from regular files, strict JSON, and read by `files` alone."""

import ast
import os
import re
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.files.json_file import MAX_DEPTH, MAX_VALUES, json_document, json_object, read_json
from dflash_trt.files.read import is_file_name, open_file, read_bytes, read_text
from tests.paths import REPOSITORY

PACKAGE = REPOSITORY / "dflash_trt"
CALLS = set(
    """
    open io.open os.open os.fdopen json.load json.loads msgspec.json.decode msgspec.yaml.decode yaml.load yaml.safe_load
    yaml.load_all yaml.safe_load_all yaml.full_load yaml.unsafe_load np.load numpy.load np.fromfile numpy.fromfile
    np.loadtxt torch.load pickle.load pickle.loads tomllib.load tomllib.loads configparser.ConfigParser csv.reader
    """.split()  # noqa: SIM905
)
CLASS = re.compile(r"[A-Z]\w*[a-z]\w*$")
METHODS = {"read_text", "read_bytes", "open"}  # on any object; mostly a Path
LAST = METHODS | {call.rpartition(".")[2] for call in CALLS}
A_CALL = re.compile(rf"\b(?:{'|'.join(LAST)})\(")
EXCEPTIONS = {
    ("engine/manifest.py", "msgspec.json.decode"): "only whether it is a manifest, of a bounded file",
    ("checkpoint/safetensors_writer.py", "msgspec.json.decode"): "only who wrote it, of a bounded header",
    ("checkpoint/quantization.py", "open"): "four bytes at an offset of a header that was read",
    ("checkpoint/safetensors_writer.py", "open"): "copies tensors of a header that was read, and writes",
    ("engine/plans/plan_runner.py", "read_bytes"): "a plan of gigabytes, whose hash is checked already",
    ("engine/plans/plan_process.py", "msgspec.json.decode"): "a job and its refusal, between processes of ours",
    ("engine/plans/plan_process.py", "open"): "the refusal",
    ("engine/plans/plan_process.py", "os.fdopen"): "its own standard output, to write a plan to",
    ("observe/servers/supervisor.py", "read_text"): "/proc/self/task, in a script that imports nothing of ours",
    ("engine/manifest.py", "open"): "hashes what the manifest names, block by block",
    (
        "runtime/server/request/body.py",
        "msgspec.json.decode",
    ): "a request's bounded body; fields are refused by name",
    ("cli/failure.py", "os.open"): "the null device, in the place of a stdout that failed",
    ("__main__.py", "os.open"): "the null device, in the place of a closed standard stream",
    ("__main__.py", "os.fdopen"): "a standard stream",
    ("runtime/grammars/compiler.py", "msgspec.json.decode"): "a request's grammar, bounded before",
    ("runtime/grammars/guided_vocabulary.py", "json.loads"): "a tokenizer that is loaded, written as JSON",
    ("runtime/grammars/lark.py", "msgspec.json.decode"): "a request's choices, bounded before",
    ("runtime/server/calls/hermes.py", "msgspec.json.decode"): "a call that a model wrote; what is no JSON is text",
    ("runtime/server/calls/deepseek.py", "msgspec.json.decode"): "a call that a model wrote; what is no JSON is text",
    ("runtime/targets/huggingface.py", "read_text"): "/proc/self/maps",
    ("deploy/cluster/template.py", "read_text"): "a template of this package",
    ("deploy/cluster/template.py", "yaml.safe_load"): "a template of this package",
    ("triton/model.py", "json.loads"): "Triton's own argument",
    ("cli/options.py", "msgspec.json.decode"): "an option of the command line",
    ("observe/servers/processor_time.py", "read_text"): "/proc/PID/stat",
    ("runtime/cached_engine.py", "os.open"): "a lock",
    ("runtime/server/page_verdict.py", "msgspec.json.decode"): "a request's bounded body",
    ("runtime/server/calls/tagged_calls.py", "msgspec.json.decode"): "a value that a model wrote",
    ("trtllm/registration.py", "read_bytes"): "the script that the user starts",
}
"""By file and call: why it need not go through `dflash_trt.files`."""


def readers(source: Path) -> Iterator[str]:
    text = source.read_text()
    for node in ast.walk(ast.parse(text)) if A_CALL.search(text) else ():
        if isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) in LAST:
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
    now = found()
    past = now - EXCEPTIONS.keys()
    assert not past, f"expected these to read through dflash_trt.files: {sorted(past)}"
    assert EXCEPTIONS.keys() - now == set(), "no exception is stale"


def test_a_reader_is_noticed(tmp_path: Path) -> None:
    source = tmp_path / "new.py"
    source.write_text("import json\nfrom pathlib import Path\nx = json.loads(Path('a').read_text())\n")
    assert set(readers(source)) == {"json.loads", "read_text"}


FILE = Path("directory/file.json")


def nested(levels: int) -> bytes:
    return b"[" * levels + b"]" * levels


@pytest.mark.parametrize(
    ("content", "value"),
    [
        (b'{"a": {"b": [1, null]}}', {"a": {"b": [1, None]}}),
        (b"18446744073709551615", 2**64 - 1),
        (b"-9223372036854775808", -(2**63)),
        (b"1e308", 1e308),
        (b'"\\ud83d\\ude00"', "\U0001f600"),
        (b'"\\\\ud800"', "\\ud800"),  # a backslash, and no escape
    ],
)
def test_what_is_just_allowed(content: bytes, value: object) -> None:
    assert json_document(content, FILE, ConfigError) == value
    json_document(nested(MAX_DEPTH), FILE, ConfigError)


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"{", r"found text that is not JSON \("),
        (b"3", "found int"),
        (b'{"a": 1, "b": 2, "a": 1}', "with each key once, found 'a' twice"),
        (b'{"outer": {"\\u001b": 1, "\\u001b": 2}}', r"with each key once, found '\\x1b' twice"),
        (b'{"a": 18446744073709551616}', "found an integer of 20 digits, beyond 64 bits"),
        (b'{"a": -' + b"9" * 4000 + b"}", "found an integer of 4000 digits, beyond 64 bits"),
        (b'{"a": NaN}', "found the number NaN, which is not finite"),
        (b'{"a": -Infinity}', "found the number -Infinity, which is not finite"),
        (b'{"a": 1e999}', "found the number 1e999, which is not finite"),
        (b'{"a": "\\uD800"}', r"found half of a surrogate pair, '\\ud800'"),
        (b'{"\\udfff": 1}', r"found half of a surrogate pair, '\\udfff'"),
        (nested(MAX_DEPTH + 1), f"found more than {MAX_DEPTH} levels"),
        (nested(100_000), f"found more than {MAX_DEPTH} levels"),
        (b"[" + b"0," * MAX_VALUES + b"0]", f"found {MAX_VALUES + 1} values, more than {MAX_VALUES}"),
        (b"\xef\xbb\xbf{}", "found text that is not JSON"),
        (b'{"\xff": 1}', "found byte 0xff at 2, which is not UTF-8"),
    ],
)
def test_what_is_none(content: bytes, found: str) -> None:
    with pytest.raises(ConfigError, match=f"{FILE}: expected a list of rows,? {found}") as caught:
        json_object(content, FILE, ConfigError, what="a list of rows", hint="write it anew")
    assert caught.value.hint == "write it anew"


def test_infinity_beside_facts() -> None:
    """transformers writes it into configurations of state-space models."""
    assert json_object(b'{"a": [0.0, Infinity]}', FILE, ConfigError, finite=False) == {"a": [0.0, float("inf")]}


class Point(msgspec.Struct, frozen=True):
    x: int


def test_a_file_of_a_kind(tmp_path: Path) -> None:
    file = tmp_path / "point.json"
    file.write_text('{"x": 3}')
    assert read_json(file, Point, ConfigError, what="a point") == Point(3)
    file.write_text('{"x": "3"}')
    with pytest.raises(ConfigError, match=r"point.json: expected a point, found Expected `int`, got `str` - at `\$.x`"):
        read_json(file, Point, ConfigError, what="a point")


def refusal(file: Path, limit: int = 4) -> str:
    with pytest.raises(ConfigError) as caught:
        read_bytes(file, ConfigError, limit=limit)
    assert str(file) in caught.value.message
    return caught.value.message.replace(f"{file}", "FILE").removeprefix("FILE: expected ")


def test_up_to_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"1234")
    assert read_bytes(file, ConfigError, limit=4) == b"1234"
    file.write_bytes(b"12345")
    assert refusal(file) == "at most 4 bytes, found more"


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # it never has a writer
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        (tmp_path / "loop").symlink_to("loop")
        (tmp_path / "zero").symlink_to("/dev/zero")
        assert refusal(tmp_path) == "cannot read FILE: Is a directory"
        assert refusal(tmp_path / "pipe") == "cannot read FILE: a pipe"
        assert refusal(tmp_path / "zero") == "cannot read FILE: a device"
        assert refusal(tmp_path / "socket").startswith("cannot read FILE: ")
        assert refusal(tmp_path / "loop") == "cannot read FILE: Too many levels of symbolic links"
        assert refusal(tmp_path / "absent") == "cannot read FILE: No such file or directory"
        assert refusal(tmp_path / ("a" * 300)) == "cannot read FILE: File name too long"


def test_a_pipe_that_the_command_line_names(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"1234",))
    writer.start()
    assert read_bytes(pipe, ConfigError, limit=4, may_be_pipe=True) == b"1234"
    writer.join()
    with pytest.raises(ConfigError, match="cannot read /dev/zero: a device"):
        read_bytes(Path("/dev/zero"), ConfigError, limit=4, may_be_pipe=True)


def test_an_error_while_reading(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def fail() -> None:
        with open_file(tmp_path / "file", ConfigError):
            raise OSError(5, "Input/output error")

    with pytest.raises(ConfigError, match=r"cannot read .*file: Input/output error"):
        fail()


def test_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\xc3\xbc")
    assert read_text(tmp_path / "file", ConfigError, limit=9) == "aü"
    (tmp_path / "file").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match="file: expected text, found byte 0xff at 2, which is not UTF-8"):
        read_text(tmp_path / "file", ConfigError, limit=9)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\n", "\x1b[2J", "a\0b", "a" * 256, "ü" * 128])
def test_file_names(name: str) -> None:
    assert not is_file_name(name)
    assert all(is_file_name(right) for right in ("model.safetensors", "..a", "a b", "ü", "a" * 255))
