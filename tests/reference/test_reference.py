"""The float64 drafter against hand-computed numbers and against transformers' own drafter class."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GptOssConfig
from transformers.cache_utils import DFlashCache
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from tests.oracle.transformers_dflash import load_assistant
from tests.reference.dflash_float64 import AttentionRule, ReferenceDrafter, RotaryEmbedding, yarn
from tests.reference.synthetic import Dialect, DraftSizes, write_random_draft

GPT_OSS_YARN: dict[str, Any] = {"factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0}
GPT_OSS_YARN["original_max_position_embeddings"] = 4096


@pytest.mark.parametrize(
    ("rule", "visible"),
    [
        (AttentionRule(causal=False, window=None), ["111111", "111111", "111111"]),
        (AttentionRule(causal=True, window=None), ["111100", "111110", "111111"]),
        (AttentionRule(causal=True, window=2), ["001100", "000110", "000011"]),
        (AttentionRule(causal=False, window=2), ["001110", "000111", "000011"]),
    ],
)
def test_visible_keys(rule: AttentionRule, visible: list[str]) -> None:
    seen = rule.visible(np.arange(3, 6), np.arange(6))
    assert ["".join(str(int(flag)) for flag in row) for row in seen] == visible


def test_interleaved_pairs_are_those_of_glm() -> None:
    from transformers.models.glm.modeling_glm import apply_rotary_pos_emb

    frequencies = 1e4 ** (-np.arange(8) / 8.0)
    rotary = RotaryEmbedding(inverse_frequencies=frequencies, attention_factor=1.3, interleaved=True)
    x, positions = np.random.default_rng(0).normal(size=(5, 2, 16)), np.arange(40, 45)
    angles = torch.from_numpy(np.tile(positions[:, None] * frequencies, 2))  # [rows, D]
    heads = torch.from_numpy(x)
    theirs, _ = apply_rotary_pos_emb(heads, heads, 1.3 * angles.cos(), 1.3 * angles.sin())
    np.testing.assert_allclose(rotary.rotate(x, positions), theirs.numpy(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("truncate", [False, True])
@pytest.mark.parametrize("head_dim", [16, 64, 128])
def test_yarn_equals_transformers(head_dim: int, truncate: bool) -> None:
    rope = GPT_OSS_YARN | {"truncate": truncate}
    config = GptOssConfig(head_dim=head_dim, rope_parameters=rope | {"rope_type": "yarn", "rope_theta": 150000.0})
    theirs, attention_factor = ROPE_INIT_FUNCTIONS["yarn"](config)
    ours = yarn(rope, 150000.0, head_dim)
    np.testing.assert_allclose(ours.inverse_frequencies, theirs.double().numpy(), rtol=1e-6)
    assert ours.attention_factor == pytest.approx(attention_factor, rel=1e-15)
    assert ours.attention_factor == pytest.approx(1.3465735902799727)


class Float64Norm(torch.nn.Module):
    """transformers' RMSNorm, which narrows to float32, without the narrowing."""

    def __init__(self, narrow: torch.nn.Module) -> None:
        super().__init__()
        self.weight, self.eps = narrow.weight, narrow.variance_epsilon

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Float64Rotary(torch.nn.Module):
    """transformers' rotary embedding, likewise; the frequencies are checked against theirs on their own."""

    def __init__(self, rotary: RotaryEmbedding) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        half = position_ids[..., None].double() * torch.from_numpy(self.rotary.inverse_frequencies)
        angles = torch.cat([half, half], dim=-1)
        return angles.cos() * self.rotary.attention_factor, angles.sin() * self.rotary.attention_factor


def widen(module: torch.nn.Module, rotary: RotaryEmbedding) -> None:
    """Replaces every float32 island of a MuseGlimmerAssistantModel, in place."""
    for name, child in module.named_children():
        if type(child).__name__.endswith("RMSNorm"):
            setattr(module, name, Float64Norm(child))
        elif name == "rotary_emb":
            np.testing.assert_allclose(rotary.inverse_frequencies, child.inv_freq.double().numpy(), rtol=1e-6)
            assert rotary.attention_factor == pytest.approx(child.attention_scaling)
            setattr(module, name, Float64Rotary(rotary))
        else:
            widen(child, rotary)


SLIDING = ["sliding_attention", "full_attention", "sliding_attention"]
CONTEXT_CHUNKS = (7, 1, 4, 6, 1)


@pytest.mark.parametrize(("layer_types", "window"), [(None, None), (SLIDING, 4), (SLIDING, 7), (SLIDING, 64)], ids=str)
@pytest.mark.parametrize("dialect", ["qwen3", "gpt_oss"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-11), (torch.float32, 2e-5)], ids=str)
def test_draft_equals_transformers(
    tmp_path: Path, dialect: Dialect, layer_types: list[str] | None, window: int | None, dtype: torch.dtype,
    tolerance: float,
) -> None:  # fmt: skip
    """Drafting calls over a growing context: in float64 with the float32 islands widened, then untouched."""
    sizes = DraftSizes()
    write_random_draft(
        tmp_path, dialect=dialect, layer_types=layer_types, sliding_window=window, is_causal=False, seed=3
    )
    drafter, model = ReferenceDrafter.load(tmp_path), load_assistant(tmp_path, dtype)
    if dtype == torch.float64:
        widen(model, drafter.rotary)
    cache = DFlashCache(config=model.config)
    cache.activate_past_recording()
    random = np.random.default_rng(5)
    layers_kv = (len(drafter.rules), sizes.num_kv_heads, sizes.head_dim)
    context_k, context_v = np.zeros((0, *layers_kv)), np.zeros((0, *layers_kv))
    for call, num_new in enumerate(CONTEXT_CHUNKS):
        begin = len(context_k)
        target_hidden = 30 * random.standard_normal((num_new, sizes.num_taps * sizes.hidden))
        noise = random.standard_normal((sizes.block_size, sizes.hidden))
        positions = np.arange(begin, begin + num_new + sizes.block_size)

        k, v = drafter.context_kv(target_hidden, positions[:num_new])
        context_k, context_v = np.concatenate([context_k, k]), np.concatenate([context_v, v])
        ours = drafter.draft(noise, context_k, context_v, positions[num_new:])

        cache.set_previous_accepted_tokens(num_new)
        if call > 0:
            cache.crop(-sizes.block_size)
        with torch.no_grad():
            theirs = model(
                noise_embeds=torch.from_numpy(noise)[None].to(dtype),
                context_hidden_states=torch.from_numpy(target_hidden)[None].to(dtype),
                position_ids=torch.from_numpy(positions)[None],
                past_key_values=cache,
            ).last_hidden_state[0]
        np.testing.assert_allclose(ours, theirs.double().numpy(), rtol=0, atol=tolerance, err_msg=f"call {call}")
