"""Greedy DFlash decoding from the definition: the float64 drafter, and a target without any cache.

    tokens = prompt + [target's first token] repeat: draft S-1 tokens after the last one; keep those the target would
have chosen, plus its next choice; the features of exactly the verified tokens become drafter context.

Each step runs the target over all tokens from the start, so there is no rollback to get wrong.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tests.reference.dflash_float64 import Array, ReferenceDrafter


@dataclass(frozen=True, kw_only=True, slots=True)
class ReferenceRun:
    """One greedy generation, for one request."""

    output_ids: list[int]
    """Generated tokens without the prompt, cut to the budget and after the first eos."""
    committed: list[int] = field(default_factory=list)
    """Tokens that each verify step added, after the cut."""
    proposals: list[list[int]] = field(default_factory=list)
    """The S-1 drafted tokens of each step."""


def target_forward(target: PreTrainedModel, ids: Sequence[int], taps: Sequence[int]) -> tuple[list[int], Array]:
    """ids -> the target's choice after each of them, and features [len(ids), A*H].

    Tap i is the residual stream after decoder layer i, caught by a hook on that layer.
    """
    layers = target.get_decoder().layers
    caught: dict[int, torch.Tensor] = {}

    def catch(tap: int, output: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
        caught[tap] = output if isinstance(output, torch.Tensor) else output[0]

    hooks = [
        layers[tap].register_forward_hook(lambda _module, _inputs, output, tap=tap: catch(tap, output)) for tap in taps
    ]
    try:
        with torch.inference_mode():
            logits = target(torch.tensor([list(ids)]), use_cache=False).logits[0]
    finally:
        for hook in hooks:
            hook.remove()
    features = torch.cat([caught[tap][0] for tap in taps], dim=-1)
    return logits.argmax(dim=-1).tolist(), features.double().numpy()


def reference_greedy(
    target: PreTrainedModel,
    draft_dir: Path | str,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    eos_ids: Sequence[int] = (),
    features: dict[str, Any] | None = None,
) -> ReferenceRun:
    """Greedy DFlash generation with any causal LM of transformers; `features` as ReferenceDrafter.load has them."""
    drafter = ReferenceDrafter.load(draft_dir, features)
    config = json.loads((Path(draft_dir) / "config.json").read_text())
    taps, mask = (config["dflash_config"][key] for key in ("target_layer_ids", "mask_token_id"))
    block_size = config["dflash_config"].get("block_size", config.get("block_size"))
    embed = target.get_input_embeddings().weight.detach().double().numpy()
    head = target.get_output_embeddings().weight.detach().double().numpy()

    choices, features = target_forward(target, prompt_ids, taps)
    tokens = [*prompt_ids, choices[-1]]
    run = ReferenceRun(output_ids=[choices[-1]])
    while len(run.output_ids) < max_new_tokens and run.output_ids[-1] not in eos_ids:
        num_context = len(tokens) - 1  # the last token has no features yet: it is the anchor
        block = [tokens[-1]] + [mask] * (block_size - 1)
        k, v = drafter.context_kv(features[:num_context], np.arange(num_context))
        rows = drafter.embeddings(block, mask, embed)
        hidden = drafter.draft(rows, k, v, np.arange(num_context, num_context + block_size))
        borrowed: list[int] = (hidden[1:] @ head.T).argmax(axis=-1).tolist()
        proposed = drafter.proposals(hidden) if "lm_head.weight" in drafter.tensors else borrowed

        choices, features = target_forward(target, tokens + proposed, taps)
        verified = choices[num_context:]  # the target's token after the anchor, after slot 1, ..
        num_accepted = next((i for i in range(len(proposed)) if proposed[i] != verified[i]), len(proposed))
        new = verified[: num_accepted + 1][: max_new_tokens - len(run.output_ids)]
        new = new[: next((i + 1 for i, token in enumerate(new) if token in eos_ids), len(new))]
        tokens += new
        run.output_ids.extend(new)
        run.committed.append(len(new))
        run.proposals.append(proposed)
    return run
