# SPDX-License-Identifier: Apache-2.0
"""Opens the runtime of an engine directory, here, or of a deployment, in TensorRT-LLM."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.api.backend import Backend
from dflash_trt.api.runtime_options import DEFAULTS, RuntimeOptions
from dflash_trt.deploy.deployment_file import deployment_path, refuse_deployment
from dflash_trt.errors import RequestError
from dflash_trt.runtime.checked_pair import CheckedPair
from dflash_trt.runtime.progress_display import progress_line
from dflash_trt.runtime.ranks.roles import ALONE, Follower, Leader

if TYPE_CHECKING:
    from dflash_trt.runtime.embedded_backend import EmbeddedBackend


def open_backend(engine_or_deployment: str | Path, target: str | None, options: RuntimeOptions = DEFAULTS) -> Backend:
    """Opens an engine directory or a deployment, with its own target or the one called `target`.

    A deployment accepts no option here except draft_length=0. Raises what `CheckedPair.read` and `open_embedded`
    raise, or TrtllmBackend.
    """
    if (config := deployment_path(str(engine_or_deployment))) is None:
        return open_embedded(CheckedPair.read(Path(engine_or_deployment), target), options)
    from dflash_trt.deploy.deployment_file import load_deployment
    from dflash_trt.deploy.resolve import resolve
    from dflash_trt.trtllm.llm_backend import TrtllmBackend

    is_plain = options.draft_length == 0
    for name in RuntimeOptions.__struct_fields__:
        if getattr(options, name) != getattr(DEFAULTS, name) and not (name == "draft_length" and is_plain):
            raise RequestError(f"{name}: expected none, because the deployment file {config} sets it")
    deployment = resolve(load_deployment(config), config.stem, target=target)
    return TrtllmBackend.open(deployment, "none" if is_plain else "dflash")


def open_engine(
    engine: str | Path, target: str | None, options: RuntimeOptions = DEFAULTS, ranks: Leader | Follower = ALONE
) -> EmbeddedBackend:
    """Opens an engine directory here; raises what `open_embedded` raises, EngineError for a deployment."""
    refuse_deployment(engine)
    return open_embedded(CheckedPair.read(Path(engine), target), options, ranks)


def open_embedded(
    pair: CheckedPair, options: RuntimeOptions = DEFAULTS, ranks: Leader | Follower = ALONE
) -> EmbeddedBackend:
    """Loads a checked pair; raises what `load_session` raises, RequestError for ranks that have not joined."""
    if options.num_ranks != ranks.size:
        hint = "dflash-trt serve --tp N and generate --tp N join ranks"
        raise RequestError(f"num_ranks: expected {ranks.size}, found {options.num_ranks}", hint=hint)
    with progress_line(f"loading {pair.target_name}"):
        from dflash_trt.runtime.embedded_backend import EmbeddedBackend
        from dflash_trt.runtime.session import load_session  # it loads torch: seconds

        return EmbeddedBackend(load_session(pair, options, ranks=ranks), options)
