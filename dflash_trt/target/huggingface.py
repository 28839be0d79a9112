# SPDX-License-Identifier: Apache-2.0
"""The target on Hugging Face transformers: any causal language model that returns hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from dflash_trt.checkpoint.target import TargetSpec
from dflash_trt.errors import CheckpointError
from dflash_trt.target.protocol import Verified


class HuggingFaceTarget:
    """A transformers model on the CPU in FLOAT, with the cache of one sequence.

    FLOAT although checkpoints are BF16: verifying a block and decoding token by token sum in different order,
    and in BF16 the rounding of that is large enough to flip a greedy choice.
    """

    def __init__(self, model: PreTrainedModel, target_layer_ids: Sequence[int]) -> None:
        """`target_layer_ids` are the taps to return; none are captured when it is empty."""
        self.model = model
        self._embedding = model.get_input_embeddings()
        self._lm_head = model.get_output_embeddings()
        # hidden_states[0] are the embeddings: decoder layer i's output stands at i + 1 (trap 1).
        self._taps = [layer + 1 for layer in target_layer_ids]

    @classmethod
    def load(cls, directory: Path, spec: TargetSpec, target_layer_ids: Sequence[int]) -> HuggingFaceTarget:
        """Loads safetensors weights; code that a checkpoint brings along is never run.

        Raises CheckpointError for a tap on the last layer: transformers returns it after the final norm.
        """
        if spec.num_hidden_layers - 1 in target_layer_ids:
            raise CheckpointError(
                f"target_layer_ids: expected layers below {spec.num_hidden_layers - 1}, found the last"
                " layer, whose output transformers returns only after the final norm"
            )
        model = AutoModelForCausalLM.from_pretrained(
            directory,
            dtype=torch.float32,
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
        return cls(model.eval(), target_layer_ids)

    def stop_token_ids(self) -> frozenset[int]:
        """The end-of-sequence tokens of generation_config.json (config.json where there is none)."""
        ids = self.model.generation_config.eos_token_id
        return frozenset() if ids is None else frozenset([ids] if isinstance(ids, int) else ids)

    def prefill(self, token_ids: Sequence[int]) -> Verified:
        """Begins a new sequence; only the last token's logits are computed."""
        self._cache = DynamicCache(config=self.model.config)
        self._cache.activate_past_recording()  # without it a full sliding window cannot be rolled back
        verified = self._forward(token_ids, logits_to_keep=1)
        self.rollback(0)
        return verified

    def verify(self, token_ids: Sequence[int]) -> Verified:
        """Appends tokens to the sequence."""
        return self._forward(token_ids, logits_to_keep=0)  # 0: all

    def rollback(self, num_tokens: int) -> None:
        """Crops the cache; with 0 it still trims sliding windows back to their size."""
        self._cache.crop(-num_tokens)

    @torch.inference_mode()
    def embed(self, token_ids: Sequence[int]) -> torch.Tensor:
        """Input embeddings [n, H]."""
        embeddings: torch.Tensor = self._embedding(torch.tensor(token_ids))
        return embeddings

    @torch.inference_mode()
    def predict(self, hidden: torch.Tensor) -> torch.Tensor:
        """Greedy choice [n] of the lm_head."""
        logits: torch.Tensor = self._lm_head(hidden)
        return logits.argmax(dim=-1)

    @torch.inference_mode()
    def _forward(self, token_ids: Sequence[int], *, logits_to_keep: int) -> Verified:
        output = self.model(
            torch.tensor([token_ids]),
            past_key_values=self._cache,
            use_cache=True,
            output_hidden_states=bool(self._taps),
            logits_to_keep=logits_to_keep,
        )
        taps = [output.hidden_states[tap][0] for tap in self._taps]
        return Verified(
            next_tokens=output.logits[0].argmax(dim=-1),
            taps=torch.cat(taps, dim=-1) if taps else torch.empty(len(token_ids), 0),
        )
