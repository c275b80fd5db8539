"""Retrievers and wrappers by name: the built-ins, then every plugin that is installed.

A plugin that cannot be imported or registered takes nothing else down: its error is kept, shown by
`listing`, and raised where the configuration needs the plugin.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from importlib import metadata
from typing import Literal

import pluggy

from pariskv.errors import ConfigError, ParisKVError, PluginContractError, PluginLoadError
from pariskv.hookspecs import HOOK_API, PROJECT, PluginSpec
from pariskv.stages import STAGES, stages_of, traits_of, wrapped_stages
from pariskv.structured import build, did_you_mean, unknown_key

BUILTIN_PLUGINS = (
    "pariskv.attention",
    "pariskv_plugins.paris",
    "pariskv_plugins.exact",
    "pariskv_plugins.dense",
    "pariskv_plugins.window",
    "pariskv_plugins.quest",
    "pariskv_plugins.snapkv",
    "pariskv_plugins.pqcache",
    "pariskv_plugins.retroinfer",
    "pariskv_plugins.shadowkv",
    "pariskv_plugins.magicpig",
    "pariskv_plugins.resident",
    "pariskv_plugins.uva",
    "pariskv_plugins.host",
    "pariskv_plugins.attend",
)
ENTRY_POINT_GROUP = PROJECT
RESERVED = ("auto", "none")


@dataclass(frozen=True)
class Source:
    """A plugin module and the distribution that brought it."""

    name: str
    distribution: str
    version: str

    def __str__(self) -> str:
        return f"{self.name} ({self.distribution} {self.version})"


@dataclass(frozen=True)
class Offer:
    """What a plugin registered under a name; `problem` where that cannot be used."""

    name: str
    factory: Callable[..., object]
    options: type | None
    source: Source
    problem: str | None = None


@dataclass(frozen=True)
class PluginRow:
    """One line of `pariskv plugins`; an error comes with no stages."""

    name: str
    distribution: str
    version: str
    kind: Literal["retriever", "wrapper", "plugin"]
    stages: tuple[str, ...] = ()
    format: str | None = None
    error: str | None = None


Offers = dict[str, list[Offer]]
Kind = Literal["retriever", "wrapper"]


@dataclass
class _Register:
    """The `register` that one plugin module receives."""

    source: Source
    retrievers: Offers
    wrappers: Offers

    def __call__(
        self, name: str, factory: Callable[..., object], *, options: type | None = None, api: int = HOOK_API
    ) -> None:
        self._offer(self.retrievers, name, factory, options, api)

    def wrapper(self, name: str, factory: Callable[[], object], *, api: int = HOOK_API) -> None:
        self._offer(self.wrappers, name, factory, None, api)

    def _offer(self, offers: Offers, name: str, factory: Callable[..., object], options: type | None, api: int) -> None:
        if not isinstance(name, str) or not name or name in RESERVED:
            raise PluginContractError(f"register({name!r}): wanted a name, and not one of {', '.join(RESERVED)}")
        problem = None
        if api != HOOK_API:
            problem = f"was written for hook API {api}, this pariskv has {HOOK_API}; install versions that agree"
        elif not callable(factory):
            problem = f"registers {factory!r} as its factory, wanted something callable"
        elif options is not None and not (isinstance(options, type) and is_dataclass(options)):
            problem = f"registers {options!r} as its options, wanted a dataclass"
        offers.setdefault(name, []).append(Offer(name, factory, options, self.source, problem))


@dataclass
class Registry:
    """What the plugins offer. Make one with `Registry.load()`."""

    retrievers: Offers = field(default_factory=dict)
    wrappers: Offers = field(default_factory=dict)
    broken: dict[Source, BaseException] = field(default_factory=dict)

    @classmethod
    def load(cls, builtins: Iterable[str] = BUILTIN_PLUGINS, entry_points: bool = True) -> Registry:
        """Import every plugin, one by one, and let it register its retrievers."""
        registry = cls()
        for module in builtins:
            registry._add(Source(module, PROJECT, own_version()), functools.partial(importlib.import_module, module))
        for entry in metadata.entry_points(group=ENTRY_POINT_GROUP) if entry_points else ():
            distribution, version = (entry.dist.name, entry.dist.version) if entry.dist else ("unknown", "unknown")
            registry._add(Source(entry.name, distribution, version), entry.load)
        return registry

    def _add(self, source: Source, load: Callable[[], object]) -> None:
        # A manager each: what one plugin does to pluggy, or registers twice, is its own affair.
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(PluginSpec)
        try:
            manager.register(load(), source.name)
            manager.check_pending()
            if not manager.hook.register_retrievers.get_hookimpls():
                raise PluginContractError("no function register_retrievers is marked @hookimpl")
            manager.hook.register_retrievers(register=_Register(source, self.retrievers, self.wrappers))
        except (Exception, SystemExit) as error:
            self.broken[source] = error

    def names(self) -> list[str]:
        """The retrievers' names, sorted."""
        return sorted(self.retrievers)

    def suggest(self, name: str, known: Iterable[str] = ()) -> str:
        """` (did you mean 'x'?)` where a known name is close, else nothing."""
        return did_you_mean(name, {*self.retrievers, *known})

    def origin(self, name: str) -> str:
        """`distribution version` of the plugin that offers a retriever."""
        source = self.retrievers[name][0].source
        return f"{source.distribution} {source.version}"

    def check(self, type_name: str, options: Mapping[str, object], instance: str | None = None) -> object | None:
        """The validated options of a retriever, None where it takes none; its factory is not called."""
        path = f"retrievers.{instance or type_name}"
        schema = self._offer(self.retrievers, "retriever", type_name, path).options
        if schema is None:
            for key in options:
                raise unknown_key(f"{path}.{key}", key, ())
            return None
        try:
            return build(schema, options, path)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{path}: {_brief(error)}") from error

    def make(self, type_name: str, options: Mapping[str, object], instance: str | None = None) -> object:
        """A retriever from its validated options.

        Raises ConfigError for a wrong option or an unknown name, PluginLoadError where the plugin or its factory fails.
        """
        values = self.check(type_name, options, instance)
        return _call_factory(self.retrievers[type_name][0], () if values is None else (values,), "retriever")

    def make_wrapper(self, name: str) -> object:
        """The hook wrappers that a plugin offers under `name`."""
        return _call_factory(self._offer(self.wrappers, "wrapper", name, "wrappers"), (), "wrapper")

    def unknown(self, name: str, where: str, kind: Kind = "retriever", also: Collection[str] = ()) -> ParisKVError:
        """The error for a name that nothing offers; a PluginLoadError where a broken plugin could have."""
        known = sorted({*(self.retrievers if kind == "retriever" else self.wrappers), *also})
        text = f"{where}: unknown {kind} {name!r}{did_you_mean(name, known)}; known: {', '.join(known) or 'none'}"
        if not self.broken:
            return ConfigError(text)
        suspects = sorted(self.broken, key=lambda source: not _could_be(source, name))
        failed = "; ".join(f"{source}: {_brief(self.broken[source])}" for source in suspects)
        error = PluginLoadError(f"{text}; it may be of a plugin that could not be loaded: {failed}")
        error.__cause__ = self.broken[suspects[0]]
        return error

    def listing(self) -> list[PluginRow]:
        """Everything that plugins offer, and every plugin that is broken."""
        rows = [self._row("retriever", name, offers[0].source) for name, offers in sorted(self.retrievers.items())]
        rows += [self._row("wrapper", name, offers[0].source) for name, offers in sorted(self.wrappers.items())]
        for source, error in self.broken.items():
            rows.append(PluginRow(source.name, source.distribution, source.version, "plugin", error=_brief(error)))
        return rows

    def _row(self, kind: Kind, name: str, source: Source) -> PluginRow:
        row = PluginRow(name, source.distribution, source.version, kind)
        try:
            if kind == "wrapper":
                stages = wrapped_stages(self.make_wrapper(name), name)
                return replace(row, stages=tuple(stage for stage in STAGES if stage in stages))
            retriever = self._sample(name)
            implemented = stages_of(retriever, name)
            return replace(row, stages=tuple(implemented), format=traits_of(retriever, implemented, name).format)
        except ParisKVError as error:
            return replace(row, error=_brief(error))

    def _sample(self, name: str) -> object:
        """A retriever with its default options; where one has no default, an object of its class without any."""
        try:
            return self.make(name, {})
        except ConfigError:
            factory = self.retrievers[name][0].factory
            if not inspect.isclass(factory):
                raise
            sample: object = object.__new__(factory)
            return sample

    def _offer(self, offers: Offers, kind: Kind, name: str, where: str) -> Offer:
        if name not in offers:
            raise self.unknown(name, where, kind)
        first, *others = offers[name]
        if others:
            both = " and ".join(str(offer.source) for offer in offers[name])
            raise PluginLoadError(f"{where}: the {kind} {name!r} is offered by {both}; uninstall all but one")
        if first.problem is not None:
            raise PluginContractError(f"{where}: {name!r} of plugin {first.source} {first.problem}")
        return first


def own_version() -> str:
    """The version of pariskv, also where it runs from a checkout without being installed."""
    try:
        return metadata.version(PROJECT)
    except metadata.PackageNotFoundError:
        return str(getattr(importlib.import_module(PROJECT), "__version__", "unknown"))


def _call_factory(offer: Offer, arguments: tuple[object, ...], kind: Kind) -> object:
    try:
        made = offer.factory(*arguments)
    except ConfigError:
        raise
    except Exception as error:
        raise PluginLoadError(
            f"{kind} {offer.name!r} of plugin {offer.source} cannot be made: {_brief(error)}"
        ) from error
    if made is None:
        raise PluginContractError(f"{kind} {offer.name!r} of plugin {offer.source}: its factory returned nothing")
    return made


def _could_be(source: Source, name: str) -> bool:
    """Whether a broken plugin's own names are like the one that is missing."""
    words = (source.name, source.name.rpartition(".")[2], source.distribution if source.distribution != PROJECT else "")
    return any(word and (word in name or name in word) for word in words)


def _brief(error: BaseException) -> str:
    """An exception in one line; pariskv's own errors need no class name."""
    text = " ".join(str(error).split())
    return text if isinstance(error, ParisKVError) else f"{type(error).__name__}: {text}"
