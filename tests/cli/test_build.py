# SPDX-License-Identifier: Apache-2.0
"""`dflash-trt build` from the outside; what it writes is tested in tests/build."""

from __future__ import annotations

from pathlib import Path

from dflash_trt.engine.manifest import read_manifest
from tests.build.test_engine import FILES, contents
from tests.checkpoint.samples import cache_repository, write_target
from tests.cli.commands import run, run_here
from tests.paths import FIXTURES


def test_prints_the_directory(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    result = run("build", draft_dir, "--target", target_dir, "--output", tmp_path / "out")
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{tmp_path / 'out'}\n", "")


def test_existing_output(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    run_here("build", draft_dir, "--target", target_dir, "-o", tmp_path / "out")
    result = run("build", draft_dir, "--target", target_dir, "-o", tmp_path / "out")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr == (
        f"error: {tmp_path / 'out'}: expected a directory that does not exist yet, found one\n\n"
        "hint: choose another -o DIR, or replace it with --force\n"
    )


def test_swapped_target(draft_dir: Path, tmp_path: Path) -> None:
    target = write_target(tmp_path / "other", model_type="qwen3")
    result = run("build", draft_dir, "--target", target, "-o", tmp_path / "out")
    assert (result.returncode, result.stdout) == (1, "")
    assert "model_type: expected qwen3 (target), found gpt_oss (draft)\n\nhint: give --target" in result.stderr
    assert not (tmp_path / "out").exists()


def test_repository_in_the_cache_of_an_offline_machine(draft_dir: Path, target_dir: Path, tmp_path: Path) -> None:
    """The cache keeps links to blobs; the engine directory keeps files, and the repository's name."""
    hub = tmp_path / "home" / "hub"
    cache_repository(hub, "z-lab/tiny-DFlash", draft_dir)
    cache_repository(hub, "openai/tiny", target_dir)
    arguments = ("build", "z-lab/tiny-DFlash", "--target", "openai/tiny", "-o", tmp_path / "out")
    result = run(*arguments, HF_HOME=str(tmp_path / "home"))
    assert (result.returncode, result.stderr) == (0, "")
    assert sorted(contents(tmp_path / "out")) == FILES
    assert not any(file.is_symlink() for file in (tmp_path / "out").iterdir())
    assert read_manifest(tmp_path / "out").source.name == "z-lab/tiny-DFlash"
    run_here("build", draft_dir, "--target", target_dir, "-o", tmp_path / "local")
    from_cache, from_disk = contents(tmp_path / "out"), contents(tmp_path / "local")
    assert all(from_cache[name] == from_disk[name] for name in FILES if name != "manifest.json")


def test_repository_that_is_nowhere(target_dir: Path, tmp_path: Path) -> None:
    arguments = ("build", "z-lab/tiny-DFlash", "--target", target_dir, "-o", tmp_path / "out")
    result = run(*arguments, HF_HOME=str(tmp_path / "home"))
    assert (result.returncode, result.stdout) == (1, "")
    assert "error: z-lab/tiny-DFlash: expected it in the Hugging Face cache" in result.stderr
    assert "hint: on a machine with network: hf download z-lab/tiny-DFlash" in result.stderr


def test_fixtures_build_to_the_same_bytes_twice(tmp_path: Path) -> None:
    for name in ("tiny-gpt-oss", "tiny-qwen3"):
        pair = (FIXTURES / f"{name}-dflash", "--target", FIXTURES / name)
        for output in ("a", "b"):
            run_here("build", *pair, "-o", tmp_path / output / name)
        assert contents(tmp_path / "a" / name) == contents(tmp_path / "b" / name)
