# SPDX-License-Identifier: Apache-2.0
"""The page of the Python API: directives that mkdocstrings replaces by signatures and docstrings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator

import dflash_trt
from dflash_trt import errors
from dflash_trt.api.runtime_options import DESCRIPTIONS
from dflash_trt.llm import LLM

ORDER = ("SamplingParams", "Grammar", "Completion", "Chunk", "spec_generate")
"""First of what `dflash_trt` exports, after LLM."""
MORE = ("api.backend.Backend", "api.backend.DecoderMetrics")
EXAMPLE = re.compile(r"(?:^(?:>>>|\.\.\.) .*\n?)+", re.MULTILINE)
HEADER = """# Python API

All but `Backend`, `DecoderMetrics` and the errors is imported from `dflash_trt`. [The runtime](runtime.md) has
examples."""


def python_reference() -> str:
    """All that `dflash_trt` exports, the settings of `LLM`, the interface of runtimes, and the errors."""
    exported = {name for name in dflash_trt.__all__ if not name.startswith("_") and not name.endswith("Error")}
    names = sorted(exported - {"LLM"}, key=lambda name: (ORDER.index(name) if name in ORDER else len(ORDER), name))
    homes = [*(f"{dflash_trt._HOMES[name]}.{name}" for name in names), *MORE]
    failures = [name for name, kind in vars(errors).items() if inspect.isclass(kind) and issubclass(kind, Exception)]
    failed = [_directive(f"errors.{name}", 3) for name in failures]
    return "\n\n".join([HEADER, *_llm(), *map(_directive, homes), "## Errors", *failed]) + "\n"


def _llm() -> Iterator[str]:
    """The class with the signature that its constructor takes from a struct, which no source shows."""
    parameters = str(inspect.signature(LLM).replace(return_annotation=inspect.Signature.empty))
    parameters = parameters.replace("pathlib._local.", "").replace("pathlib.", "")
    lines = re.sub(r", (?=\*|\w+:)", ",\n    ", parameters[1:-1])
    yield f"## LLM\n\n```python\nLLM(\n    {lines},\n)\n```"
    for text in (inspect.getdoc(LLM), inspect.getdoc(LLM.__init__)):
        yield EXAMPLE.sub(lambda code: f"```pycon\n{code[0].rstrip()}\n```\n", str(text))
    yield "Settings of the runtime, the fields of `RuntimeOptions`:"
    yield from (f"`{name}`\n:   {text}" for name, text in DESCRIPTIONS.items())
    for name, member in vars(LLM).items():
        if not name.startswith("_") and callable(member):
            yield _directive(f"llm.LLM.{name}", 3)


def _directive(home: str, level: int = 2) -> str:
    """The place of one object's documentation."""
    return f"::: dflash_trt.{home}\n    options: {{heading_level: {level}}}"
