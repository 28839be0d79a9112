# SPDX-License-Identifier: Apache-2.0
"""manifest.json: what does not match is refused, by name and with the next command to run."""

import json
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from dflash_trt.engine.manifest import Manifest, read_manifest, read_num_ranks, read_parts
from dflash_trt.errors import EngineError
from tests.checkpoint.samples import refusal, write_target
from tests.engine.test_write import FILES, build
from tests.paths import FIXTURES
from tests.reference.synthetic import write_random_draft

REBUILD = "dflash-trt build DRAFT --target TARGET -o DIR"
HUB_ID = "the id of a Hugging Face repository, and no such directory"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("manifest")
    draft = write_random_draft(path / "draft", dialect="gpt_oss")
    build(draft, write_target(path / "target"), path / "engine")
    return path / "engine"


@pytest.fixture
def engine(built: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(built, tmp_path / "engine"))


def edit(engine: Path, **changes: Any) -> Path:
    file = engine / "manifest.json"
    manifest = json.loads(file.read_text()) | changes
    file.write_text(json.dumps(manifest))
    return engine


def message_of(engine: Path) -> str:
    return refusal(lambda: read_manifest(engine), EngineError)


def test_what_is_written_is_what_is_read(engine: Path) -> None:
    manifest = read_manifest(engine)
    assert manifest.encode() == (engine / "manifest.json").read_bytes()
    assert manifest.source.name == "draft"
    assert sorted([*manifest.sha256, "manifest.json"]) == FILES
    (engine / "README.md").write_text("notes")
    assert read_manifest(engine) == manifest, "foreign files do not matter"


@pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
def test_changed_byte(name: str, engine: Path) -> None:
    content = bytearray((engine / name).read_bytes())
    content[-1] ^= 1
    (engine / name).write_bytes(content)
    message = message_of(engine)
    assert message.startswith(f"{engine / name}: expected sha256 ")
    assert "the file has changed" in message
    assert message.endswith(f"hint: {REBUILD}")


@pytest.mark.parametrize("name", [name for name in FILES if name != "manifest.json"])
@pytest.mark.parametrize("directory_instead", [False, True])
def test_missing_file(name: str, directory_instead: bool, engine: Path) -> None:
    (engine / name).unlink()
    if directory_instead:
        (engine / name).mkdir()
    message = message_of(engine)
    assert f"{engine / name}: missing file of the engine" in message
    assert message.endswith(f"hint: {REBUILD}")


@pytest.mark.parametrize("version", [0, 4, 10**9])
def test_another_schema_version(version: int, engine: Path) -> None:
    """Said before anything else is looked at: the rest may have any shape."""
    (engine / "manifest.json").write_text(json.dumps({"schema_version": version, "of another": "age"}))
    message = message_of(engine)
    assert f"manifest.json: schema_version: expected 6, found {version}" in message
    is_newer = version > 5
    assert ("hint: it was built by a newer dflash-trt" in message) == is_newer
    assert (f"hint: build it again with this version: {REBUILD}" in message) != is_newer


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"surprise": 1}, "surprise"), ({"draft": {}}, "$.draft"), ({"sha256": {"config.json": 1}}, "$.sha256"),
     ({"schema_version": "1"}, "$.schema_version"), ({"graphs": []}, "$.graphs"),
     ({"plugin": {"name": "a", "version": "1", "namespace": "b", "more": 1}}, "more")],
)  # fmt: skip
def test_manifest_of_another_shape(changes: dict[str, Any], words: str, engine: Path) -> None:
    message = message_of(edit(engine, **changes))
    assert "manifest.json: expected an engine manifest, found " in message
    assert words in message
    assert message.endswith(f"hint: {REBUILD}")


def test_both_graphs_are_there(engine: Path) -> None:
    graphs = json.loads((engine / "manifest.json").read_text())["graphs"]
    assert "manifest.json: graphs: expected context and draft, found none" in message_of(edit(engine, graphs={}))
    message = message_of(edit(engine, graphs={"draft": graphs["draft"]}))
    assert "graphs: expected context and draft, found draft" in message


@pytest.mark.parametrize(
    ("graph", "place", "key", "value"),
    [("context", "outputs", "shape", ["T", 2, 3, 16]), ("draft", "inputs", "dtype", "FLOAT")],
)
def test_graphs_have_the_signature_of_the_draft(graph: str, place: str, key: str, value: object, engine: Path) -> None:
    graphs = json.loads((engine / "manifest.json").read_text())["graphs"]
    graphs[graph][place][0][key] = value
    message = message_of(edit(engine, graphs=graphs))
    assert f"manifest.json: graphs.{graph}: expected " in message
    assert json.dumps(value, separators=(",", ":")) in message.partition("found")[2]
    assert message.endswith(f"hint: {REBUILD}")


@pytest.mark.parametrize("key", [field.name for field in msgspec.structs.fields(Manifest) if field.required])
def test_missing_key(key: str, engine: Path) -> None:
    manifest = json.loads((engine / "manifest.json").read_text())
    del manifest[key]
    (engine / "manifest.json").write_text(json.dumps(manifest))
    assert f"missing required field `{key}`" in message_of(engine)


@pytest.mark.parametrize("content", [b"[]", b"{"])
def test_manifest_is_no_json_object(content: bytes, engine: Path) -> None:
    (engine / "manifest.json").write_bytes(content)
    assert "manifest.json: expected an engine manifest, found " in message_of(engine)


@pytest.mark.parametrize(
    ("given", "found", "build"),
    [
        (FIXTURES / "tiny-qwen3", "a checkpoint", "DRAFT --target TARGET"),
        ("openai/gpt-oss-120b", HUB_ID, "DRAFT --target openai/gpt-oss-120b"),
        ("z-lab/gpt-oss-120b-DFlash", HUB_ID, "z-lab/gpt-oss-120b-DFlash --target TARGET"),
        (FIXTURES / "tiny-qwen3" / "config.json", "a file", "DRAFT --target TARGET"),
        (FIXTURES, "a directory without manifest.json", "DRAFT --target TARGET"),
        (FIXTURES / "nothing", "nothing there", "DRAFT --target TARGET"),
    ],
)
def test_no_engine(given: str | Path, found: str, build: str) -> None:
    message = message_of(Path(given))
    assert message.startswith(f"{given} is not an engine directory: found {found}\n")
    assert f"hint: make one: dflash-trt build {build} -o engine" in message


@pytest.mark.parametrize("name", ["../config.json", "/etc/passwd", "sub/file", "..", ""])
def test_files_elsewhere_are_not_looked_at(name: str, engine: Path) -> None:
    hashes = json.loads((engine / "manifest.json").read_text())["sha256"]
    message = message_of(edit(engine, sha256=hashes | {name: "0" * 64}))
    assert str(engine) in message


@pytest.mark.parametrize("name", ["model.safetensors", "context.onnx", "draft.onnx"])
def test_every_file_that_is_used_has_a_hash(name: str, engine: Path) -> None:
    hashes = json.loads((engine / "manifest.json").read_text())["sha256"]
    del hashes[name]
    message = message_of(edit(engine, sha256=hashes))
    assert f"manifest.json: missing key sha256.{name}\nhint: {REBUILD}" in message


def test_ranks_that_are_not_there(engine: Path) -> None:
    """Nothing is done for each of a number of ranks that no engine was built for."""
    edit(engine, num_ranks=10**9)
    for read in (read_manifest, read_num_ranks):
        assert "`int` <= 1024" in refusal(lambda read=read: read(engine), EngineError)  # type: ignore[misc]
    edit(engine, num_ranks=1000)
    message = refusal(lambda: read_parts(engine, read_manifest(engine)), EngineError)
    assert message.startswith(f"{engine / 'rank0'} is not an engine directory: found ")
    assert "--tp 1000" in message
