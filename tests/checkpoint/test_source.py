# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's name is a path or a repository id; weights are fetched only when they are needed."""

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import huggingface_hub
import pytest
from huggingface_hub import constants
from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError
from safetensors.torch import load_file, save_file

from dflash_trt.checkpoint.draft_checkpoint import read_draft
from dflash_trt.checkpoint.hub import read_headers
from dflash_trt.checkpoint.source import checkpoint_directory, checkpoint_label
from dflash_trt.checkpoint.weights import read_weights
from tests.checkpoint.fake_hub import FakeHub, fake_hub
from tests.checkpoint.samples import cache_repository, refusal
from tests.cli.commands import run_process
from tests.paths import FIXTURES

TARGET, DRAFT = "openai/tiny", str(FIXTURES / "tiny-qwen3-dflash")
SHARDS = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
Command = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """tiny-qwen3 in two shards of which the second is large, with what is not wanted beside it."""
    directory = tmp_path / "repository"
    shutil.copytree(FIXTURES / "tiny-qwen3", directory)
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    first = {name: tensor for name, tensor in tensors.items() if "layers.0" in name}
    rest = {name: tensor for name, tensor in tensors.items() if name not in first}
    for shard, part in zip(SHARDS, (first, rest), strict=True):
        save_file(part, directory / shard, metadata={"format": "pt"})
    weight_map = {name: SHARDS[name not in first] for name in tensors}
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (directory / "original").mkdir()
    for name in ("original/model.safetensors", "original/config.json", "pytorch_model.bin", "consolidated.safetensors"):
        (directory / name).write_bytes(b"{}" * 1000)
    with fake_hub(TARGET, directory) as served:
        yield served


@pytest.fixture
def command(hub: FakeHub, tmp_path: Path) -> Command:
    """`dflash-trt` with a cache of its own and this hub."""
    environment = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    environment |= {"HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}

    def run_there(*arguments: object, **more: str) -> subprocess.CompletedProcess[str]:
        return run_process(*arguments, **(environment | more))

    return run_there


def size(hub: FakeHub) -> int:
    return sum((hub.directory / shard).stat().st_size for shard in SHARDS)


@pytest.mark.full
def test_a_deployment_is_written_from_a_repositorys_headers(hub: FakeHub, command: Command) -> None:
    """The repository's name stands in the text, and nothing else differs from that of a directory."""
    described = ("--gpus", "h100x1", "--runtime", "vllm")
    by_id = command("serve-config", DRAFT, "--target", TARGET, *described)
    assert by_id.returncode == 0, by_id.stderr
    by_directory = command("serve-config", DRAFT, "--target", hub.directory, *described)
    texts = [said.stdout.partition("\n")[2] for said in (by_id, by_directory)]  # below the settings' hash
    assert texts[0] == texts[1].replace(str(hub.directory), TARGET)
    assert "give --target" not in by_id.stderr
    assert all(hub.sent.get(shard, 0) < (hub.directory / shard).stat().st_size for shard in SHARDS)


@pytest.mark.full
def test_headers_do_for_all_but_loading(hub: FakeHub, command: Command, tmp_path: Path) -> None:
    described = command("inspect", TARGET, "--json")
    assert described.returncode == 0, described.stderr
    assert json.loads(described.stdout)["tensors"]["bytes"] == sum(
        tensor.num_bytes for tensor in read_weights(hub.directory).values()
    )
    built = command("build", DRAFT, "--target", TARGET, "-o", tmp_path / "engine")
    assert built.returncode == 0, built.stderr
    repository = command("triton-repo", tmp_path / "engine", "--runtime", "embedded",
                         "-o", tmp_path / "models")  # fmt: skip
    assert repository.returncode == 0, repository.stderr
    refused = command("generate", tmp_path / "engine", "")  # the manifest names the repository and its commit
    assert refused.returncode == 1
    assert "expected at least one token" in refused.stderr
    assert not list((tmp_path / "home").rglob("*.safetensors"))
    assert not {name for name in hub.sent if "/" in name or name.endswith(".bin") or name.startswith("consolidated")}


@pytest.mark.full
def test_weights_come_when_they_are_due(hub: FakeHub, command: Command, tmp_path: Path) -> None:
    assert command("build", DRAFT, "--target", TARGET, "-o", tmp_path / "engine").returncode == 0
    arguments = ("generate", tmp_path / "engine", "ab", "--target", TARGET, "--max-tokens", "4", "--json")
    answered = command(*arguments)
    assert answered.returncode == 0, answered.stderr
    assert f"{TARGET}: fetching 2 files of weights, {size(hub) / 1e9:.1f} GB" in answered.stderr
    assert {path.name for path in (tmp_path / "home").rglob("*.safetensors")} == set(SHARDS)
    sent = dict(hub.sent)
    offline = command(*arguments, HF_HUB_OFFLINE="1")  # all of it is in the cache now
    assert (
        json.loads(offline.stdout)["requests"][0]["token_ids"]
        == json.loads(answered.stdout)["requests"][0]["token_ids"]
    )
    assert hub.sent == sent


def test_without_a_network_and_without_weights(hub: FakeHub, command: Command, tmp_path: Path) -> None:
    assert command("inspect", TARGET).returncode == 0
    refused = command("inspect", TARGET, HF_HUB_OFFLINE="1")
    assert refused.returncode == 1
    assert f"{TARGET}: no weights in the Hugging Face cache, and HF_HUB_OFFLINE is set\n" in refused.stderr
    assert f"hint: on a machine with network: hf download {TARGET}" in refused.stderr


@pytest.mark.parametrize(
    "header",
    [
        b"{" * 9999,
        pytest.param(b"[]", marks=pytest.mark.full),
        pytest.param(b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', marks=pytest.mark.full),
    ],
)
def test_headers_that_are_none(header: bytes, hub: FakeHub, command: Command) -> None:
    (hub.directory / SHARDS[1]).write_bytes(len(header).to_bytes(8, "little") + header)
    refused = command("inspect", TARGET)
    assert refused.returncode == 1, refused.stderr
    assert "Traceback" not in refused.stderr


def test_other_directories_are_no_snapshots(tmp_path: Path) -> None:
    assert read_headers(tmp_path) is None
    assert read_headers(Path("/")) is None
    (tmp_path / "snapshots" / "x").mkdir(parents=True)
    assert read_headers(tmp_path / "snapshots" / "x") is None


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def test_directory(draft_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert checkpoint_directory(str(draft_dir)) == draft_dir
    monkeypatch.chdir(draft_dir.parent)
    assert checkpoint_directory("draft") == Path("draft")
    monkeypatch.setenv("HOME", str(draft_dir.parent))
    assert checkpoint_directory("~/draft") == draft_dir
    Path("owner/name").mkdir(parents=True)
    assert checkpoint_directory("owner/name") == Path("owner/name"), "it beats a repository of that name"
    message = refusal(lambda: checkpoint_directory(str(draft_dir / "config.json")))
    assert message.endswith("config.json: expected a checkpoint directory or a GGUF file, found another file")
    assert "found: File name too long" in refusal(lambda: checkpoint_directory("a" * 5000))


def test_cached_repository(cache: Path, draft_dir: Path) -> None:
    snapshot = cache_repository(cache, "owner/name", draft_dir)
    assert checkpoint_directory("owner/name") == snapshot
    assert read_draft(snapshot).spec == read_draft(draft_dir).spec


def test_repository_that_is_not_cached(cache: Path) -> None:
    message = refusal(lambda: checkpoint_directory("owner/name"))
    assert "owner/name: no files in the Hugging Face cache, and HF_HUB_OFFLINE is set\n" in message
    assert "hint: on a machine with network: hf download owner/name" in message
    for name in ("owner/..", "owner/a--b", "owner/-a", "owner/" + "a" * 100):
        assert f"{name}: neither a local directory nor a Hugging Face" in refusal(
            lambda name=name: checkpoint_directory(name)  # type: ignore[misc]
        )


def test_a_partly_cached_repository_lacks_its_weights(cache: Path, draft_dir: Path) -> None:
    (draft_dir / "model.safetensors").unlink()
    cache_repository(cache, "owner/name", draft_dir)
    message = refusal(lambda: read_draft(checkpoint_directory("owner/name")))
    assert (
        "owner/name: no weights (model.safetensors) in the Hugging Face cache, and HF_HUB_OFFLINE is set\n" in message
    )


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (GatedRepoError, ["the repository is gated", "https://huggingface.co/owner/name", "hf auth login"]),
        (RepositoryNotFoundError, ["neither a local directory", "hint: check the spelling", "hf auth login"]),
        (ConnectionError, ["the hub cannot be reached: ConnectionError", "hf download owner/name"]),
    ],
)
def test_hub_errors(error: type[Exception], words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot_download(*_: object, **__: object) -> str:
        raise error.__new__(error)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    message = refusal(lambda: checkpoint_directory("owner/name"))
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    "name", ["", "nothing", "./nothing", "/nothing/here", "~/nothing", "~nobody-at-all/x", "a/b/c", "a b/c", "\udcff"]
)
def test_neither_directory_nor_repository(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    message = refusal(lambda: checkpoint_directory(name))
    assert message.startswith(repr(name))
    assert "neither a checkpoint directory nor a Hugging Face repository id (owner/name)" in message
    assert "hint: is its path right? Ids of drafts and targets: dflash-trt drafts" in message


@pytest.mark.parametrize("name", ["DIR", "DIR/", "DIR/../draft", "~/draft", "draft", "draft/."])
def test_label_is_never_a_path(name: str, draft_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(draft_dir.parent))
    monkeypatch.chdir(draft_dir.parent)
    assert checkpoint_label(name.replace("DIR", str(draft_dir))) == "draft"
    monkeypatch.chdir(draft_dir)
    assert checkpoint_label(".") == "draft"
    assert checkpoint_label("owner/name") == "owner/name"
    (draft_dir / "x\udcff").mkdir()
    assert checkpoint_label(str(draft_dir / "x\udcff")) == "x?", "it is Unicode"
