# SPDX-License-Identifier: Apache-2.0
"""Bytes of regular files, bounded; what would never end is refused before a byte is read."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import pytest

from dflash_trt.errors import ConfigError
from dflash_trt.files.read import is_file_name, open_file, read_bytes, read_text


def refusal(file: Path, limit: int = 4) -> str:
    with pytest.raises(ConfigError) as caught:
        read_bytes(file, ConfigError, limit=limit)
    assert caught.value.message.startswith(f"{file}: expected ")
    return caught.value.message.partition(": expected ")[2]


def test_up_to_the_limit(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"1234")
    assert read_bytes(file, ConfigError, limit=4) == b"1234"
    file.write_bytes(b"12345")
    assert refusal(file) == "at most 4 bytes, found more"


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # nobody ever writes to it
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        (tmp_path / "loop").symlink_to("loop")
        (tmp_path / "zero").symlink_to("/dev/zero")
        assert refusal(tmp_path) == "a readable file, found: Is a directory"
        assert refusal(tmp_path / "pipe") == "a readable file, found: a pipe"
        assert refusal(tmp_path / "zero") == "a readable file, found: a device"
        assert refusal(tmp_path / "socket").startswith("a readable file, found: ")
        assert refusal(tmp_path / "loop") == "a readable file, found: Too many levels of symbolic links"
        assert refusal(tmp_path / "absent") == "a readable file, found: No such file or directory"
        assert refusal(tmp_path / ("a" * 300)) == "a readable file, found: File name too long"


def test_a_pipe_that_the_command_line_names(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_bytes, args=(b"1234",))
    writer.start()
    assert read_bytes(pipe, ConfigError, limit=4, may_be_pipe=True) == b"1234"
    writer.join()
    with pytest.raises(ConfigError, match="found: a device"):
        read_bytes(Path("/dev/zero"), ConfigError, limit=4, may_be_pipe=True)


def test_an_error_while_reading(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    def fail() -> None:
        with open_file(tmp_path / "file", ConfigError):
            raise OSError(5, "Input/output error")

    with pytest.raises(ConfigError, match="file: expected a readable file, found: Input/output error"):
        fail()


def test_text(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"a\xc3\xbc")
    assert read_text(tmp_path / "file", ConfigError, limit=9) == "aü"
    (tmp_path / "file").write_bytes(b"ab\xff")
    with pytest.raises(ConfigError, match="file: expected text, found byte 0xff at 2, which is not UTF-8"):
        read_text(tmp_path / "file", ConfigError, limit=9)


@pytest.mark.parametrize("name", ["", ".", "..", "a/b", "/a", "../a", "a\n", "\x1b[2J", "a\0b", "a" * 256, "ü" * 128])
def test_no_file_name(name: str) -> None:
    assert not is_file_name(name)


def test_file_names() -> None:
    assert all(is_file_name(name) for name in ("model.safetensors", "..a", "a b", "ü", "a" * 255))
