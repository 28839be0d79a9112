# SPDX-License-Identifier: Apache-2.0
"""Limits of a chat template: it is the model's own program, but a request chooses what it reads."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from dflash_trt.errors import RequestError

TEMPLATE_FILE = "<template>"
"""File name of Jinja's compiled code."""


@contextmanager
def limited_template(seconds: float, max_characters: int) -> Iterator[None]:
    """Ends the template that this thread renders with RequestError when it exceeds a limit.

    The time is checked at each line of a template and each call of a function, the length of the output at each piece:
    a compiled template yields them, and joins them at its end.
    """
    deadline, num_characters = time.monotonic() + seconds, 0

    def check() -> None:
        if time.monotonic() > deadline:
            raise RequestError(f"messages: the chat template takes more than {seconds:g} s")
        if num_characters > max_characters:
            raise RequestError(f"messages: the chat template writes more than {max_characters} characters")

    def trace(frame: FrameType, event: str, value: Any) -> Any:
        nonlocal num_characters
        is_template = frame.f_code.co_filename == TEMPLATE_FILE
        if is_template and event == "return" and isinstance(value, str):
            num_characters += len(value)
        check()
        return trace if is_template else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)
    check()
