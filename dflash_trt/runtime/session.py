# SPDX-License-Identifier: Apache-2.0
"""An engine directory and its target, loaded and ready to decode on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dflash_trt.checkpoint.source import checkpoint_directory
from dflash_trt.checkpoint.target import TargetSpec, check_pair, read_target
from dflash_trt.drafter.onnx_drafter import OnnxDrafter
from dflash_trt.drafter.protocol import Drafter
from dflash_trt.engine.manifest import Manifest, read_manifest
from dflash_trt.errors import EngineError
from dflash_trt.runtime.completion import Completion, check_request, complete
from dflash_trt.runtime.decode import Step, plain_decode, speculative_decode
from dflash_trt.target.huggingface import HuggingFaceTarget
from dflash_trt.target.tokenizer import encode

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

WARM_UP_TOKENS = 8


class Session:
    """Target, drafter and tokenizer of one engine directory; decodes one prompt after the other."""

    def __init__(
        self,
        manifest: Manifest,
        target: HuggingFaceTarget,
        drafter: Drafter,
        tokenizer: PreTrainedTokenizerBase,
        stop_ids: frozenset[int],
    ) -> None:
        self.manifest = manifest
        self.target = target
        self.drafter = drafter
        self.tokenizer = tokenizer
        self.stop_ids = stop_ids

    @classmethod
    def open(cls, engine: Path, target_name: str, *, ignore_eos: bool = False, expose: Sequence[str] = ()) -> Session:
        """Loads the engine directory `engine` and the target that it was built for.

        `expose` names values inside draft.onnx that the drafter can return besides its hidden states.

        Raises EngineError when the engine is damaged or was built for another target, CheckpointError when
        the target is.
        """
        manifest = read_manifest(engine)
        checkpoint = read_target(checkpoint_directory(target_name))
        _check_target(manifest, checkpoint.spec, engine, target_name)

        from transformers import AutoTokenizer

        target = HuggingFaceTarget.load(checkpoint.directory, checkpoint.spec, manifest.draft.target_layer_ids)
        return cls(
            manifest,
            target,
            load_drafter(engine, manifest, expose),
            AutoTokenizer.from_pretrained(checkpoint.directory, local_files_only=True, trust_remote_code=False),
            frozenset() if ignore_eos else target.stop_token_ids(),
        )

    def with_drafter(self, manifest: Manifest, drafter: Drafter) -> Session:
        """A session that shares this one's target: one of them may decode at a time.

        `drafter` is that of the engine with `manifest`, whose target and taps are this session's.
        """
        return Session(manifest, self.target, drafter, self.tokenizer, self.stop_ids)

    def encode(self, prompt: str, *, chat: bool = False) -> list[int]:
        """Token ids of a prompt, taken as it is or wrapped in the target's chat template."""
        return encode(self.tokenizer, prompt, chat=chat)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, special tokens left out."""
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=True))

    def generate(
        self, prompt_ids: Sequence[int], max_new_tokens: int, on_text: Callable[[str], None] | None = None
    ) -> Completion:
        """Decodes one prompt greedily with the drafter; `on_text` sees the text as it grows."""
        return complete(self.speculate(prompt_ids, max_new_tokens), self._text_stream(on_text))

    def speculate(self, prompt_ids: Sequence[int], max_new_tokens: int) -> Iterator[Step]:
        """The steps of decoding one prompt greedily with the drafter, as they come."""
        self.check(prompt_ids, max_new_tokens)
        return speculative_decode(self.target, self.drafter, prompt_ids, max_new_tokens, self.stop_ids)

    def generate_plain(
        self, prompt_ids: Sequence[int], max_new_tokens: int, on_text: Callable[[str], None] | None = None
    ) -> Completion:
        """Decodes one prompt greedily without the drafter."""
        self.check(prompt_ids, max_new_tokens)
        # The same weights, without the cost of returning taps.
        target = HuggingFaceTarget(self.target.model, ())
        steps = plain_decode(target, prompt_ids, max_new_tokens, self.stop_ids)
        return complete(steps, self._text_stream(on_text))

    def warm_up(self, prompt_ids: Sequence[int]) -> None:
        """Runs both ways of decoding for a few tokens, so that neither pays for being first."""
        self.generate(prompt_ids, WARM_UP_TOKENS)
        self.generate_plain(prompt_ids, WARM_UP_TOKENS)

    def check(self, prompt_ids: Sequence[int], max_new_tokens: int) -> None:
        """Raises RequestError for a prompt that cannot be served to its last token."""
        check_request(prompt_ids, max_new_tokens, self.manifest.draft, self.manifest.target)

    def _text_stream(self, on_text: Callable[[str], None] | None) -> Callable[[list[int]], None] | None:
        """Feeds an incremental decoder, which holds incomplete characters back."""
        if on_text is None:
            return None
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(skip_special_tokens=True)

        def on_tokens(token_ids: list[int]) -> None:
            for token in token_ids:
                if text := stream.step(self.tokenizer._tokenizer, token):
                    on_text(text)

        return on_tokens


def load_drafter(engine: Path, manifest: Manifest, expose: Sequence[str] = ()) -> OnnxDrafter:
    """The drafter of an engine directory, with room for the longest context that draft and target allow."""
    limit = min(manifest.draft.max_position_embeddings, manifest.target.max_position_embeddings)
    return OnnxDrafter(engine, manifest, max_context_tokens=limit, expose=expose)


def _check_target(manifest: Manifest, target: TargetSpec, engine: Path, target_name: str) -> None:
    check_pair(manifest.draft, target, draft_name=str(engine), target_name=target_name)
    for fact in TargetSpec.__struct_fields__:
        built_for, found = getattr(manifest.target, fact), getattr(target, fact)
        if built_for != found:
            raise EngineError(
                f"{engine} was built for another target than {target_name}: {fact}: expected"
                f" {built_for}, found {found}",
                hint="give --target the model that the engine was built for",
            )
