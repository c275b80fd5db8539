"""One full-attention layer of a `ParisCache`, as transformers' models see it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from pariskv.attention import weaken_by_sinks
from pariskv.cache import RequestState, as_heads
from pariskv.config import Turns
from pariskv.decode import attend_layer
from pariskv.errors import ModelError
from pariskv.integrations.geometry import Geometry
from pariskv.layer import LayerState

ATTENTION = "pariskv"
"""Our name in transformers' attention and mask interfaces."""

TAG = "_pariskv"
"""Attribute of the keys that `update` returns, by which the attention function finds its layer."""


class ParisLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers has no types here
    """One full-attention layer of a `ParisCache`: a `LayerState` in transformers' clothes."""

    is_sliding = False
    is_croppable = True

    def __init__(self, index: int, request: RequestState, geometry: Geometry, turns: Turns = "dense"):
        super().__init__()  # type: ignore[no-untyped-call]
        self.index = index
        self.request = request
        self.geometry = geometry
        self.state: LayerState | None = None
        self.turns = turns
        self.columns = 0
        self.record_past = False  # transformers': what comes may be taken back, as in assisted decoding
        self._verifies = False
        self._pending: tuple[Tensor, Tensor] | None = None
        self._unattended = False
        self._padding_checked = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.state = self.request.layer(self.geometry.layer_info(self.index, key_states))
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take the new keys and values [B, H, Q, D]; the keys that come back carry the tag."""
        self.refuse_unattended()
        if torch.is_grad_enabled() and key_states.requires_grad:
            raise ModelError("a ParisCache does not keep gradients; call the model under torch.no_grad()")
        if self.state is None:
            self.lazy_initialization(key_states, value_states)
        assert self.state is not None
        self._refuse_other_shape(key_states)
        if key_states.shape[2] > 1 and self.state.decoding and (self.turns == "retrieved" or self._verifies):
            keys, values = self._pending = key_states, value_states
        else:
            keys, values = self.state.append(key_states, value_states)
        self.columns += key_states.shape[2]
        keys = keys.detach()  # a new tensor object over the same memory, ours to tag
        setattr(keys, TAG, self)
        self._unattended = True
        return keys, values

    def attend(
        self, query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float, sinks: Tensor | None
    ) -> Tensor:
        """Attention of the queries [B, H * G, Q, D] that belong to the last `update`."""
        assert self.state is not None
        self._unattended = False
        if self._pending is not None:
            return self._attend_one_by_one(query, sinks)
        if not self.state.decoding:
            return self.state.attend_chunk(query, mask, sinks)
        if mask is not None and not self._padding_checked:
            self._padding_checked = True
            self.state.refuse_other_padding(mask)
        return self._attend_step(query, sinks)

    def _attend_step(self, query: Tensor, sinks: Tensor | None) -> Tensor:
        """Retrieval and attention of one token's queries [B, H * G, 1, D]."""
        assert self.state is not None
        out, lse = attend_layer(self.state, as_heads(query, self.state.info.kv_heads))
        out, lse = out.flatten(1, 2).unsqueeze(2), lse.flatten(1, 2).unsqueeze(2)
        return out if sinks is None else weaken_by_sinks(out, lse, sinks)

    def _attend_one_by_one(self, query: Tensor, sinks: Tensor | None) -> Tensor:
        """Several tokens in one forward, each as the decode step that it would have been."""
        assert self.state is not None
        assert self._pending is not None
        keys, values = self._pending
        self._pending = None
        found = []
        for column in range(keys.shape[2]):
            now = slice(column, column + 1)
            self.state.append(keys[:, :, now], values[:, :, now])
            found.append(self._attend_step(query[:, :, now], sinks))
        return torch.cat(found, dim=2)

    def refuse_unattended(self) -> None:
        """Raise ModelError where the last keys never came back to our attention function."""
        if self._unattended:
            raise ModelError(
                f"layer {self.index}: the model changed the keys after the cache (as multi-head latent attention "
                f"does) or its attention implementation is not '{ATTENTION}' any more; use a model with plain "
                f"key/value attention, and make the cache after setting the attention implementation"
            )

    def _refuse_other_shape(self, keys: Tensor) -> None:
        assert self.state is not None
        info = self.state.info
        if (keys.shape[0], keys.shape[1], keys.shape[3]) != (info.batch, info.kv_heads, info.head_dim):
            raise ModelError(
                f"layer {self.index}: this cache holds {info.batch} rows of {info.kv_heads} x {info.head_dim}, "
                f"got keys {tuple(keys.shape)}; make a new ParisCache for another batch"
            )

    def activate_past_recording(self) -> None:
        """Assisted decoding begins: from the first `crop` on, tokens that come together are a draft to be verified."""
        self.record_past, self._verifies = True, False

    def cropped(self, columns: int) -> None:
        """Rows have gone back to so many columns."""
        assert self.state is not None
        self.columns = self.state.columns = columns
        self._verifies = self.record_past

    def fork(self, request: RequestState) -> ParisLayer:
        """The layer of a forked request."""
        other = ParisLayer(self.index, request, self.geometry, self.turns)
        other.state, other.columns, other.is_initialized = request.layers[self.index], self.columns, True
        return other

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget the request."""
        self.request.reset()
        self.state, self.is_initialized = None, False
        self.cleared()

    def cleared(self) -> None:
        """Nothing is held any more."""
        self.columns = 0
        self._unattended = self._padding_checked = self._verifies = False
        self._pending = None
