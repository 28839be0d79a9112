# SPDX-License-Identifier: Apache-2.0
"""Greedy decoding of single prompts, and sessions on pairs without a tokenizer."""

import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from dflash_trt.api.completion import Completion
from dflash_trt.api.runtime_options import RuntimeOptions
from dflash_trt.api.sampling_params import SamplingParams
from dflash_trt.checkpoint.target_checkpoint import read_target
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.drafter.drafter import Drafter
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.load import open_session
from dflash_trt.runtime.request import Request
from dflash_trt.runtime.session import Session, run
from dflash_trt.runtime.targets.huggingface import load_model, make_target
from tests.engines import trained_engine
from tests.paths import FIXTURES


def greedy(max_tokens: int, stop_token_ids: Sequence[int] = ()) -> SamplingParams:
    """Greedy decoding that only `stop_token_ids` end early."""
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=frozenset(stop_token_ids), ignore_eos=True)


def decode(session: Session, prompt: Sequence[int], params: SamplingParams) -> Request:
    """One prompt with the drafter; the request shows what each step did."""
    request = session.request(prompt, params)
    run(session.decoder(), [request])
    return request


def generate(session: Session, prompt: Sequence[int], max_tokens: int) -> Completion:
    """One prompt with the drafter, to its last token."""
    return session.generate(prompt, greedy(max_tokens))


def text_of(session: Session, token_ids: Sequence[int]) -> str:
    """Text of token ids, special tokens left out."""
    assert session.tokenizer is not None
    return str(session.tokenizer.decode(token_ids, skip_special_tokens=True))


def memory_of(session: Session) -> list[weakref.ref[Any]]:
    """Closes a decoder and frees models, caches, recorded passes, and the memory of tensors."""
    target, drafter = session.target, session.drafter
    caches = [cache for layer in target.cache.layers.values() for cache in layer]  # type: ignore[attr-defined]
    tensors = [*target.model.parameters(), *target.model.buffers(), *caches, drafter.cache.k, drafter.cache.v]
    return [weakref.ref(each) for each in (target.model, drafter.executor, *(x.untyped_storage() for x in tensors))]


def open_trained(name: str, engine: Path | None = None, **options: Any) -> Session:
    """A session on the fixture target `name` and its trained draft, or the draft in `engine`."""
    return open_session(engine or trained_engine(name), str(FIXTURES / name), RuntimeOptions(**options))


def open_without_tokenizer(engine: Path, target: Path, *, num_slots: int = 1, dtype: str = "float32") -> Session:
    """A session on a random pair, which has no tokenizer; otherwise as `load_session` makes one."""
    manifest = read_manifest(engine)
    taps = manifest.draft.target_layer_ids
    model = load_model(target, read_target(target).spec, taps, dtype=dtype)
    target = make_target(model, taps, num_slots, accelerate)
    drafter = open_drafter(engine, manifest, num_slots=num_slots)
    return Session(manifest, target, drafter, None, frozenset(), max_batch_size=num_slots)


class Tables(NamedTuple):
    """A target's embedding and lm_head, [V, H] each."""

    embedding: Tensor
    lm_head: Tensor

    def embed(self, token_ids: Tensor) -> Tensor:
        return self.embedding[token_ids]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.lm_head.T


def hidden_of(drafter: Drafter, slots: Sequence[int], blocks: Tensor) -> Tensor:
    """Hidden states [B, S, H] of blocks with these embeddings, which the next pass does not overwrite."""
    return drafter.run(slots, blocks)["hidden"].clone()
