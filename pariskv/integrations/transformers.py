"""pariskv behind Hugging Face transformers, through its official extension points only.

ParisCache       a `Cache`: our layers where the model has full attention, the stock ones elsewhere
paris_attention  registered with `AttentionInterface`; finds its layer by a tag on the keys
paris_mask       registered with `AttentionMaskInterface`, without which padding would be lost

model.generate(**inputs, cache=ParisCache(model, config))
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    Cache,
    CacheLayerMixin,
    get_layer_types_and_kwargs,
)
from transformers.masking_utils import causal_mask_function, sdpa_mask

from pariskv.attention import dense_attention, weaken_by_sinks
from pariskv.binding import bind
from pariskv.cache import RequestState, as_heads
from pariskv.config import Config, load_config
from pariskv.decode import attend_layer
from pariskv.errors import BindingError, ModelError
from pariskv.integrations.rotary import make_unrotate
from pariskv.layer import HEADROOM, LayerState
from pariskv.memory import Estimate, estimate
from pariskv.registry import Registry
from pariskv.types import LayerInfo
from pariskv.warmup import warm_up

ATTENTION = "pariskv"
"""Our name in transformers' attention and mask interfaces."""

TAG = "_pariskv"
"""Attribute of the keys that `update` returns, by which the attention function finds its layer."""


class ParisCache(Cache):
    """The cache of one request: give it to `model.generate(cache=...)`, or to `pariskv.decode`.

    Sets the model's attention implementation to pariskv's, which is dense attention for any other cache.

    model   a transformers decoder whose attention goes through `AttentionInterface`
    config  what `load_config` returns; the defaults without one
    Raises ModelError for a model that cannot be served, ConfigError and PluginError for a bad config.
    """

    def __init__(self, model: PreTrainedModel, config: Config | None = None, registry: Registry | None = None):
        config = config or load_config(None)
        text_config = model.config.get_text_config(decoder=True)
        layer_types, layer_kwargs = supported_layers(model)
        retrieving = [index for index, kind in enumerate(layer_types) if kind == "full_attention"]
        pipelines = bind(config, len(layer_types), registry or Registry.load(), retrieving)
        unrotate = make_unrotate(model)
        refuse_missing_rotary(pipelines.values(), unrotate is not None, model)
        self.request = RequestState(pipelines, config.window, unrotate)
        self.geometry = geometry = Geometry(model, text_config)
        super().__init__(
            layers=[
                ParisLayer(index, self.request, geometry)
                if kind == "full_attention"
                else DYNAMIC_LAYER_TYPE_MAPPING[kind](**kwargs)
                for index, (kind, kwargs) in enumerate(zip(layer_types, layer_kwargs, strict=True))
            ]
        )
        use_attention(model)

    # What `pariskv.decode` asks of a cache

    def begin_prefill(self, prompt_tokens: int, new_tokens: int = HEADROOM) -> None:
        if self.get_seq_length():
            raise ModelError(
                "this cache holds a request already; make a new ParisCache, or continue it by model.generate(cache=...)"
            )
        self.request.begin_prefill(prompt_tokens, new_tokens)

    def end_prefill(self) -> None:
        for layer in self.layers:
            if isinstance(layer, ParisLayer):
                layer.refuse_unattended()
        self.request.end_prefill()

    def set_active(self, active_rows: list[bool]) -> None:
        self.request.set_active(active_rows)

    def end_step(self) -> None:
        self.request.end_step()

    def warm_up(self) -> None:
        """Let every stage compile what it compiles at its first call."""
        first = min(self.request.pipelines)
        warm_up(self.geometry.expected_info(first, 1), self.request.pipelines.values())

    def estimate(self, batch: int, prompt_tokens: int, new_tokens: int) -> Estimate:
        """What a request of `batch` rows would take, before anything is allocated."""
        state = self.request
        windows = {index: state.window_of(pipeline) for index, pipeline in state.pipelines.items()}
        infos = {index: self.geometry.expected_info(index, batch) for index in state.pipelines}
        return estimate(infos, state.pipelines, windows, prompt_tokens, new_tokens)

    @property
    def stock_bytes(self) -> int:
        """Keys and values of the layers that are not ours (sliding windows)."""
        return _held_bytes(self)


class DenseCache(DynamicCache):
    """transformers' own dense cache, for `pariskv.decode`: the baseline to compare with."""

    def begin_prefill(self, prompt_tokens: int, new_tokens: int) -> None:
        """Nothing to prepare: a dense cache grows by concatenation."""

    def end_prefill(self) -> None:
        """Nothing to do."""

    def set_active(self, active_rows: list[bool]) -> None:
        """A dense cache goes on writing for rows that have ended; their tokens are not looked at."""

    def end_step(self) -> None:
        """Nothing to do."""

    @property
    def nbytes(self) -> int:
        """Keys and values that it holds."""
        return _held_bytes(self)


def _held_bytes(cache: Cache) -> int:
    """Keys and values of a cache's stock layers."""
    tensors = [getattr(layer, name, None) for layer in cache.layers for name in ("keys", "values")]
    return sum(tensor.nbytes for tensor in tensors if isinstance(tensor, Tensor))


class Geometry:
    """What a layer's cache must know of its attention module before the first forward."""

    def __init__(self, model: PreTrainedModel, text_config: PreTrainedConfig):
        self.model_name = str(getattr(model.config, "name_or_path", "") or type(model).__name__)
        self.text_config, self.dtype, self.device = text_config, model.dtype, model.device
        self.num_heads = int(text_config.num_attention_heads)
        self.modules: dict[int, Any] = {
            cast(int, module.layer_idx): module
            for module in model.modules()
            if hasattr(module, "layer_idx") and hasattr(module, "scaling")
        }

    def expected_info(self, index: int, batch: int) -> LayerInfo:
        """The layer's sizes by the model's configuration, before its first keys."""
        module, config = self.modules.get(index), self.text_config
        head_dim = getattr(module, "head_dim", None) or getattr(config, "head_dim", None)
        head_dim = head_dim or config.hidden_size // self.num_heads
        kv_heads = getattr(config, "num_key_value_heads", None) or self.num_heads
        keys = torch.empty(batch, kv_heads, 0, head_dim, dtype=self.dtype, device=self.device)
        return self.layer_info(index, keys)

    def layer_info(self, index: int, keys: Tensor) -> LayerInfo:
        """The layer's sizes, from its first keys [B, H, Q, D] and its module."""
        batch, kv_heads, _, head_dim = keys.shape
        module = self.modules.get(index)
        return LayerInfo(
            index=index,
            batch=batch,
            kv_heads=kv_heads,
            group=self.num_heads // kv_heads,
            head_dim=head_dim,
            dtype=keys.dtype,
            device=keys.device,
            scaling=float(getattr(module, "scaling", head_dim**-0.5)),
            softcap=getattr(module, "attn_logit_softcapping", None),
            model=self.model_name,
        )


class ParisLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]  # transformers has no types here
    """One full-attention layer of a `ParisCache`: a `LayerState` in transformers' clothes."""

    is_sliding = False

    def __init__(self, index: int, request: RequestState, geometry: Geometry):
        super().__init__()  # type: ignore[no-untyped-call]
        self.index = index
        self.request = request
        self.geometry = geometry
        self.state: LayerState | None = None
        self.columns = 0
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
        info = self.state.info
        if not self.state.decoding:
            out = dense_attention(query, keys, values, mask, scaling, info.softcap, sinks)
            self.state.chunk_attended(query, mask)
            return out
        if mask is not None and not self._padding_checked:
            self._padding_checked = True
            self.state.refuse_other_padding(mask)
        out, lse = attend_layer(self.state, as_heads(query, info.kv_heads))
        out, lse = out.flatten(1, 2).unsqueeze(2), lse.flatten(1, 2).unsqueeze(2)
        return out if sinks is None else weaken_by_sinks(out, lse, sinks)

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

    def get_seq_length(self) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.columns + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """Forget the request."""
        self.request.reset()
        self.state, self.columns, self.is_initialized = None, 0, False
        self._unattended = self._padding_checked = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        raise ModelError("pariskv does not support beam search yet; use num_beams=1 (greedy or sampling)")

    def batch_repeat_interleave(self, repeats: int) -> None:
        raise ModelError("pariskv cannot repeat the rows of a filled cache; repeat the prompts instead")

    def batch_select_indices(self, indices: Tensor) -> None:
        raise ModelError("pariskv cannot select rows of a filled cache; make a new ParisCache")


def paris_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The attention function of transformers' interface; returns [B, Q, H * G, D].

    Keys without our tag (another cache, a sliding-window layer) get dense attention.
    """
    layer: ParisLayer | None = getattr(key, TAG, None)
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    softcap, sinks = kwargs.get("softcap"), kwargs.get("s_aux")
    if layer is None:
        out = dense_attention(query, key, value, attention_mask, scaling, softcap, sinks)
    else:
        _refuse_other_scores(layer, scaling, softcap)
        out = layer.attend(query, key, value, attention_mask, scaling, sinks)
    return out.transpose(1, 2), None


def _refuse_other_scores(layer: ParisLayer, scaling: float, softcap: float | None) -> None:
    assert layer.state is not None
    info = layer.state.info
    if scaling != info.scaling or softcap != info.softcap:
        raise ModelError(
            f"layer {layer.index}: the model attends with scaling {scaling} and soft-cap {softcap}, but its module "
            f"declares {info.scaling} and {info.softcap}; this model's attention is not supported"
        )


def paris_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: Tensor | None = None,
    local_size: int | None = None,
    **kwargs: Any,
) -> Tensor | None:
    """The mask of transformers' interface, bool [B, 1, Q, n] or None.

    In a full-attention layer a plain causal chunk needs none (dense attention is causal without a mask),
    and one token needs the padding alone: a view, so that a step asks the host nothing.
    """
    is_full = local_size is None and mask_function is causal_mask_function
    if is_full and attention_mask is None:
        return None
    if is_full and q_length == 1:
        assert attention_mask is not None
        return attention_mask[:, None, None, kv_offset : kv_offset + kv_length].bool()
    mask: Tensor | None = sdpa_mask(
        batch_size=batch_size,
        q_length=q_length,
        kv_length=kv_length,
        q_offset=q_offset,
        kv_offset=kv_offset,
        mask_function=mask_function,
        attention_mask=attention_mask,
        local_size=local_size,
        **kwargs,
    )
    return mask


def register() -> None:
    """Make 'pariskv' known to transformers' attention and mask interfaces; safe to repeat."""
    AttentionInterface.register(ATTENTION, paris_attention)
    AttentionMaskInterface.register(ATTENTION, paris_mask)


def use_attention(model: PreTrainedModel, name: str = ATTENTION) -> None:
    """Set the model's attention implementation, and see that it took."""
    register()
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ModelError(
            f"{type(model).__name__} did not take the attention implementation '{name}': its attention does not go "
            f"through transformers' AttentionInterface; such a model is not supported"
        )


def supported_layers(model: PreTrainedModel) -> tuple[list[str], list[dict[str, Any]]]:
    """The kind of every decoder layer and the arguments of its stock cache layer.

    Raises ModelError, with the reason, for a model that pariskv cannot serve.
    """
    name, config = type(model).__name__, model.config
    text_config = config.get_text_config(decoder=True)
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{name} is an encoder-decoder; pariskv serves decoder-only models")
    if getattr(text_config, "kv_lora_rank", None):
        raise ModelError(
            f"{name} uses multi-head latent attention (kv_lora_rank={text_config.kv_lora_rank}): its cache holds "
            f"latents, not keys; such a model is not supported"
        )
    if getattr(text_config, "kv_sharing_modes", None) or getattr(text_config, "num_kv_shared_layers", 0):
        raise ModelError(f"{name} shares keys and values between layers; such a model is not supported")
    if not model._can_set_attn_implementation():
        raise ModelError(
            f"{name} does not use transformers' AttentionInterface, so its attention cannot be replaced; "
            f"such a model is not supported"
        )
    layer_types, layer_kwargs = get_layer_types_and_kwargs(text_config)
    unknown = sorted(set(layer_types) - set(DYNAMIC_LAYER_TYPE_MAPPING))
    if unknown:
        raise ModelError(f"{name} has layers of a kind that pariskv does not know: {', '.join(unknown)}")
    if "full_attention" not in layer_types:
        kinds = ", ".join(sorted(set(layer_types)))
        raise ModelError(f"{name} has no full-attention layer to retrieve in, only: {kinds}")
    return layer_types, layer_kwargs


def refuse_missing_rotary(pipelines: Any, has_rotary: bool, model: PreTrainedModel) -> None:
    """Raise BindingError where a format needs keys before RoPE and the model cannot give them."""
    for pipeline in pipelines:
        for encoder in pipeline.encoders:
            if "pre_rope" in encoder.needs and not has_rotary:
                raise BindingError(
                    f"layer {pipeline.index}: {encoder.name} needs keys before RoPE, but {type(model).__name__} has "
                    f"no rotary embedding that can be undone; choose another retriever"
                )
