# SPDX-License-Identifier: Apache-2.0
"""Structs whose constructors refuse an unknown setting in words, with the nearest name or what stands for it here."""

from __future__ import annotations

from typing import Any

import msgspec

from dflash_trt.errors import RequestError
from dflash_trt.files.strict_yaml import nearest

ELSEWHERE = {
    "model": "LLM takes an engine directory, a draft or a deployment, then its target: LLM(ENGINE, TARGET)",
    "tensor_parallel_size": "a target that one GPU cannot hold is spread over all GPUs; `--tp` of commands shares it"
    " among ranks, and a deployment file has tensor_parallel",
    "gpu_memory_utilization": "cache_gib sets the memory of the caches, in GiB; the weights take what they need",
    "speculative_config": "the engine is the drafter; draft_length sets how many tokens are verified",
    "trust_remote_code": "code that a checkpoint brings along is never run",
    "max_model_len": "a request takes what its prompt and max_tokens need",
    "max_num_seqs": "use max_batch_size",
    "max_new_tokens": "use max_tokens",
    "guided_decoding": "use structured_outputs=Grammar(kind=..., text=...)",
    "guided_json": "use structured_outputs=Grammar(kind='json_schema', text=...)",
}
"""Arguments of vLLM, TensorRT-LLM and transformers, and what to use here."""


class KnownSettings(msgspec.StructMeta):
    """Metaclass: RequestError for a keyword that is no field of the struct, where msgspec raises TypeError."""

    def __call__(cls, *args: Any, **settings: Any) -> Any:  # noqa: N805 - a metaclass's instance is a class
        for name in settings.keys() - set(cls.__struct_fields__):
            raise RequestError(f"{name}: there is no such setting", hint=_instead(name, cls.__struct_fields__))
        return super().__call__(*args, **settings)


def _instead(name: str, fields: tuple[str, ...]) -> str:
    if name in ELSEWHERE:
        return ELSEWHERE[name]
    near = nearest(name, fields)
    return f"did you mean {near}?" if near else f"the settings are {', '.join(fields)}"
