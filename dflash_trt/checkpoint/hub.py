# SPDX-License-Identifier: Apache-2.0
"""Repositories of the Hugging Face hub: small files, headers of weights by range requests, and weights."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dflash_trt.checkpoint.safetensors_file import StoredTensor, read_entry
from dflash_trt.checkpoint.weights import INDEX, SINGLE, shard_names
from dflash_trt.errors import CheckpointError, UnreachableError, cut, first_line

CONFIGURATION = ["*.json", "*.jinja", "*.txt", "*.model"]
"""Facts, tokenizer and chat template; never weights, never pickles."""
DAMAGED = (ValueError, TypeError, KeyError, AttributeError, RecursionError)
"""Errors of the hub's client on files of its cache that are not what it wrote."""
IN_FOLDERS = ["*/*"]  # original/ and others duplicate the weights


def fetch_configuration(repository: str, revision: str | None = None) -> Path:
    """The snapshot with a repository's small files, from the cache or the hub; CheckpointError where neither has it.

    `revision` is a commit; None takes the main branch.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    with _as_checkpoint_error(repository, "files"):
        try:
            return Path(
                snapshot_download(
                    repository, revision=revision, allow_patterns=CONFIGURATION, ignore_patterns=IN_FOLDERS
                )
            )
        except (LocalEntryNotFoundError, *DAMAGED):
            if (snapshot := _cached_snapshot(repository, revision)) is None:
                raise
            return snapshot


def _cached_snapshot(repository: str, revision: str | None) -> Path | None:
    """The snapshot of the cache that has config.json, complete or not; None without one."""
    # The hub's client wants all files: findings/huggingface_hub_offline_snapshot_wants_the_same_patterns.sh
    from huggingface_hub import try_to_load_from_cache

    file = try_to_load_from_cache(repository, "config.json", revision=revision)
    return Path(file).parent if isinstance(file, str) else None


def refuse_hub_cache(directory: Path) -> None:
    """Raises CheckpointError for a folder of the hub's cache that holds snapshots, or repositories."""
    snapshots = sorted(path.parent for path in directory.glob("snapshots/*/config.json"))
    repositories = sorted(path.name for path in directory.glob("models--*"))
    if snapshots:
        raise CheckpointError(
            f"{directory}: expected a checkpoint directory, found a repository of the Hugging Face cache",
            hint=f"give its snapshot {snapshots[-1]}, or the repository's id",
        )
    if repositories:
        owner, _, name = repositories[0].removeprefix("models--").partition("--")
        raise CheckpointError(
            f"{directory}: expected a checkpoint directory, found the Hugging Face cache itself",
            hint=f"give the id of a repository, as {owner}/{name}",
        )


def fetch_weights(directory: Path) -> None:
    """Downloads the weights that a snapshot lacks, with their size on stderr; does nothing for other directories."""
    if (place := _lacking(directory)) is None:
        return
    from huggingface_hub import HfApi, snapshot_download

    repository, commit = place
    missing = [name for name in _weight_names(directory) if not (directory / name).is_file()]
    with _as_checkpoint_error(repository, f"weights ({cut(', '.join(missing))})"):
        sizes = [entry.size for entry in HfApi().get_paths_info(repository, missing, revision=commit)]
        print(f"{repository}: fetching {len(sizes)} files of weights, {sum(sizes) / 1e9:.1f} GB", file=sys.stderr)
        snapshot_download(repository, revision=commit, allow_patterns=missing, ignore_patterns=IN_FOLDERS)


def read_headers(directory: Path) -> dict[str, StoredTensor] | None:
    """The tensors of a snapshot whose weights are still on the hub, by name; None for every other directory.

    Only shapes and sizes are meaningful: `file` does not exist yet, `offset` counts from the first byte of data.
    """
    if (place := _lacking(directory)) is None:
        return None
    from huggingface_hub import HfApi
    from huggingface_hub.errors import NotASafetensorsRepoError, SafetensorsParsingError

    repository, commit = place
    try:
        with _as_checkpoint_error(repository, "weights"):
            metadata_of = HfApi().get_safetensors_metadata(repository, revision=commit).files_metadata
        return {
            name: read_entry(directory / file, name, vars(info), data_begin=0)
            for file, metadata in metadata_of.items()
            for name, info in metadata.tensors.items()
        }
    except NotASafetensorsRepoError:
        return None
    except (SafetensorsParsingError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{repository}: expected safetensors headers, found others ({error})") from None


def _lacking(directory: Path) -> tuple[str, str] | None:
    """Repository and commit of a snapshot that lacks weights; None for every other directory."""
    path = directory.absolute()
    kind, _, repository = path.parents[1].name.partition("--") if len(path.parents) > 1 else ("", "", "")
    if path.parent.name != "snapshots" or kind != "models" or not repository:
        return None
    if all((path / name).is_file() for name in _weight_names(path)):
        return None
    return repository.replace("--", "/"), path.name


def _weight_names(directory: Path) -> list[str]:
    if (directory / SINGLE).is_file() or not (directory / INDEX).is_file():
        return [SINGLE]
    return shard_names(directory / INDEX)


@contextmanager
def _as_checkpoint_error(repository: str, what: str) -> Iterator[None]:
    """Raises errors of the hub's client as CheckpointError or UnreachableError."""
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HFValidationError,
        HTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    try:
        yield
    except HFValidationError as error:
        raise CheckpointError(
            f"{repository}: neither a local directory nor a Hugging Face repository id ({error})"
        ) from None
    except GatedRepoError:
        raise CheckpointError(
            f"{repository}: the repository is gated",
            hint=f"accept its licence at https://huggingface.co/{repository}, then: hf auth login",
        ) from None
    except RepositoryNotFoundError:
        raise CheckpointError(
            f"{repository}: neither a local directory nor a Hugging Face repository",
            hint="check the spelling; for a private repository: hf auth login",
        ) from None
    except (LocalEntryNotFoundError, HTTPError, OSError) as error:
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else "the hub cannot be reached"
        if not constants.HF_HUB_OFFLINE and not isinstance(error, LocalEntryNotFoundError):
            reason += f": {first_line(error) or type(error).__name__}"
        raise UnreachableError(
            f"{repository}: no {what} in the Hugging Face cache, and {reason}",
            hint=f"on a machine with network: hf download {repository}",
        ) from None
    except DAMAGED as error:
        raise CheckpointError(
            f"{repository}: its entry in the Hugging Face cache is damaged ({first_line(error)})",
            hint=f"remove it and fetch it again: hf cache rm model/{repository}",
        ) from None
