# SPDX-License-Identifier: Apache-2.0
"""Recovery: it rounds as what is packed, keeps the rest, repeats itself, and a kill costs nothing but time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import click
import numpy as np
import pytest
import torch

from dflash_trt import _C, LLM, SamplingParams
from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.draft_tensors import added_shapes
from dflash_trt.errors import BuildError, CheckpointError, VerificationError
from dflash_trt.quantize.convert import quantize_checkpoint
from dflash_trt.quantize.recipe import load_recipe
from dflash_trt.quantize.scales import scale_of
from dflash_trt.runtime.measure.features import open_features
from dflash_trt.runtime.measure.recovery.fake_quantization import quantised_input, quantised_rows, quantised_weight
from dflash_trt.runtime.measure.recovery.recover import recover_checkpoint
from dflash_trt.runtime.measure.recovery.settings import Settings
from dflash_trt.runtime.measure.recovery.training import _split
from dflash_trt.runtime.measure.recovery.training_state import Progress, save_state, state_file
from tests.cli.commands import run_here
from tests.paths import FIXTURES
from tests.pretend_device import PretendDevice
from tests.quantize.samples import arrays, unpacked_fp8, unpacked_int4, unpacked_nvfp4
from tests.runtime.measure.feature_samples import Facts, Tensors, edit, full_disk
from tests.runtime.measure.recovery.test_objective import ranges_of
from tools.train_fixtures import recovery_prompts

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def samples(dtype: torch.dtype) -> torch.Tensor:
    """[64, 96]: every magnitude from nothing to large, ties of both formats, zero blocks and negative zeros."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(64, 96, generator=generator) * torch.logspace(-6, 0, 64)[:, None]
    x[0] = 0
    x[1, ::2] = -0.0
    x[2] = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 12) / 6  # halfway between E2M1's code points
    x[3] = torch.linspace(-1, 1, 96)
    x[4, :16] = 2.0**-14
    return x.to(dtype)


def bits(x: torch.Tensor) -> np.ndarray:
    return (x.view(torch.int16).numpy().view(np.uint16) if x.dtype == torch.bfloat16 else x.numpy()).copy()


def packed_nvfp4(x: torch.Tensor, scale: np.float32) -> torch.Tensor:
    rows, columns = x.shape
    data, scales = np.empty((rows, columns // 2), np.uint8), np.empty((rows, columns // 16), np.uint8)
    _C.pack_nvfp4(bits(x), float(scale), data, scales, threads=1)
    return torch.from_numpy(unpacked_nvfp4(data, scales, float(scale)))


def packed_fp8(x: torch.Tensor, scale: np.float32) -> torch.Tensor:
    codes = np.empty(x.shape, np.uint8)
    _C.pack_fp8(x.float().numpy(), float(scale), codes, threads=1)
    return torch.from_numpy(unpacked_fp8(codes, float(scale)))


def packed_int4(x: torch.Tensor, _scale: np.float32) -> torch.Tensor:
    rows, columns = x.shape
    data, scales = np.empty((rows // 2, columns), np.uint8), np.empty((rows, columns // 32), np.float32)
    _C.pack_int4(bits(x), data, scales, threads=1)
    return torch.from_numpy(unpacked_int4(data, scales))


PACKERS: dict[str, Callable[[torch.Tensor, np.float32], torch.Tensor]] = {
    "FP8": packed_fp8, "NVFP4": packed_nvfp4, "W4A16_NVFP4": packed_nvfp4, "W4A16_AWQ": packed_int4,
}  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("algorithm", PACKERS)
@pytest.mark.parametrize("amax", [1.0, 0.3, 77.0])  # the group's range: larger than the tensor's own, or smaller
def test_weights_are_what_the_packers_make_of_them(algorithm: str, dtype: torch.dtype, amax: float) -> None:
    weight, scale = samples(dtype), scale_of(algorithm, amax)
    found = quantised_weight(weight, algorithm, None if algorithm == "W4A16_AWQ" else float(scale))
    assert torch.equal(found, PACKERS[algorithm](weight, scale))
    assert len(found.unique()) > 50


@pytest.mark.parametrize("amax", [1.0, 3.0])
def test_activations_are_rounded_as_weights_are(amax: float) -> None:
    """In FLOAT both formulas agree but for blocks whose scale underflows."""
    x, scale = samples(torch.float32), scale_of("NVFP4", amax)
    ratios = x.abs().view(64, -1, 16).amax(-1).div(6 * float(scale)).repeat_interleave(16, dim=1)
    found, expected = quantised_input(x, "NVFP4", float(scale)), packed_nvfp4(x, scale)
    clear = ratios >= 2.0**-9
    assert 0.2 < clear.float().mean() < 1
    assert torch.equal(found[clear], expected[clear])
    assert not found[ratios < 2.0**-11].any()
    fp8_scale = torch.tensor(scale_of("FP8", amax))
    fp8 = (x / fp8_scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * fp8_scale
    assert torch.equal(quantised_input(x, "FP8", float(scale_of("FP8", amax))), fp8)
    assert torch.equal(quantised_rows(x, float(scale_of("FP8", amax))), fp8)


@pytest.mark.parametrize("algorithm", ["FP8", "NVFP4"])
def test_gradients_pass_straight_through(algorithm: str) -> None:
    x = samples(torch.float32).requires_grad_()
    gradient = torch.randn(x.shape)
    (quantised_input(x, algorithm, 0.001) * gradient).sum().backward()
    assert torch.equal(x.grad, gradient)
    (quantised_rows(x, 0.001) * gradient).sum().backward()
    assert torch.equal(x.grad, 2 * gradient)


DRAFT, LILICORR = FIXTURES / "tiny-gpt-oss-dflash", FIXTURES / "tiny-qwen3-lilicorr"
STEPS = 4


def recover(
    features: Path, output: Path, *, draft: Path = DRAFT, steps: int = STEPS, rate: float = 1e-3, **options: object
) -> Progress:
    settings = Settings(steps=steps, learning_rate=rate, sequences_per_step=2, anchors=4)
    given = read_draft(draft)
    ranges = ranges_of(given)
    return recover_checkpoint(given, load_recipe("nvfp4"), features, settings, output, ranges=ranges, **options)[1]  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True)
class Recovered:
    """A draft, the features that it learned from, and the result."""

    draft: Path
    features: Path
    output: Path


def digests(directory: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in directory.iterdir()}


def interrupt_at(step: int) -> object:
    def on_step(progress: Progress) -> None:
        if progress.step == step:
            raise KeyboardInterrupt

    return on_step


@pytest.fixture(scope="module", params=[DRAFT, LILICORR], ids=lambda draft: draft.name)
def recovered(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, features: dict[str, Path]
) -> Recovered:
    draft, output = request.param, tmp_path_factory.mktemp("recovered") / "q"
    file = features[draft.name.removesuffix("-dflash")]
    before, counts = torch.get_num_threads(), set[int]()
    progress = recover(file, output, draft=draft, on_step=lambda _: counts.add(torch.get_num_threads()))
    assert (counts, torch.get_num_threads()) == ({1}, before)  # so small a draft gains nothing by more
    assert (progress.step, len(progress.losses)) == (STEPS, STEPS)
    assert [step for step, _ in progress.held_out] == [0, 1, 2, 3, 4]
    assert not state_file(output).exists()
    return Recovered(draft=draft, features=file, output=output)


def test_an_ordinary_checkpoint_that_keeps_what_is_not_trained(recovered: Recovered, tmp_path: Path) -> None:
    given = read_draft(recovered.draft)
    quantize_checkpoint(given, load_recipe("nvfp4"), tmp_path / "plain", ranges=ranges_of(given))
    found, plain = arrays(recovered.output), arrays(tmp_path / "plain")
    assert found.keys() == plain.keys()
    added = added_shapes(given.spec)
    for name, values in plain.items():
        assert (found[name].dtype, found[name].shape) == (values.dtype, values.shape)
        if name in added:  # so few steps leave norms as they are, in BF16
            assert values.ndim == 1 or found[name].tobytes() != values.tobytes(), name
        elif values.ndim == 1 or name.endswith(".input_scale"):  # biases, norms, scales of activations
            assert found[name].tobytes() == values.tobytes(), name
        elif name.endswith("proj.weight"):
            assert 0 < np.mean(found[name] != values) < 0.9, name
    for name in ("config.json", "hf_quant_config.json"):
        expected = json.loads((tmp_path / "plain" / name).read_text())
        assert json.loads((recovered.output / name).read_text()) == expected
    assert read_draft(recovered.output).quantization == read_draft(tmp_path / "plain").quantization


def test_it_builds_generates_and_verifies(
    recovered: Recovered, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, engine = FIXTURES / recovered.features.stem.removesuffix("-lilicorr"), tmp_path / "engine"
    run_here("build", recovered.output, "--target", target, "-o", engine)
    with LLM(engine, target) as drafting, LLM(engine, target, draft_length=0) as plain:
        answers = [llm.generate(["def isleap(year):\n"], SamplingParams(max_tokens=24))[0] for llm in (drafting, plain)]
    assert answers[0].token_ids == answers[1].token_ids
    capsys.readouterr()
    run_here("verify", engine, "--features", recovered.features, "--json")
    assert json.loads(capsys.readouterr().out)["engine"]["tau"] > 1.5


def test_a_second_run_writes_the_same_bytes(recovered: Recovered, tmp_path: Path) -> None:
    recover(recovered.features, tmp_path / "again", draft=recovered.draft)
    assert digests(tmp_path / "again") == digests(recovered.output)


@pytest.mark.parametrize(
    ("step", "device"), [pytest.param(1, "cpu", marks=pytest.mark.full), (3, "cuda")]
)  # before a state is saved, and between two
def test_an_interrupted_run_goes_on_to_the_same_bytes(
    step: int, device: str, recovered: Recovered, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The GPU is pretended, with a CPU's arithmetic: no call mixes devices, and a state goes back to its own."""
    monkeypatch.setattr("dflash_trt.runtime.measure.recovery.recover.choose_device", str)
    output, seen, draft = tmp_path / "q", list[int](), recovered.draft
    with PretendDevice() as gpu:
        with pytest.raises(KeyboardInterrupt):
            recover(recovered.features, output, draft=draft, device=device, save_every=2, on_step=interrupt_at(step))
        assert not output.exists()
        assert state_file(output).exists() == (step > 2)
        recover(recovered.features, output, draft=draft, device=device, on_step=lambda p: seen.append(p.step))
    assert seen[0] == (2 if step > 2 else 0)
    assert (gpu.calls > 10_000) == (device == "cuda")
    assert digests(output) == digests(recovered.output)
    assert not state_file(output).exists()


@pytest.mark.full
@pytest.mark.parametrize("name", ["tiny-gpt-oss-dflash", "tiny-qwen3-lilicorr"])
def test_training_wins_back_what_quantising_cost(name: str, tmp_path: Path) -> None:
    """Measured on answers that were not trained on. The fixture's own 32 prompts have too few answers to learn from."""
    recovery_prompts.write(tmp_path)
    asked = ("--prompts", tmp_path / "train.jsonl", "--max-prompts", 96, "--max-tokens", 96)
    target, features = FIXTURES / name.rpartition("-")[0], tmp_path / "features.safetensors"
    run_here("capture", FIXTURES / name, "--target", target, *asked, "-o", features)
    draft, settings = read_draft(FIXTURES / name), Settings(steps=60, learning_rate=5e-4)
    _, progress = recover_checkpoint(
        draft, load_recipe("nvfp4"), features, settings, tmp_path / "q", ranges=ranges_of(draft)
    )
    before, after = progress.held_out[0][1], progress.held_out[-1][1]
    assert before > progress.dense_held_out
    assert after < before - 0.4 * (before - progress.dense_held_out)


def test_the_state_of_something_else_is_refused(tmp_path: Path, features: dict[str, Path]) -> None:
    output = tmp_path / "q"
    with pytest.raises(KeyboardInterrupt):
        recover(features["tiny-gpt-oss"], output, save_every=1, on_step=interrupt_at(1))
    with pytest.raises(CheckpointError, match="is the state of another recovery"):
        recover(features["tiny-gpt-oss"], output, rate=2e-3)
    content = bytearray(state_file(output).read_bytes())
    state_file(output).write_bytes(content[: len(content) // 2])
    with pytest.raises(CheckpointError, match=r"q\.recovery\.safetensors"):
        recover(features["tiny-gpt-oss"], output)
    assert not output.exists()


@pytest.mark.parametrize(("repeated", "known"), [((0,), [1]), ((0, 1), [])])
def test_prompts_of_held_out_sequences_are_not_trained_on(
    tmp_path: Path, features: dict[str, Path], repeated: tuple[int, ...], known: list[int]
) -> None:
    def repeat(tensors: Tensors, _: Facts) -> None:
        for name in [name for name in tensors if name.endswith(".2")]:
            tensors |= {f"{name.removesuffix('2')}{i}": tensors[name].clone() for i in repeated}

    with open_features(edit(features["tiny-gpt-oss"], tmp_path / "f", repeat), read_draft(DRAFT).spec) as file:
        if known:
            assert _split(file) == (known, [2])
        else:
            with pytest.raises(CheckpointError, match="to other prompts than the last ones") as error:
                _split(file)
            assert "dflash-trt capture" in str(error.value.hint)


def test_a_full_disk(tmp_path: Path) -> None:
    tensors = {"master/fc": torch.zeros(40, 40)}
    with full_disk(), pytest.raises(BuildError, match=r"cannot write .*: File too large") as refused:
        save_state(tmp_path / "state", Progress(identity="a"), tensors)
    assert refused.value.hint == "free disk space or choose another -o DIR"
    assert list(tmp_path.iterdir()) == []


def test_a_loss_that_is_no_number_is_refused(tmp_path: Path, features: dict[str, Path]) -> None:
    with pytest.raises(CheckpointError, match="expected a finite loss, found nan"):
        recover(features["tiny-gpt-oss"], tmp_path / "q", rate=1e30)
    assert not (tmp_path / "q").exists()


def test_command(tmp_path: Path, features: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """One step at the full learning rate makes it worse, which is no success; what was written stays."""
    with pytest.raises(VerificationError, match=r"the loss on held-out sequences went from 0\.583") as error:
        run_here(
            "recover", DRAFT, "-o", tmp_path / "q", "--recipe", "nvfp4", "--features", features["tiny-gpt-oss"],
            "--steps", 1, "--distillation", 0.5, "--plot", tmp_path / "loss.png",
        )  # fmt: skip
    assert "dflash-trt quantize" in str(error.value.hint)
    printed = capsys.readouterr()
    assert printed.out == f"{tmp_path / 'q'}\n"
    assert "training: 0/1\n" in printed.err, "no terminal: a line at once"
    assert "1 steps: loss on held-out sequences" in printed.err
    assert "15 linear layers: 14 NVFP4, 1 dense" in printed.err
    assert "next: " not in printed.err
    assert (tmp_path / "q" / "config.json").is_file()
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_is_no_png_is_refused(tmp_path: Path) -> None:
    options = ("--recipe", "nvfp4", "--features", "f.safetensors", "--plot", "loss.pdf")
    with pytest.raises(click.UsageError, match=r"--plot: expected a \.png file"):
        run_here("recover", DRAFT, "-o", tmp_path / "q", *options)
