"""The retrieval zone of one layer: its rows in the store, its codes, and what formats have learnt from it.

`append` is the way in. Rows of the batch come and go by themselves: `crop` takes a row's newest tokens away,
`take_row` gives it another's. Nothing here happens within a step; `publish` tells the device what changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from pariskv import fork
from pariskv.binding import Encoder, LayerPipeline
from pariskv.errors import CapacityError, PluginContractError, ShapeError
from pariskv.hookspecs import Need
from pariskv.pairs import Pair, take_rows
from pariskv.prompt import TOKENS_AT_ONCE, PromptView
from pariskv.types import Budget, Codes, LayerInfo, Store, Tensors

View = Callable[[frozenset[Need], list[int]], PromptView]
"""(what a format needs, rows) -> the rows' zones as its `fit` sees them."""


class Zone:
    """The zone of one layer of one request.

    lengths  host integers, tokens of each row
    length   int32 [B] on the device, the same for rows that generate and 0 for the others: what stages read
    update   U, tokens that arrive together
    fitted   of each format, the rows that it has been fitted to, and how many tokens their zones had then
    refits   rows that a format was fitted to again
    """

    def __init__(self, info: LayerInfo, pipeline: LayerPipeline, update: int):
        self.info, self.pipeline, self.update = info, pipeline, update
        self.lengths = [0] * info.batch
        self.length = torch.zeros(info.batch, dtype=torch.int32, device=info.device)
        self.budget = Budget(0, torch.zeros_like(self.length))
        self.store: Store | None = None
        self.codes: dict[str, Codes] = {}
        self.states: dict[str, dict[str, Tensor]] = {}
        self.fitted: dict[str, dict[int, int]] = {encoder.name: {} for encoder in pipeline.encoders}
        self.refits = 0
        self._no_codes = Codes({}, {}, self.length, 0)

    # What the stages read

    def codes_of(self, name: str | None) -> Codes:
        """The codes of a producer; of none, codes that hold nothing but the lengths."""
        return self._no_codes if name is None else self.codes[name]

    def state_of(self, name: str) -> Tensors:
        """What a format learnt from the zone; empty where it learns nothing."""
        return self.states.get(name, {})

    def publish(self, active: Sequence[bool]) -> None:
        """Tell the device the lengths and budgets; of rows that have ended nothing is retrieved any more."""
        zones = tuple(zone if is_active else 0 for zone, is_active in zip(self.lengths, active, strict=True))
        self.length.copy_(_integers(zones, self.info.device))
        if self.store is not None:
            rule, top_k = self.pipeline.candidates, self.pipeline.top_k
            counts = tuple(rule.count(zone, top_k) for zone in zones)
            self.budget.count.copy_(_integers(counts, self.info.device))
            self.budget = Budget(rule.width(self.store.capacity, top_k), self.budget.count)

    @property
    def code_bytes(self) -> int:
        return sum(codes.nbytes for codes in self.codes.values())

    # Tokens arrive

    def reserve(self, tokens: int, planned: int = 0) -> None:
        """Make sure that codes and store have room for `tokens` tokens a row, and more: where it is planned, for those.

        Raises CapacityError where there is no memory to grow.
        """
        if self.store is None:
            assert self.pipeline.allocate_store is not None
            capacity = max(tokens, planned)
            self.store = self.pipeline.allocate_store(self.info, capacity)
            for encoder in self.pipeline.encoders:
                codes = encoder.allocate_codes(self.info, capacity)
                codes.length = self.length
                self.codes[encoder.name] = codes
        elif tokens > self.store.capacity:
            room = max(self.update, tokens // 8 // self.update * self.update)
            self._grow(planned if planned >= tokens else tokens + room)

    def _grow(self, capacity: int) -> None:
        assert self.store is not None
        held = self.store.capacity
        try:
            for codes in self.codes.values():
                if codes.capacity < capacity:
                    codes.grow(capacity)
            self.store.grow(capacity)  # in the end: its capacity says what every one of them has room for
        except (RuntimeError, MemoryError) as error:
            raise CapacityError(
                f"layer {self.info.index}: no memory to grow the zone from {held} to {capacity} tokens a row "
                f"({error}); lower max_new_tokens or the batch, or choose a store in host memory"
            ) from error

    def append(self, rows: list[int], keys: Tensor, values: Tensor) -> None:
        """The next tokens [R, H, n, D] of the rows: encoded by every format that knows the row, then stored."""
        starts = [self.lengths[row] for row in rows]
        for encoder in self.pipeline.encoders:
            fitted = self.fitted[encoder.name]
            ready = [i for i, row in enumerate(rows) if encoder.fit is None or row in fitted]
            if len(ready) == len(rows):
                self._encode(encoder, rows, starts, keys, values)
            elif ready:
                pair = take_rows(keys, ready), take_rows(values, ready)
                self._encode(encoder, [rows[i] for i in ready], [starts[i] for i in ready], *pair)
        assert self.store is not None
        assert self.pipeline.update is not None
        self.pipeline.update(keys, values, self.store, rows)
        for row in rows:
            self.lengths[row] += keys.shape[2]

    def _encode(self, encoder: Encoder, rows: list[int], starts: list[int], keys: Tensor, values: Tensor) -> None:
        state = {name: take_rows(tensor, rows) for name, tensor in self.states.get(encoder.name, {}).items()}
        block = encoder.encode(keys, values, state)
        try:
            self.codes[encoder.name].append(rows, starts, block, keys.shape[2])
        except ShapeError as error:
            error.add_note(f"what encode of retriever {encoder.name!r} returned, layer {self.info.index}")
            raise

    # What formats learn

    def fit(self, view: View) -> None:
        """Fit the formats that learn from the zone to the rows that are new to them, and encode these rows."""
        for encoder in self.pipeline.encoders:
            fitted = self.fitted[encoder.name]
            rows = [row for row, zone in enumerate(self.lengths) if zone and row not in fitted]
            if encoder.fit is None or not rows:
                continue
            seen = view(encoder.needs, rows)
            self._keep_state(encoder.name, encoder.fit(self.info, seen), rows)
            fitted.update((row, self.lengths[row]) for row in rows)
            for row in rows:
                self._encode_anew(encoder, row, seen.blocks(row))

    def forget_stale(self, rows: list[int], keys: Tensor) -> None:
        """Take those rows as not fitted whose state no longer suits the keys [R, H, n, D] that have just arrived."""
        for encoder in self.pipeline.encoders:
            self._forget_stale(encoder, rows, keys)

    def _forget_stale(self, encoder: Encoder, rows: list[int], keys: Tensor) -> None:
        fitted = self.fitted[encoder.name]
        moved = [i for i, row in enumerate(rows) if row in fitted]
        if encoder.is_stale is None or not moved:
            return
        asked = [rows[i] for i in moved]
        state = {name: take_rows(tensor, asked) for name, tensor in self.states[encoder.name].items()}
        then = [fitted[row] for row in asked]
        # A row that went back may hold less than it was fitted to.
        since = [max(0, self.lengths[row] - tokens) for row, tokens in zip(asked, then, strict=True)]
        stale = encoder.is_stale(take_rows(keys, moved), state, then, since)
        for row, is_stale in zip(asked, stale, strict=True):
            if is_stale:
                del fitted[row]
                self.codes[encoder.name].forget_sums(row)
                self.refits += 1

    def _keep_state(self, name: str, new: Tensors, rows: list[int]) -> None:
        """Only the given rows are taken over, in place: a captured step reads them where they are."""
        state = self.states.setdefault(name, {key: torch.zeros_like(tensor) for key, tensor in new.items()})
        for key, tensor in new.items():
            for row in rows:
                state[key][row] = tensor[row]

    def _encode_anew(self, encoder: Encoder, row: int, blocks: Iterator[Pair]) -> None:
        start = 0
        for keys, values in blocks:
            self._encode(encoder, [row], [start], keys.unsqueeze(0), values.unsqueeze(0))
            start += keys.shape[1]

    # Rows come and go

    def crop(self, row: int, tokens: int) -> None:
        """Forget the row's tokens from `tokens` on, a multiple of U; what formats have learnt they keep.

        Raises PluginContractError where the store cannot do that.
        """
        if tokens >= self.lengths[row]:
            return
        self._drop(row, tokens)
        for encoder in self.pipeline.encoders:
            codes, knows = self.codes[encoder.name], encoder.fit is None or row in self.fitted[encoder.name]
            if tokens and codes.has_sums and knows:
                codes.forget_sums(row)
                self._encode_anew(encoder, row, self._blocks(row, 0, tokens))

    def take_row(self, row: int, source: Zone, source_row: int, common: int = 0) -> None:
        """Make a row hold what another one does, of this zone or of another one of the same layer.

        common  tokens, a multiple of U, that both hold already
        Raises PluginContractError where the store cannot do that.
        """
        tokens = source.lengths[source_row]
        common = min(common, tokens, self.lengths[row])
        alike = {name for name in self.codes if self._learnt_alike(name, row, source, source_row, common)}
        if common < self.lengths[row]:
            self._drop(row, common)
        self._take_learnt(row, source, source_row)
        if not tokens:
            return
        assert self.pipeline.update is not None
        assert source.store is not None
        assert self.store is not None, "reserve comes first"
        if source.store.keeps_rows:
            for keys, values in source._blocks(source_row, common, tokens):
                self.pipeline.update(keys.unsqueeze(0), values.unsqueeze(0), self.store, [row])
        else:
            self.count_only(row, tokens - common)
        for name, codes in self.codes.items():
            codes.take_row(row, source.codes[name], source_row, common if name in alike else 0, tokens)
        with self._named("take_row_state"):
            self.store.take_row_state(row, source.store, source_row)
        self.lengths[row] = tokens

    def share(self, source: Zone) -> None:
        """Hold what another zone of the same layer does; both read the same rows and codes (`pariskv.fork`)."""
        self.lengths = list(source.lengths)
        self.fitted = {name: dict(rows) for name, rows in source.fitted.items()}
        self.states = {
            name: {key: tensor.clone() for key, tensor in state.items()} for name, state in source.states.items()
        }
        if source.store is not None:
            assert self.pipeline.allocate_store is not None
            source.store, self.store = fork.share(source.store, self.info, self.pipeline.allocate_store)
            self.codes = {name: codes.share(self.length) for name, codes in source.codes.items()}

    def _drop(self, row: int, tokens: int) -> None:
        assert self.store is not None
        with self._named("crop"):
            self.store.crop(row, tokens)
        self.lengths[row] = tokens
        if not tokens:
            for name, fitted in self.fitted.items():
                fitted.pop(row, None)
                self.codes[name].forget_sums(row)

    def _blocks(self, row: int, start: int, stop: int) -> Iterator[Pair]:
        """Keys and values [H, n, D] of the row's tokens start .. stop - 1, block by block, from the store."""
        assert self.store is not None
        size = self.update * max(1, TOKENS_AT_ONCE // self.update)
        for first in range(start, stop, size):
            yield self.store.read(row, first, min(first + size, stop))

    def count_only(self, row: int, tokens: int) -> None:
        """Tell a store that keeps no rows how many more there are."""
        assert self.pipeline.update is not None
        assert self.store is not None
        nothing = torch.zeros((), dtype=self.info.dtype, device=self.info.device)
        rows = nothing.expand(1, self.info.kv_heads, tokens, self.info.head_dim)
        self.pipeline.update(rows, rows, self.store, [row])

    def _learnt_alike(self, name: str, row: int, source: Zone, source_row: int, common: int) -> bool:
        """Whether the codes of the tokens in common are the same: formats were fitted to these tokens at most."""
        mine, other = self.fitted[name].get(row), source.fitted[name].get(source_row)
        return mine == other and (mine is None or mine <= common)

    def _take_learnt(self, row: int, source: Zone, source_row: int) -> None:
        for name, state in source.states.items():
            empty = {key: tensor.new_zeros(self.info.batch, *tensor.shape[1:]) for key, tensor in state.items()}
            mine = self.states.setdefault(name, empty)
            for key, tensor in state.items():
                mine[key][row] = tensor[source_row]
        for name, fitted in source.fitted.items():
            self.fitted[name].pop(row, None)
            if source_row in fitted:
                self.fitted[name][row] = fitted[source_row]

    @contextmanager
    def _named(self, method: str) -> Iterator[None]:
        """Say which retriever's store broke the contract."""
        try:
            yield
        except PluginContractError as error:
            error.add_note(f"{method}: the store of retriever {self.pipeline.names.get('allocate_store')!r}")
            raise


@lru_cache(maxsize=64)
def _integers(numbers: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 on the device; all layers of a request ask for the same in turn."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)
