# SPDX-License-Identifier: Apache-2.0
"""Every causal language model of transformers that can be made small, against uncached passes of itself.

Each decodes plain, drafted with blocks that are accepted in part, several requests at once, after a shared prefix, from
one token, and around its window. Others are listed with the reason.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dflash_trt.checkpoint.decoded_tensor import as_float32, map_tensor
from dflash_trt.checkpoint.target_checkpoint import TargetSpec, input_embedding
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.errors import CheckpointError
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.drafter.open import open_drafter
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets.huggingface import make_target
from dflash_trt.runtime.targets.running_model import HuggingFaceTarget
from dflash_trt.runtime.targets.target import Segment
from tests.engines import build
from tests.reference.synthetic import DraftSizes, write_random_draft
from tests.runtime.batches import Job, Workload, check_drafted, drive

WINDOW = 8
DRAFT_SIZES = DraftSizes(hidden=32, intermediate=48, vocab_size=64, num_taps=2, num_target_layers=4)
NUM_LAYERS = DRAFT_SIZES.num_target_layers
SIZES: dict[str, Any] = {
    **{"vocab_size": DRAFT_SIZES.vocab_size, "hidden_size": DRAFT_SIZES.hidden, "num_hidden_layers": NUM_LAYERS},
    **{"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
    **{"max_position_embeddings": 2048, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1},
    **{"initializer_range": 0.3, "sliding_window": WINDOW, "sliding_window_size": WINDOW, "is_decoder": True},
    **{"num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2},
    **{"moe_intermediate_size": 16, "n_shared_experts": 1, "shared_expert_intermediate_size": 16},
    **{"n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_experts_per_token": 2},
    **{"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12},
    **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 8},
    **{
        "linear_num_heads": 4,
        "linear_head_dim": 8,
        "chunk_size": 4,
        "hc_mult": 3,
        "hc_sinkhorn_iters": 2,
        "rotary_dim": 8,
    },
    **{"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 4},
    **{"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "state_size": 8, "n_groups": 1},
    # with two heads, scores are often 0, which is a tie
    **{"index_n_heads": 16, "index_head_dim": 16, "index_topk": 4},
}
"""Facts that are given wherever a configuration has them. Attention is far from uniform at this initializer_range."""
HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
GEMMA_4 = {
    **{"hidden_size_per_layer_input": 0, "head_dim": 16, "global_head_dim": 24, "num_key_value_heads": 2},
    **{"num_attention_heads": 4, "layer_types": ["sliding_attention", "full_attention"] * 2},
}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4}},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "electra": {"embedding_size": 32}, "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "hrm_text": {"initializer_range": 0.05},  # 32 recurrent layers, which at 0.3 turn 1e-6 into 1e-3
    "falcon_h1": {"mamba_d_ssm": 64},
    "gemma3n_text": {
        **{"num_kv_shared_layers": 0, "layer_types": ["sliding_attention", "full_attention"] * 2},
        **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "laurel_rank": 8},
        **{"activation_sparsity_pattern": [0.0] * 4},
    },
    "gemma4_text": GEMMA_4, "gemma4_unified_text": GEMMA_4,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": WINDOW},
    "granitemoehybrid": HYBRID,
    "helium": {"head_dim": 8},
    "inkling2_loop_text": {"unpadded_vocab_size": 64}, "inkling2_text": {"unpadded_vocab_size": 64},
    "inkling_text": {"unpadded_vocab_size": 64},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "mamba_dt_rank": 4},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 4, "head_dim": 16},
    "qwen4_exp_text": {
        **{"hc_count": 3, "hc_lowrank": 8, "layer_types": ["linear_attention", "indexed_attention"] * 2},
        **{"indexer_n_heads": 16, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8},
        "indexer_compress_ratio": 2,
    },
    "zaya": {"num_experts_per_tok": 1},
    "glm5_next_text": {
        **{"qk_rope_head_dim": 0, "layer_types": ["linear_attention", "indexed_attention"] * 2},
        **{"index_kpool": 2, "pad_token_id": 0, "mlp_layer_types": ["dense", "sparse"] * 2},
        "indexer_types": ["full"] * 4,
    },
    "mistral_large4_text": {"num_key_value_heads": 4},
}  # fmt: skip
SMALL_VISION = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "depth": 1, "num_heads": 2}
SMALL_VISION |= {
    "num_attention_heads": 2,
    "text_hidden_size": 32,
    "out_hidden_size": 32,
    "projection_intermediate_size": 16,
}
MULTIMODAL = {"glm5_next": "glm5_next_text", "mistral_large4": "mistral_large4_text", "inkling2": "inkling2_text"}
"""Models that transformers has below images only, and their language models."""


def small_config(model_type: str) -> Any:
    """The default configuration with `SIZES` and `OVERRIDES`."""
    if model_type in MULTIMODAL:
        vision = CONFIG_MAPPING[model_type]().vision_config
        facts = {key: value for key, value in SMALL_VISION.items() if _can_be_given(vision, key)}
        return CONFIG_MAPPING[model_type](
            text_config=small_config(MULTIMODAL[model_type]).to_dict(), vision_config=type(vision)(**facts).to_dict()
        )
    config_class = CONFIG_MAPPING[model_type]
    default = config_class()
    facts = {key: value for key, value in SIZES.items() if _can_be_given(default, key)}
    if "kv_lora_rank" in facts:  # heads of latent attention share no keys and have two parts
        facts["num_key_value_heads"] = facts["num_attention_heads"]
        facts.pop("head_dim", None)
    if _can_be_given(default, "layer_types") and default.layer_types:
        kinds = list(dict.fromkeys(default.layer_types))
        facts["layer_types"] = [kinds[i % len(kinds)] for i in range(NUM_LAYERS)]
    return config_class(**(facts | OVERRIDES.get(model_type, {})))


def _can_be_given(config: Any, key: str) -> bool:
    """Whether a configuration has a key that is not computed from others."""
    key = type(config).attribute_map.get(key, key)
    own = getattr(type(config), key, None)
    return key in config.to_dict() and not (isinstance(own, property) and own.fset is None)


def random_model(model_type: str) -> PreTrainedModel:
    """With weights so large that attention is far from uniform, and no two norms or sinks alike."""
    torch.manual_seed(0)
    model = _from_config(model_type)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def _from_config(model_type: str) -> PreTrainedModel:
    maker = AutoModelForImageTextToText if model_type in MULTIMODAL else AutoModelForCausalLM
    model: PreTrainedModel = maker.from_config(small_config(model_type), attn_implementation="eager")
    return model


NUM_SLOTS = 4
MAX_TOKENS = 4
TAPS = (1, 2)
TOLERANCE = 1e-4
QUICK = ("qwen3_5_text", "bamba", "minimax", "lfm2")
"""Packed state that is replayed, positions, a cache of its own, and convolutions that are cropped."""
SIDE_BY_SIDE = ("hy_v4", "qwen4_exp_text")
"""Several residual streams, of which all are the taps."""

ENCODER_DECODER = "half of a model that reads its prompt with an encoder"
TOKEN_BY_TOKEN = "continues a sequence by one token a pass only"
BELOW_IMAGES = "its language model is {}"
NOT_MADE = {
    "blt": "its parts have configurations of their own, 4.6 G parameters by default",
    "cohere_compass_text": "its default configuration has no rope_parameters of its layer types",
    "dbrx": "transformers 5.24's own configuration has no rope_theta, which the model asks for",
    "dots3_note_text": "77 M parameters at the least",
    "emu3": "8.5 G parameters by default; text and images in one",
    "fuyu": BELOW_IMAGES.format("persimmon"), "gemma3": BELOW_IMAGES.format("gemma3_text"),
    "gemma3n": BELOW_IMAGES.format("gemma3n_text"), "gemma4": BELOW_IMAGES.format("gemma4_text"),
    "gemma4_unified": BELOW_IMAGES.format("gemma4_unified_text"), "llama4": BELOW_IMAGES.format("llama4_text"),
    "dots3_note": BELOW_IMAGES.format("dots3_note_text"), "qwen3_5": BELOW_IMAGES.format("qwen3_5_text"),
    "qwen3_5_moe": BELOW_IMAGES.format("qwen3_5_moe_text"), "qwen4_exp": BELOW_IMAGES.format("qwen4_exp_text"),
    "got_ocr2": BELOW_IMAGES.format("qwen2"), "moss_transcribe_diarize": BELOW_IMAGES.format("qwen3"),
    "mllama": "cross-attention to images", "git": "a model of captions",
    "phi4_multimodal": "870 M parameters at the least",
    "gemma4_assistant": "a draft", "gemma4_unified_assistant": "a draft",
    "longcat_flash": "counts each of its layers twice in num_hidden_layers",
    "reformer": "its hashed attention has no cache", "xlnet": "permutes its input and has no cache",
    "xmod": "asks for a language with each request", "zamba2": "its default pattern has no small form",
    **dict.fromkeys(("musicgen", "musicgen_melody", "whisper", "prophetnet", "plbart", "trocr"), ENCODER_DECODER),
}  # fmt: skip
REFUSED = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba", "zamba", "moshi"), TOKEN_BY_TOKEN),
    "recurrent_gemma": "cannot be cropped .*differ",
    "dory": "taps of token",  # for layers that run several times
    "mamba2": "taps of token",  # the model's hidden_states are not its layers' outputs
    "gemma3n_text": "taps",  # four streams in a dimension before the batch
    "rwkv": "differ", "xlstm": "", "openai-gpt": "differ", "xlm": "differ",  # no cache that a decoder can hold
    "cpmant": "expected logits",  # writes a prompt of its own before each pass
    **dict.fromkeys(
        ("bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "marian", "mbart", "mvp", "pegasus"), ""
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One drafter for all: random as it is, it fits none better than another."""
    path = tmp_path_factory.mktemp("causal-models")
    build(write_random_draft(path / "draft", dialect="qwen3", sizes=DRAFT_SIZES), path / "engine")
    return path / "engine"


@torch.inference_mode()
def whole(model: PreTrainedModel, token_ids: list[int], tap_width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits and taps of an uncached pass."""
    output = model(torch.tensor([token_ids]), use_cache=False, output_hidden_states=True)
    taps = []
    for layer in TAPS:
        rows = output.hidden_states[layer + 1][0]
        if rows.dim() == 3:
            streams = [rows[:, i] for i in range(rows.shape[1])]
            rows = torch.cat(streams, -1) if tap_width > rows.shape[-1] else sum(streams) / len(streams)
        taps.append(rows)
    return output.logits[0], torch.cat(taps, -1)


def answer(model: PreTrainedModel, prompt_ids: list[int]) -> Job:
    token_ids = list(prompt_ids)
    for _ in range(MAX_TOKENS):
        token_ids.append(int(whole(model, token_ids, 0)[0][-1].argmax()))
    return Job(prompt_ids=prompt_ids, max_tokens=MAX_TOKENS, expected=token_ids[len(prompt_ids) :])


def check_family(model_type: str, engine: Path) -> None:
    oracle, model = random_model(model_type), random_model(model_type)
    num_streams = 3 if model_type in SIDE_BY_SIDE else 1
    target = make_target(model, TAPS, NUM_SLOTS, accelerate, tap_hidden_size=num_streams * DRAFT_SIZES.hidden)
    check_history(target, oracle, TOLERANCE)
    if num_streams > 1:
        return
    manifest = read_manifest(engine)
    session = Session(manifest, target, open_drafter(engine, manifest, num_slots=NUM_SLOTS), None, frozenset())
    workload = Workload(session=session, oracle=oracle, jobs=[answer(oracle, prompt) for prompt in prompts()])
    check_drafted(
        workload, 0, at_once=True, num_slots=NUM_SLOTS, prefill_chunk=64, prefix_caching=target.keeps_prefixes
    )
    plain = [workload.request(job) for job in workload.jobs]
    drive(workload.decoder(0, num_slots=NUM_SLOTS), plain)
    assert [request.token_ids for request in plain] == [job.expected for job in workload.jobs]


def prompts() -> list[list[int]]:
    """One token, just below a window, beyond it, and two after one page; without mask, padding and ends."""
    rng = random.Random(0)
    one, short, long, page = (
        [rng.randrange(2, DRAFT_SIZES.vocab_size - 1) for _ in range(n)] for n in (1, WINDOW - 2, 13, TOKENS_PER_PAGE)
    )
    return [page + short, one, short, long, page + one]


def check_history(target: HuggingFaceTarget, oracle: PreTrainedModel, tolerance: float) -> None:
    """Logits and taps of ragged segments, with all, some and none of their tokens taken back, from one token on."""
    rng = random.Random(1)
    sequences: list[list[int]] = [[] for _ in range(NUM_SLOTS)]
    for lengths, rejected in (
        ((1, 1, 4, 9), (0, 0, 0, 0)), ((5, 1, 5, 5), (4, 0, 2, 0)), ((5, 5, 2, 5), (4, 4, 0, 1)),
        ((1, 5, 5, 5), (0, 2, 0, 4)),
    ):  # fmt: skip
        slots = rng.sample(range(NUM_SLOTS), NUM_SLOTS)
        segments = [
            Segment(slot=slot, token_ids=rng.choices(range(2, DRAFT_SIZES.vocab_size), k=n), num_logits=n)
            for slot, n in zip(slots, lengths, strict=True)
        ]
        verified = target.verify(segments, with_taps=True)
        begin = 0
        for segment, count in zip(segments, rejected, strict=True):
            sequence, end = sequences[segment.slot], begin + len(segment.token_ids)
            sequence += segment.token_ids
            expected = whole(oracle, sequence, target.tap_hidden_size)
            for found, all_rows in zip((verified.logits, verified.taps), expected, strict=True):
                wanted = all_rows[-len(segment.token_ids) :]
                error = (found[begin:end] - wanted).abs().max() / all_rows.abs().max()
                assert float(error) < tolerance, (segment, float(error))
            del sequence[len(sequence) - count :]
            target.rollback(segment.slot, count)
            begin = end
    for slot in range(NUM_SLOTS):
        target.release(slot)


OTHERS = sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL} - {*NOT_MADE, *REFUSED})


@pytest.mark.parametrize("model_type", [pytest.param(n, marks=() if n in QUICK else pytest.mark.full) for n in OTHERS])
def test_it_decodes(model_type: str, engine: Path) -> None:
    check_family(model_type, engine)


@pytest.mark.parametrize(
    "model_type", [pytest.param(n, marks=() if n == "jamba" else pytest.mark.full) for n in sorted(REFUSED)]
)
def test_it_is_refused_by_name_with_the_reason(model_type: str) -> None:
    with pytest.raises(CheckpointError, match=f"found {model_type}: .*{REFUSED[model_type]}"):
        make_target(random_model(model_type), TAPS, NUM_SLOTS)


@pytest.mark.full
def test_the_lists_name_models_that_there_are() -> None:
    assert not ({*NOT_MADE} | {*REFUSED} | {*QUICK}) - {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *MULTIMODAL}


@pytest.mark.parametrize(
    "model_type", [pytest.param(n, marks=() if n == "nemotron_h" else pytest.mark.full) for n in OTHERS]
)
def test_the_input_embedding_is_found_by_its_name(model_type: str, tmp_path: Path) -> None:
    model = random_model(model_type)
    model.save_pretrained(tmp_path)
    table = model.get_input_embeddings().weight
    spec = TargetSpec(
        model_type=model_type, vocab_size=table.shape[0], hidden_size=table.shape[1], num_hidden_layers=4,
        max_position_embeddings=2048,
    )  # fmt: skip
    found = as_float32(map_tensor(input_embedding(tmp_path, spec, read_weights(tmp_path))))
    assert torch.equal(torch.from_numpy(found), table.float())
