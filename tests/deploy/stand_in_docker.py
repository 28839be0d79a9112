# SPDX-License-Identifier: Apache-2.0
"""Checks `docker build`, `run` and `stop`, and runs containers of what it knows here; a test's stand-in for Docker."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

VALUED = ("--name", "--gpus", "--ipc", "--ulimit", "--publish", "--volume", "--workdir", "--env", "--entrypoint")
PUBLISHED = re.compile(r"nvcr\.io/nvidia/tensorrt-llm/release:|vllm/vllm-openai:v|lmsysorg/sglang:v")
GPU = re.compile(r"no NVIDIA driver found|expected GPU 0, found 0")


def note(**facts: object) -> None:
    with Path(os.environ["NOTES"]).open("a") as notes:
        notes.write(json.dumps(facts) + "\n")


def build(options: list[str]) -> None:
    named = dict(zip(options[:-1:2], options[1:-1:2], strict=True))
    dockerfile, context = Path(named["--file"]), Path(options[-1])
    assert (context / "pyproject.toml").is_file(), f"no source in {context}"
    (release,) = re.findall(r'"tensorrt-cu13==([\d.]+)"', dockerfile.read_text())
    note(built=named["--tag"], tensorrt=release)


def run(words: list[str]) -> None:
    given: dict[str, list[str]] = {}
    while words[0].startswith("--"):
        option = words.pop(0)
        if option not in ("--rm", "--detach"):
            assert option in VALUED, option
            given.setdefault(option, []).append(words.pop(0))
    image, *arguments = words
    built = [json.loads(line).get("built") for line in Path(os.environ["NOTES"]).read_text().splitlines()]
    assert image in built or PUBLISHED.match(image), f"{image} was never built"
    assert given["--gpus"] == ["all"]
    assert all(port.startswith("127.0.0.1:") for port in given.get("--publish", []))
    mounts = {}
    for volume in given["--volume"]:
        source, target = volume.removesuffix(":ro").split(":")
        assert Path(source).exists(), f"{source} is not here"
        mounts[target] = Path(source)
    (workdir,) = given["--workdir"]
    for word in (workdir, *arguments, *configured(arguments, workdir)):
        inside = Path(os.path.normpath(Path(workdir, word)))
        if inside.exists() and ("/" in word or word.startswith(".")):
            assert any(inside.is_relative_to(target) for target in mounts), f"the container does not see {inside}"
    variables = dict(each.split("=") for each in given.get("--env", []) if "=" in each)
    assert "--publish" not in given or variables["HF_HOME"] in mounts, "the server does not see the hub's files"
    (entry,) = given["--entrypoint"]
    command = [sys.executable if entry == "python" else entry, *arguments]
    if PUBLISHED.match(image):
        note(image=image, command=command)
        return
    result = subprocess.run(command, cwd=mounts[workdir], capture_output=True, text=True, check=False)
    if entry == "dflash-trt" and result.returncode == 1 and GPU.search(result.stderr):
        note(image=image, command=command, stopped_at="the GPU")
        return
    assert result.returncode == 0, result.stderr
    note(image=image, command=command, printed=result.stdout)


def configured(arguments: list[str], workdir: str) -> list[str]:
    """The drafter that a trtllm-serve reads from its YAML."""
    if "--config" not in arguments:
        return []
    file = Path(workdir, arguments[arguments.index("--config") + 1])
    drafter = re.search("speculative_model: (.+)", file.read_text())
    assert drafter is not None
    assert Path(workdir, drafter[1]).is_dir(), f"{drafter[1]} is not here"
    return [drafter[1]]


if __name__ == "__main__":
    if sys.argv[1] == "stop":
        note(stopped=sys.argv[2])
    else:
        {"build": build, "run": run}[sys.argv[1]](sys.argv[2:])
