# SPDX-License-Identifier: Apache-2.0
"""Features beyond z-lab's v1 drafts, one by one and as each dialect has them, against the float64 equations, 1e-5.

Rules and factors of a dialect are none that the package has read: they are written down here by hand.
"""

import math
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from dflash_trt.checkpoint.draft_spec import DraftLayer
from dflash_trt.checkpoint.rope import Llama3, Rope, Yarn
from tests.checkpoint.dialect_samples import WRITERS, write_muse_glimmer
from tests.engine.graph.test_parity import cache_of, compare_context, compare_draft, features
from tests.engines import Graphs, build
from tests.featured import build_featured, featured_draft
from tests.reference.dflash_float64 import AttentionRule, ReferenceDrafter, llama3, read_rotary, yarn
from tests.reference.synthetic import write_random_draft

H = 48


WINDOW, N, D = 7, 4, 16
YARN = {"factor": 32.0, "original_max_position_embeddings": 256, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}
LAYERS = (
    DraftLayer(sliding_window=3, causal=True),
    DraftLayer(sliding_window=WINDOW, causal=False),
    DraftLayer(sliding_window=None, causal=True),
)
SINKS = tuple(
    DraftLayer(sliding_window=layer.sliding_window, causal=False, sinks=layer.sliding_window is not None)
    for layer in LAYERS
)
LAGUNA = {"tap_norms": True, "context_input_layernorm": True}


def rules(layers: tuple[DraftLayer, ...]) -> list[AttentionRule]:
    return [AttentionRule(causal=layer.causal, window=layer.sliding_window) for layer in layers]


@dataclass(frozen=True)
class Case:
    """Facts as a reader sets them, and the same in the reference's words; tensors speak for themselves there."""

    name: str
    facts: dict[str, Any]
    reference: dict[str, Any] = field(default_factory=dict)
    dialect: Any = "qwen3"


def partial(dialect: str, scaling: Any, theta: float, factor: float) -> Case:
    rope = Rope(theta=theta, scaling=scaling, partial_rotary_factor=factor)
    dims = int(D * factor)
    config = {"rope_theta": theta} | ({"rope_scaling": YARN | {"rope_type": "yarn"}} if scaling else {})
    reference = {"rotary": read_rotary(config, dims), "rotary_dim": dims}
    return Case(f"partial rotary {dims} {dialect}", {"rope": rope}, reference, dialect)


def interleaved(dialect: str, scaling: Any, theta: float, factor: float) -> Case:
    case = partial(dialect, scaling, theta, factor)
    rope = msgspec.structs.replace(case.facts["rope"], interleaved=True)
    rotary = replace(case.reference["rotary"], interleaved=True)
    reference = case.reference | {"rotary": rotary}
    return Case(f"interleaved rotary {int(D * factor)} {dialect}", {"rope": rope}, reference, dialect)


CASES = [
    Case("biases of q and v, fc and MLP", {"biases": ("fc", "q_proj", "v_proj", "up_proj", "down_proj")}),
    Case("biases of q, k and v", {"biases": ("q_proj", "k_proj", "v_proj")}),
    Case("value scale", {"value_scale": 0.707}, {"value_scale": 0.707}),
    Case("embedding scale", {"input_embedding_scale": 48**0.5}, {"embedding_scale": 48**0.5}),
    Case("norms of taps", {"tap_norms": True}, {"tap_norms": True}),
    Case("context through input_layernorm", {"context_input_layernorm": True}, {"context_input_layernorm": True}),
    Case("gate a head", {"attention_gate": "per_head"}, {"gate": N}),
    Case("gate an element", {"attention_gate": "per_element"}, {"gate": N * D}),
    Case("window and causality by layer", {"layers": LAYERS}, {"rules": rules(LAYERS)}),
    Case("sinks", {"layers": SINKS}, {"rules": rules(SINKS)}),
    Case("taps of another width", {"tap_hidden_size": 32, "own_embedding": True, "draft_vocab_size": 96}),
    Case("llama3", {"rope": Rope(theta=1e4, scaling=Llama3(**LLAMA3))}, {"rotary": llama3(LLAMA3, 1e4, D)}),
    Case("YaRN, truncated", {"rope": Rope(theta=1e4, scaling=Yarn(**YARN | {"truncate": True}, attention_factor=1.25))},
         {"rotary": yarn(YARN | {"truncate": True, "attention_factor": 1.25}, 1e4, D)}),
    partial("qwen3", None, 1e6, 0.5),
    interleaved("qwen3", None, 1e6, 1),
    interleaved("gpt_oss", Yarn(**YARN, attention_factor=0.1 * math.log(32) + 1), 150000.0, 0.5),
    partial("gpt_oss", Yarn(**YARN, attention_factor=0.1 * math.log(32) + 1), 150000.0, 0.25),
    Case("Laguna", {"attention_gate": "per_head", "layers": LAYERS, **LAGUNA},
         {"gate": N, "rules": rules(LAYERS), **LAGUNA}),
    Case("MiMo", {"layers": SINKS, "value_scale": 0.707, "mask_embedding": True},
         {"rules": rules(SINKS), "value_scale": 0.707}, "gpt_oss"),
]  # fmt: skip


@dataclass(frozen=True)
class Built:
    """One case: our graphs, the equations, and those of the draft without the feature."""

    graphs: Graphs
    reference: ReferenceDrafter
    without: ReferenceDrafter


def build_case(case: Case, directory: Path) -> Built:
    base = write_random_draft(directory / "base", dialect=case.dialect)
    build_featured(featured_draft(base, directory / "draft", case.facts), directory / "engine")
    reference = ReferenceDrafter.load(directory / "draft", case.reference)
    plain = ReferenceDrafter.load(base)
    known = {name: tensor for name, tensor in reference.tensors.items() if name in plain.tensors}
    return Built(Graphs(directory / "engine"), reference, replace(plain, tensors=known))


QUICK = ("biases of q and v, fc and MLP", "interleaved rotary 8 gpt_oss", "Laguna", "MiMo")
PARAMETERS = [pytest.param(c, id=c.name, marks=() if c.name in QUICK else pytest.mark.full) for c in CASES]


@pytest.fixture(scope="module", params=PARAMETERS)
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build_case(request.param, tmp_path_factory.mktemp("feature"))


@pytest.mark.parametrize("begin", [0, 250])
def test_context(built: Built, begin: int) -> None:
    compare_context(built.graphs, built.reference, begin)


@pytest.mark.parametrize("length", [0, 1, WINDOW - 1, WINDOW, WINDOW + 1, 40])
def test_draft(built: Built, length: int) -> None:
    compare_draft(built.graphs, built.reference, length)


def test_left_out_it_would_show(built: Built) -> None:
    """So that the two tests above fail where a feature is dropped."""
    graphs = built.graphs
    if graphs.spec.tap_hidden_size is not None:
        return  # without it nothing fits
    S, H, length = graphs.spec.block_size, graphs.spec.hidden_size, 40
    taps = features(graphs, length).astype(np.float64)
    noise = np.random.default_rng(0).standard_normal((S, H))
    block = np.arange(length, length + S)
    with_it, without = (
        r.draft(noise, *r.context_kv(taps, np.arange(length)), block) for r in (built.reference, built.without)
    )
    assert np.abs(with_it - without).max() > 1e-2 * np.abs(with_it).max()


NEMOTRON = {"rope_type": "yarn", "factor": 128.0, "original_max_position_embeddings": 64, "rope_theta": 10000}


def rules_of(*layers: tuple[int | None, bool]) -> list[AttentionRule]:
    return [AttentionRule(window=window, causal=causal) for window, causal in layers]


TRUTH: dict[str, dict[str, Any]] = {
    "zlab": {"rules": rules_of(*[(None, False)] * 3)},
    "modelopt": {"rules": rules_of(*[(7, False)] * 3)},
    "nemotron": {"rules": rules_of(*[(None, False)] * 3), "rotary": read_rotary({"rope_parameters": NEMOTRON}, D)},
    "jetspec": {"rules": rules_of(*[(None, True)] * 3)},
    "speculators": {"rules": rules_of((7, True), (None, False), (7, True))},
    "speculators_vocabulary": {"rules": rules_of((7, True), (None, False), (7, True))},
    "laguna": {"rules": rules_of(*[(7, True)] * 3), "tap_norms": True, "context_input_layernorm": True, "gate": 4},
    "mimo": {
        "rules": rules_of(*[(7, False)] * 3), "value_scale": 0.612, "rotary_dim": 8,
        "rotary": read_rotary({"rope_theta": 1000000}, 8),
    },
    "muse_glimmer": {"rules": rules_of((8, False), (None, False), (8, False))},
    "anchor_first": {
        "rules": rules_of((None, True), (None, False), (None, True)),
        "rotary": replace(read_rotary({"rope_theta": 1000000}, D), interleaved=True),
    },
    "specforge": {"rules": rules_of(*[(None, True)] * 3)},
}  # fmt: skip


QUICK_DIALECTS = ("laguna", "mimo", "speculators")


NAMES = [pytest.param(name, marks=() if name in QUICK_DIALECTS else pytest.mark.full) for name in TRUTH]


def reference_of(name: str, engine: Path, directory: Path) -> ReferenceDrafter:
    """The equations with the engine's tensors, on facts of `TRUTH`."""
    write_random_draft(directory, dialect="qwen3")
    shutil.copyfile(engine / "model.safetensors", directory / "model.safetensors")
    return ReferenceDrafter.load(directory, TRUTH[name])


@pytest.mark.parametrize("name", NAMES)
def test_graphs_of_each_dialect(name: str, tmp_path: Path) -> None:
    """Context of lengths on both sides of the window; a copy in our own layout gives the same graphs."""
    source = WRITERS[name](tmp_path / "draft")
    engine = tmp_path / "engine"
    build(source, engine)
    reference = reference_of(name, engine, tmp_path / "reference")
    graphs = Graphs(engine)
    for length in (1, 6, 7, 8, 9, 40):
        compare_context(graphs, reference, 0)
        compare_draft(graphs, reference, length)


@pytest.mark.full
@pytest.mark.parametrize("length", [1, 6, 7, 8, 9, 40])
def test_muse_glimmer_is_what_transformers_runs(length: int, tmp_path: Path) -> None:
    """An independent implementation, windows crossed: transformers' own model on the same file."""
    from transformers import MuseGlimmerAssistantModel

    source = write_muse_glimmer(tmp_path / "draft")
    build(source, tmp_path / "engine")
    graphs = Graphs(tmp_path / "engine")
    model = MuseGlimmerAssistantModel.from_pretrained(source, dtype=torch.float32, attn_implementation="eager").eval()
    taps = features(graphs, length)
    noise = np.random.default_rng(length).standard_normal((graphs.spec.block_size, H)).astype(np.float32)
    k, v = graphs.context(taps, np.arange(length))
    caches = cache_of(graphs, [k], length + 5), cache_of(graphs, [v], length + 5)
    ours = graphs.draft(noise[None], caches, [0], [length])[0]
    from transformers.cache_utils import DFlashCache

    cache = DFlashCache(config=model.config)
    cache.set_previous_accepted_tokens(length)
    with torch.no_grad():
        theirs = model(
            noise_embeds=torch.from_numpy(noise)[None],
            context_hidden_states=torch.from_numpy(taps)[None],
            past_key_values=cache,
        ).last_hidden_state[0]
    assert np.abs(ours - theirs.numpy()).max() < 2e-4 * np.abs(ours).max()
