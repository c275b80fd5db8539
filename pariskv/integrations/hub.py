"""Models of the Hugging Face hub: the folder in its cache on this machine, or a download into it.

transformers is only ever given a folder. Left to itself it asks the hub for every file and
retries each for 23 s where there is no network.
"""

from __future__ import annotations

import json
from pathlib import Path

from pariskv.errors import ModelError

TIMEOUT = 5.0
"""Seconds to wait for the hub's first answer."""

NOT_NEEDED = ["*/*", "*.gguf", "*.onnx", "*.h5", "*.msgpack", "*.ot", "*.pt", "*.pth", "consolidated*"]
"""Files of a repository that transformers does not read: other frameworks' weights, subfolders."""


def cached_folder(hub_id: str) -> Path | None:
    """The folder of `hub_id` in the hub's cache on this machine, None where it is not there or not whole."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        config = try_to_load_from_cache(hub_id, "config.json")
    except HFValidationError as error:
        raise ModelError(
            f"model {hub_id!r}: neither a file nor a folder here, nor a possible hub id ({one_line(error)})"
        ) from error
    folder = Path(config).parent if isinstance(config, str) else None
    return folder if folder is not None and is_whole(folder) else None


def is_whole(folder: Path) -> bool:
    """Whether a model folder holds a tokenizer and every file of the weights."""
    if not any(any(folder.glob(pattern)) for pattern in ("tokenizer*", "vocab*", "*.model")):
        return False
    for weights in ("model.safetensors", "pytorch_model.bin"):
        index = folder / f"{weights}.index.json"
        if index.is_file():
            shards = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
            return all((folder / shard).is_file() for shard in set(shards))
        if (folder / weights).is_file():
            return True
    return False


def download(hub_id: str, name: str, advice: str) -> Path:
    """The folder of `hub_id`, which the user calls `name`, downloaded into the hub's cache.

    Raises ModelError, with `advice` on what to do, where the hub cannot be reached or lacks the model.
    """
    try:
        return _download(hub_id)
    except Exception as error:  # the hub's client lets the errors of its HTTP library through, and changes that library
        raise ModelError(_message(hub_id, name, error, advice)) from error


def _download(hub_id: str) -> Path:
    from huggingface_hub import HfApi, snapshot_download

    files = HfApi().model_info(hub_id, timeout=TIMEOUT).siblings or []
    has_safetensors = any(file.rfilename.endswith(".safetensors") for file in files)
    ignored = [*NOT_NEEDED, "*.bin"] if has_safetensors else NOT_NEEDED
    return Path(snapshot_download(hub_id, ignore_patterns=ignored, etag_timeout=TIMEOUT))


def _message(hub_id: str, name: str, error: Exception, advice: str) -> str:
    from huggingface_hub.errors import GatedRepoError, RepositoryNotFoundError

    model = repr(name) if name == hub_id else f"{name!r} ({hub_id})"
    if isinstance(error, GatedRepoError):
        return f"model {model}: gated; accept its licence on its hub page, then run `hf auth login`"
    if isinstance(error, RepositoryNotFoundError):
        return f"model {model}: the hub has no such public model; check the name, or run `hf auth login`"
    return f"model {model}: not on this machine, and the hub cannot serve it ({one_line(error)}); {advice}"


def one_line(error: BaseException, longest: int = 240) -> str:
    """An error's message on one line, cut where it goes on; the error's type where it has none."""
    text = " ".join(str(error).split()).rstrip(" .:") or type(error).__name__
    return text if len(text) <= longest else f"{text[:longest]} ..."
