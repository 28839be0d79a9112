# SPDX-License-Identifier: Apache-2.0
"""Every causal language model of transformers that can be made small, against uncached passes of itself.

Each decodes plain, drafted with blocks that are accepted in part, several requests at once, behind a shared prefix,
from one token, and around its window. Others are listed with the reason.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from dflash_trt.checkpoint.mapped import as_float32, map_tensor
from dflash_trt.checkpoint.target_checkpoint import TargetSpec, input_embedding
from dflash_trt.checkpoint.weights import read_weights
from dflash_trt.engine.manifest import read_manifest
from dflash_trt.engine.signatures import TOKENS_PER_PAGE
from dflash_trt.errors import CheckpointError
from dflash_trt.runtime.cpu.accelerate import accelerate
from dflash_trt.runtime.drafter.drafter import open_drafter
from dflash_trt.runtime.session import Session
from dflash_trt.runtime.targets import sequential_target
from dflash_trt.runtime.targets.huggingface import make_target
from dflash_trt.runtime.targets.sequential_target import SequentialTarget
from dflash_trt.runtime.targets.target import HuggingFaceTarget, Segment
from tests.engines import build
from tests.reference.synthetic import write_random_draft
from tests.runtime.batches import Job, Workload, check_drafted, drive
from tests.runtime.targets.causal_models import DRAFT_SIZES, MULTIMODAL, WINDOW, random_model

NUM_SLOTS = 4
MAX_TOKENS = 6
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
    "dory": "taps of token",  # of layers that run several times
    "mamba2": "taps of token",  # its hidden_states are not its layers' outputs
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
    """One token, just below a window, beyond it, and two behind one page; without mask, padding and ends."""
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


def drop_positions(monkeypatch: pytest.MonkeyPatch) -> str:
    ours = HuggingFaceTarget.__init__

    def without(self: HuggingFaceTarget, *args: object) -> None:
        ours(self, *args)  # type: ignore[arg-type]
        self._takes_positions = False

    monkeypatch.setattr(HuggingFaceTarget, "__init__", without)
    return "bamba"


def keep_one_too_many(monkeypatch: pytest.MonkeyPatch) -> str:
    ours = SequentialTarget.rollback
    monkeypatch.setattr(SequentialTarget, "rollback", lambda self, slot, n: ours(self, slot, max(0, n - 1)))
    return "lfm2"


def swap_streams(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(
        HuggingFaceTarget, "_tap", lambda self, hidden: hidden[:, :, 0] if hidden.dim() == 4 else hidden
    )
    return "deepseek_v4"


@pytest.mark.parametrize(
    "plant", [drop_positions, *(pytest.param(p, marks=pytest.mark.full) for p in (keep_one_too_many, swap_streams))]
)
def test_a_planted_fault_is_found_at_load_and_by_this_suite(
    plant: Callable[[pytest.MonkeyPatch], str], engine: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model_type = plant(monkeypatch)
    with pytest.raises(CheckpointError, match=f"found {model_type}: .*differ"):
        make_target(random_model(model_type), TAPS, NUM_SLOTS)
    monkeypatch.setattr(sequential_target, "disagreement", lambda target: None)
    with pytest.raises(AssertionError):
        check_family(model_type, engine)
