# SPDX-License-Identifier: Apache-2.0
"""cpp/onnxruntime/abi.h against the ONNX Runtime that is installed: no wheel of it has its header.

Functions that the operators use are covered by their own tests (tests/runtime/drafter/onnxruntime); here are the
versions, and the functions whose results can be distinguished without a session.
"""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import onnxruntime
import pytest

from dflash_trt import _C
from tests.paths import REPOSITORY

HEADER = (REPOSITORY / "cpp" / "onnxruntime" / "abi.h").read_text()
VERSION = int(re.findall(r"kApiVersion = (\d+);", HEADER)[0])
GetApi = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_uint32)
GetVersion = ctypes.CFUNCTYPE(ctypes.c_void_p)


class ApiBase(ctypes.Structure):
    _fields_ = (("get_api", GetApi), ("get_version", GetVersion))


@pytest.fixture(scope="module")
def base() -> ApiBase:
    (library,) = Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.*")
    get_base = ctypes.CDLL(str(library)).OrtGetApiBase
    get_base.restype = ctypes.POINTER(ApiBase)
    return get_base().contents


def function(base: ApiBase, position: int, result: object, *arguments: object) -> object:
    """A function of the table, by its position."""
    table = ctypes.cast(base.get_api(VERSION), ctypes.POINTER(ctypes.c_void_p))
    return ctypes.CFUNCTYPE(result, *arguments)(table[position])


def position(declaration: str) -> int:
    """Position of the function with this declaration in the header."""
    (text,) = re.findall(rf"{re.escape(declaration)}.*?>\((\d+)\)\(", HEADER, re.DOTALL)
    return int(text)


def test_the_installed_release_has_the_version(base: ApiBase) -> None:
    assert ctypes.string_at(base.get_version()).decode() == onnxruntime.__version__
    assert base.get_api(VERSION)
    # So positions of old functions stay, and an operator may ask for less than it was tested with
    minor = int(onnxruntime.__version__.split(".")[1])
    assert {base.get_api(version) for version in range(1, minor + 1)} == {base.get_api(VERSION)}


def test_statuses_and_domains_are_made(base: ApiBase) -> None:
    """CreateStatus and ReleaseStatus, and between them GetErrorCode and GetErrorMessage, which need a status."""
    assert position("Status* create_status(") == 0
    text = b"expected a text"
    status = function(base, 0, ctypes.c_void_p, ctypes.c_int, ctypes.c_char_p)(2, text)
    assert function(base, 1, ctypes.c_int, ctypes.c_void_p)(status) == 2
    assert function(base, 2, ctypes.c_char_p, ctypes.c_void_p)(status) == text
    function(base, position("void release(Status*"), None, ctypes.c_void_p)(status)
    domain = ctypes.c_void_p()
    make = function(base, position("create_domain("), ctypes.c_void_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p))
    assert make(b"tests", ctypes.byref(domain)) is None
    assert domain.value


def test_an_older_release_is_one_error(base: ApiBase) -> None:
    """One whose table ends before what the operators call."""
    version = ctypes.create_string_buffer(b"1.16.3")
    get_api = GetApi(lambda asked: base.get_api(asked) if asked < VERSION else None)
    older = ApiBase(get_api, GetVersion(lambda: ctypes.addressof(version)))
    register = ctypes.CDLL(_C.__file__).RegisterCustomOps
    register.restype = ctypes.c_void_p
    status = register(None, ctypes.byref(older))
    message = function(base, 2, ctypes.c_char_p, ctypes.c_void_p)(status)
    assert message == b"expected ONNX Runtime 1.17 or newer, found 1.16.3"
