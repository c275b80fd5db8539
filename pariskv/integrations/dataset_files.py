"""Single files of the hub's data sets: in its cache on this machine, or downloaded into it."""

from __future__ import annotations

from pathlib import Path

from pariskv.integrations.hub import TIMEOUT


class GatedError(Exception):
    """The hub wants its terms accepted, by somebody it knows."""


def cached_file(hub_id: str, name: str) -> Path | None:
    """The file in the hub's cache on this machine, None where it is not there."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(hub_id, name, repo_type="dataset")
    return Path(found) if isinstance(found, str) else None


def download_file(hub_id: str, name: str) -> Path:
    """The file, downloaded; GatedError where it takes a login, and whatever the hub's client raises."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import GatedRepoError

    try:
        return Path(hf_hub_download(hub_id, name, repo_type="dataset", etag_timeout=TIMEOUT))
    except GatedRepoError as error:
        raise GatedError(f"{hub_id} is gated") from error
