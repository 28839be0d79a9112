"""Greedy DFlash decoding by Hugging Face transformers, as an oracle of tokens and verify steps.

transformers (>= 5.23) drafts with MuseGlimmerAssistantModel, the qwen3 drafter under two other tensor names,
and loops in GenerationMixin._assisted_decoding with DFlashTokenCandidateGenerator. It is switched on by
`target.generate(assistant_model=..., speculation_type="dflash")`. How it differs from the z-lab reference:

  * Prefill is the loop's first iteration without candidates: it yields the first token and is no verify step.
  * Each step drafts and verifies a whole block, whatever the budget; the surplus is cut off afterwards. Only
    when one token is left does it run the target alone: that forward is a verify step here, committing one.
  * Tokens after an eos are cut off; the eos itself stays. No step follows it.
  * A window lets |q - k| <= window through where z-lab has `<`; load_assistant passes window - 1.
  * Layers are never causal inside the block; load_assistant refuses a causal drafter.
  * Projections have no biases; load_assistant adds them, so gpt_oss drafters run too.
  * hidden_states[-1] is the *final-normed* stream: a tap on the target's last layer means that one, in the
    z-lab reference as well (both read the transformers tuple).
  * `output_hidden_states=[ids]` gives a full-length tuple with None where not asked for; Qwen3 and GptOss
    accept it through **kwargs, no workaround is needed.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, MuseGlimmerAssistantConfig, MuseGlimmerAssistantModel, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from tests.reference.dflash_float64 import read_attention_rules


@dataclass(frozen=True, kw_only=True, slots=True)
class OracleRun:
    """One greedy generation."""

    output_ids: list[int]
    """Generated tokens, without the prompt, with the eos if it was met."""
    committed: list[int]
    """Tokens that each verify step added, cut to budget and eos; the prefill's token is not in it."""
    proposals: list[list[int]]
    """The drafted tokens of each verify step: block_size - 1 of them, or none where one token was left."""

    @property
    def steps(self) -> int:
        """Verify steps: target forwards after the prefill."""
        return len(self.proposals)


class _CommitRecorder(BaseStreamer):
    """Counts the tokens of each put: the prompt, the prefill's token, then one put per verify step."""

    def __init__(self) -> None:
        self.lengths: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.lengths.append(value.numel())

    def end(self) -> None:
        pass


def load_target(target_dir: Path | str) -> PreTrainedModel:
    """The target in float32, eager attention."""
    model = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


def load_assistant(draft_dir: Path | str, dtype: torch.dtype = torch.float32) -> MuseGlimmerAssistantModel:
    """A z-lab drafter (qwen3 or gpt_oss dialect) as transformers' class.

    Raises ValueError for a drafter with a layer that is causal inside the block.
    """
    path = Path(draft_dir)
    config = json.loads((path / "config.json").read_text())
    rules = read_attention_rules(config)
    if any(rule.causal for rule in rules):
        raise ValueError(f"{path}: transformers' DFlash blocks are never causal")
    model = MuseGlimmerAssistantModel(_assistant_config(config, [rule.window for rule in rules]))
    if config.get("attention_bias"):
        for layer in model.layers:
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                old = getattr(layer.self_attn, name)
                setattr(layer.self_attn, name, torch.nn.Linear(old.in_features, old.out_features, bias=True))
    tensors = {_assistant_name(name): tensor for name, tensor in load_file(path / "model.safetensors").items()}
    model.load_state_dict(tensors, strict=True)
    return model.to(dtype).eval()


def _assistant_name(name: str) -> str:
    return {"fc.weight": "encoder.fc.weight", "hidden_norm.weight": "encoder.output_norm_enc.weight"}.get(name, name)


def _assistant_config(config: dict[str, Any], windows: list[int | None]) -> MuseGlimmerAssistantConfig:
    dflash = config["dflash_config"]
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {"rope_type": "default"})
    rope.setdefault("rope_theta", config.get("rope_theta"))
    window = next((window for window in windows if window is not None), None)
    kept = (
        "head_dim", "hidden_act", "hidden_size", "intermediate_size", "max_position_embeddings", "num_attention_heads",
        "num_hidden_layers", "num_key_value_heads", "rms_norm_eps",
    )  # fmt: skip
    return MuseGlimmerAssistantConfig(
        **{key: config[key] for key in kept},
        block_size=dflash.get("block_size", config.get("block_size")),
        mask_token_id=dflash["mask_token_id"],
        target_layer_ids=dflash["target_layer_ids"],
        rope_parameters=rope,
        layer_types=["full_attention" if w is None else "sliding_attention" for w in windows],
        sliding_window=window - 1 if window is not None else config["max_position_embeddings"],
        attn_implementation="sdpa",
    )


def dflash_greedy(
    target: PreTrainedModel,
    assistant: MuseGlimmerAssistantModel,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    eos_ids: Sequence[int] | None = None,
) -> OracleRun:
    """Greedy generation with drafts. eos_ids None means the checkpoint's, () means none."""
    commits, inputs = _CommitRecorder(), list[list[int]]()

    def record(_module: torch.nn.Module, _args: object, kwargs: dict[str, Any]) -> None:
        inputs.append(kwargs["input_ids"][0].tolist())

    hook = target.register_forward_pre_hook(record, with_kwargs=True)
    options = {"assistant_model": assistant, "speculation_type": "dflash", "streamer": commits}
    try:
        output_ids = _generate(target, prompt_ids, max_new_tokens, eos_ids, options)
    finally:
        hook.remove()
    proposals = [block[1:] for block in inputs[1:]]  # the first forward is the prefill, slot 0 the anchor
    return OracleRun(output_ids=output_ids, committed=commits.lengths[2:], proposals=proposals)


def plain_greedy(
    target: PreTrainedModel, prompt_ids: Sequence[int], max_new_tokens: int, eos_ids: Sequence[int] | None = None
) -> list[int]:
    """Greedy generation without drafts: the tokens every DFlash implementation must reproduce."""
    return _generate(target, prompt_ids, max_new_tokens, eos_ids, {})


def _generate(
    target: PreTrainedModel,
    prompt_ids: Sequence[int],
    max_new_tokens: int,
    eos_ids: Sequence[int] | None,
    options: dict[str, Any],
) -> list[int]:
    if eos_ids is not None:
        never_emitted = target.config.get_text_config().vocab_size  # generate() cannot be told `no eos` for one call
        options = options | {"eos_token_id": list(eos_ids) or [never_emitted]}
    prompt = torch.tensor([list(prompt_ids)], device=target.device)
    with torch.inference_mode():
        sequences = target.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=max_new_tokens,
            do_sample=False,
            use_cache=True,
            **options,
        )
    return sequences[0, len(prompt_ids) :].tolist()
