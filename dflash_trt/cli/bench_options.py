# SPDX-License-Identifier: Apache-2.0
"""Types of the options of `dflash-trt bench run`."""

from __future__ import annotations

import re
from typing import Any

import click

from dflash_trt.errors import shown

NUMBER = re.compile("[0-9]{1,5}")
METRICS = "time_to_first_token|inter_token_latency|request_latency|output_token_throughput_per_user"
LIMIT = re.compile(rf"({METRICS}):(?!0*\.?0*$)[0-9]{{1,9}}(\.[0-9]{{1,9}})?")
"""A limit of AIPerf's --goodput: above 0, in ms or tokens/s."""


class Concurrencies(click.ParamType):  # type: ignore[type-arg]  # generic as of click 8.4
    """1,2,4."""

    name = "N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        """Concurrencies, each once, in the given order."""
        if isinstance(value, tuple):
            return value
        words = str(value).split(",")
        if not all(NUMBER.fullmatch(word) and 0 < int(word) <= 65536 for word in words):
            self.fail(f"expected numbers of requests as in 1,2,4, found {shown(value)}", param, ctx)
        return tuple(dict.fromkeys(map(int, words)))


class Goodput(click.ParamType):  # type: ignore[type-arg]
    """METRIC:LIMIT ..., each metric once."""

    name = "'METRIC:LIMIT ...'"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The text, which AIPerf takes as it is."""
        words = str(value).split()
        names = [word.partition(":")[0] for word in words]
        if not words or len(set(names)) < len(names) or not all(map(LIMIT.fullmatch, words)):
            self.fail(f"limits must look like 'time_to_first_token:500 inter_token_latency:20', not {shown(value)}",
                      param, ctx)  # fmt: skip
        return " ".join(words)


class KeyValue(click.ParamType):  # type: ignore[type-arg]
    """KEY=VALUE."""

    def __init__(self, name: str) -> None:
        self.name = name

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        """Key and value, neither empty."""
        if isinstance(value, tuple):
            return value
        key, _, text = str(value).partition("=")
        if not key or not text:
            self.fail(f"expected {self.name}, found {shown(value)}", param, ctx)
        return key, text
