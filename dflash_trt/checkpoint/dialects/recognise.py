# SPDX-License-Identifier: Apache-2.0
"""The table of dialects: the first that recognises a config.json reads it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec

from dflash_trt.api.plugins import DIALECTS as PLUGINS
from dflash_trt.api.plugins import blamed, expect, installed, loaded
from dflash_trt.checkpoint.dialects.dflash2 import DFLASH2
from dflash_trt.checkpoint.dialects.dialect import Dialect
from dflash_trt.checkpoint.dialects.dspark import DSPARK
from dflash_trt.checkpoint.dialects.gguf import GGUF, read_metadata
from dflash_trt.checkpoint.dialects.laguna import LAGUNA
from dflash_trt.checkpoint.dialects.lilicorr import LILICORR_DIALECT
from dflash_trt.checkpoint.dialects.mimo import MIMO
from dflash_trt.checkpoint.dialects.muse_glimmer import MUSE_GLIMMER
from dflash_trt.checkpoint.dialects.own import OWN
from dflash_trt.checkpoint.dialects.refused import REFUSED
from dflash_trt.checkpoint.dialects.speculators import SPECULATORS
from dflash_trt.checkpoint.dialects.zlab import JETSPEC, MODELOPT, ZLAB
from dflash_trt.checkpoint.facts import Facts
from dflash_trt.checkpoint.source import GGUF as SUFFIX

GENERAL: tuple[Dialect, ...] = (MODELOPT, ZLAB)
"""Dialects whose configurations others extend; plug-ins are asked before them."""
DIALECTS: tuple[Dialect, ...] = (
    OWN,
    GGUF,
    *REFUSED,
    LILICORR_DIALECT,
    DSPARK,
    SPECULATORS,
    DFLASH2,
    LAGUNA,
    MUSE_GLIMMER,
    MIMO,
    JETSPEC,
    *GENERAL,
)


def read_config(path: Path) -> Facts:
    """config.json of a checkpoint directory, or the metadata of a draft's GGUF file; raises CheckpointError."""
    return Facts.load(path / "config.json") if path.suffix != SUFFIX or path.is_dir() else read_metadata(path)


def is_draft(config: Facts) -> bool:
    """Whether config.json is that of a DFlash draft, or of a descendant that is recognised and refused."""
    return any(dialect.recognises(config) for dialect in _dialects())


def recognise(config: Facts) -> Dialect:
    """The dialect of a config.json; where none fits, z-lab's, whose errors name what is missing."""
    return next((dialect for dialect in _dialects() if dialect.recognises(config)), ZLAB)


@cache
def _dialects() -> tuple[Dialect, ...]:
    return (*DIALECTS[: -len(GENERAL)], *map(plugin_dialect, installed(PLUGINS)), *GENERAL)


def plugin_dialect(entry: EntryPoint) -> Dialect:
    """A plug-in's dialect, whose functions name it where they fail; PluginError where it is no Dialect."""
    dialect: Dialect = loaded(entry)
    expect(entry, dialect, Dialect)

    def named(call: Callable[..., Any]) -> Callable[..., Any]:
        def calls(*arguments: Any) -> Any:
            with blamed(entry):
                return call(*arguments)

        return calls

    calls = ("recognises", "read", "load", "canonical", "refuse_unread")
    return msgspec.structs.replace(dialect, **{name: named(getattr(dialect, name)) for name in calls})
