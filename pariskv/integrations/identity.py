"""What tells a model and its tokenizer from others: what a saved prefix belongs to."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from pariskv.integrations.calibration import fingerprint

SNAPSHOT = re.compile(r"models--(?P<owner>[^/]+)--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})")
"""Where the hub's cache keeps a revision."""


def identity_of(model: PreTrainedModel) -> dict[str, Any]:
    """id and revision, class, dtype, the weights' fingerprint, and what else keys and values follow from.

    The revision is empty where nobody says it. The id of a folder is its last part: the same model may lie elsewhere on
    another machine.
    """
    config = model.config.get_text_config(decoder=True)
    followed = {name: getattr(config, name, None) for name in ("rope_parameters", "sliding_window", "layer_types")}
    path = str(getattr(model.config, "name_or_path", "") or "")
    found = SNAPSHOT.search(Path(path).as_posix())
    name = f"{found['owner']}/{found['name']}" if found else path
    is_folder = Path(path).is_absolute() and not found
    return {
        "id": Path(path).name if is_folder else name,
        "revision": found["revision"] if found else str(getattr(model.config, "_commit_hash", None) or ""),
        "class": type(model).__name__,
        "dtype": str(model.dtype).removeprefix("torch."),
        "fingerprint": fingerprint(model),
        # As JSON gives it back: a tuple is a list there.
        **json.loads(json.dumps(followed, default=str)),
    }


def tokenizer_hash(tokenizer: Any) -> str:
    """SHA-256 of all that turns a text into token ids; empty where there is no vocabulary to look at."""
    if (backend := getattr(tokenizer, "backend_tokenizer", None)) is not None:
        settings = json.loads(backend.to_str())
        # Both are left behind by whoever called it last, and change no id of a text alone.
        settings = {key: value for key, value in settings.items() if key not in ("padding", "truncation")}
    elif hasattr(tokenizer, "get_vocab"):
        settings = {"vocab": tokenizer.get_vocab(), "special": sorted(map(str, tokenizer.all_special_tokens))}
    else:
        return ""
    text = json.dumps([settings, getattr(tokenizer, "chat_template", None)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()
