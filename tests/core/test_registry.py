"""Plugins by name: what is offered, what is broken, and every message about either."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Literal

import pytest
from fakes import Coarse, Full, Rerank, importable, install, plugin, registry_of

from pariskv.errors import ConfigError, PluginContractError, PluginLoadError
from pariskv.hookspecs import Register, hookimpl
from pariskv.registry import PluginRow, Registry, own_version


@dataclass(frozen=True)
class Options:
    page_size: int = 16
    combine: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise ValueError(f"page_size={self.page_size} is below 1")


@dataclass(frozen=True)
class Required:
    path: str


class Paged(Full):
    def __init__(self, options: Options):
        self.options = options


class Located(Full):
    def __init__(self, options: Required):
        self.options = options


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder on sys.path in which distributions can be laid."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in set(sys.modules) - before:
        if name.endswith("_module"):
            del sys.modules[name]


def load(*modules: ModuleType) -> Registry:
    with importable(**{f"plugin_{number}": module for number, module in enumerate(modules)}) as names:
        return Registry.load(names, entry_points=False)


def offering(name: str, factory: Callable[..., object] = Full, api: int = 1) -> ModuleType:
    return plugin(lambda register: register(name, factory, api=api))


def row_of(registry: Registry, name: str) -> PluginRow:
    return next(row for row in registry.listing() if row.name == name)


GOOD = """
from pariskv.hookspecs import Retriever, hookimpl

class Mine(Retriever):
    format = "mine-1"

    @hookimpl
    def rerank(self, query, selection, codes, top_k):
        return selection

@hookimpl
def register_retrievers(register):
    register("mine", Mine)
"""


def test_built_ins_are_imported_by_name() -> None:
    registry = load(offering("one"), offering("two"))
    assert registry.names() == ["one", "two"]
    assert isinstance(registry.make("one", {}), Full)


def test_an_installed_plugin_is_found_through_its_entry_point(site: Path) -> None:
    install(site, "my-plugin", "mine", GOOD)
    registry = Registry.load((), entry_points=True)
    assert row_of(registry, "mine") == PluginRow("mine", "my-plugin", "1.2", "retriever", ("rerank",), "mine-1")
    assert registry.origin("mine") == "my-plugin 1.2"


def test_an_entry_point_is_not_looked_for_when_not_wanted(site: Path) -> None:
    install(site, "my-plugin", "mine", GOOD)
    assert Registry.load((), entry_points=False).names() == []


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("import no_such_package", "ModuleNotFoundError: No module named 'no_such_package'"),
        ("raise SystemExit('no licence')", "SystemExit: no licence"),
        ("x = (", "SyntaxError"),
        (GOOD.replace("(register):", "(register):\n    raise RuntimeError('half\\nway')"), "RuntimeError: half way"),
        (GOOD.replace("def register_retrievers(register)", "def register_retrievers(reg)"), "PluginValidationError"),
        (GOOD.replace("def register_retrievers", "def register_retriever"), "PluginValidationError: unknown hook"),
        (GOOD.replace("@hookimpl\ndef", "def"), "no function register_retrievers is marked @hookimpl"),
        (GOOD.replace('"mine", Mine', "3, Mine"), "register(3): wanted a name, and not one of auto, none"),
        (GOOD.replace('"mine", Mine', '"none", Mine'), "register('none'): wanted a name, and not one of auto, none"),
        (GOOD.replace("Mine)", "Mine, option=3)"), "TypeError"),
    ],
    ids=lambda text: text[:30],
)
def test_a_broken_plugin_takes_no_other_down(site: Path, source: str, error: str) -> None:
    install(site, "broken-plugin", "broken", source)
    install(site, "my-plugin", "mine", GOOD.replace('"mine"', '"works"'))
    registry = Registry.load((), entry_points=True)
    assert isinstance(registry.make("works", {}), object)
    row = row_of(registry, "broken")
    assert (row.distribution, row.version, row.kind, row.stages) == ("broken-plugin", "1.2", "plugin", ())
    assert row.error is not None
    assert row.error.startswith(error)
    assert "\n" not in row.error


def test_the_error_of_a_broken_plugin_is_raised_where_it_is_named(site: Path) -> None:
    install(site, "a-plugin", "other", "import no_such_other")
    install(site, "broken-plugin", "broken", "import no_such_package")
    with pytest.raises(
        PluginLoadError,
        match=r"^retrievers\.broken: unknown retriever 'broken'; known: none; it may be of a plugin that could not be "
        r"loaded: broken \(broken-plugin 1\.2\): ModuleNotFoundError: No module named 'no_such_package'; "
        r"other \(a-plugin 1\.2\): ",
    ) as caught:
        Registry.load((), entry_points=True).make("broken", {})
    assert isinstance(caught.value.__cause__, ModuleNotFoundError)
    assert caught.value.__cause__.name == "no_such_package"


def test_a_broken_built_in_is_kept_too() -> None:
    registry = Registry.load(("pariskv_plugins.no_such_module",), entry_points=False)
    assert registry.names() == []
    with pytest.raises(PluginLoadError, match=r"pariskv_plugins\.no_such_module \(pariskv .*ModuleNotFoundError"):
        registry.make("anything", {})


def test_an_unknown_name_gets_a_suggestion_and_the_list() -> None:
    with pytest.raises(ConfigError) as caught:
        load(offering("quest"), offering("exact")).make("qest", {}, instance="q64")
    assert str(caught.value) == "retrievers.q64: unknown retriever 'qest' (did you mean 'quest'?); known: exact, quest"
    assert load(offering("quest")).suggest("qest") == " (did you mean 'quest'?)"


def test_another_hook_api_is_an_error_of_that_retriever_only() -> None:
    registry = load(offering("old", api=0), offering("new"))
    registry.make("new", {})
    message = (
        r"'old' of plugin plugin_0 \(pariskv .*\) was written for hook API 0, this pariskv has 1; "
        r"install versions that agree"
    )
    with pytest.raises(PluginContractError, match=message):
        registry.make("old", {})
    assert "hook API 0" in str(row_of(registry, "old").error)


def test_one_name_from_two_plugins_is_an_error_that_names_both() -> None:
    registry = load(offering("same"), offering("same"), offering("other"))
    registry.make("other", {})
    with pytest.raises(
        PluginLoadError,
        match=r"retriever 'same' is offered by plugin_0 \(.*\) and plugin_1 \(.*\); uninstall all but one",
    ):
        registry.make("same", {})
    row = row_of(registry, "same")
    assert row.stages == ()
    assert "offered by plugin_0" in str(row.error)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"factory": 3}, "registers 3 as its factory, wanted something callable"),
        ({"options": int}, "registers <class 'int'> as its options, wanted a dataclass"),
    ],
)
def test_a_registration_that_cannot_work_is_its_own_error(keywords: dict[str, object], message: str) -> None:
    arguments = {"factory": Full, **keywords}
    registry = load(plugin(lambda register: register("odd", **arguments)), offering("fine"))  # type: ignore[arg-type]
    registry.make("fine", {})
    with pytest.raises(PluginContractError, match=message):
        registry.make("odd", {})


def test_options_are_built_and_given_to_the_factory() -> None:
    registry = registry_of({"paged": Paged}, options={"paged": Options})
    made = registry.make("paged", {"page_size": 64, "combine": "max"})
    assert isinstance(made, Paged)
    assert made.options == Options(64, "max")
    assert registry.check("paged", {}) == Options()
    assert registry.check("pariskv", {}) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"pagesize": 3},
            "retrievers.p.pagesize: unknown key (did you mean 'page_size'?); valid keys: page_size, combine",
        ),
        ({"page_size": "big"}, "retrievers.p.page_size: got 'big' (str), wanted int"),
        ({"combine": "mea"}, "retrievers.p.combine: got 'mea' (str), wanted mean | max (did you mean 'mean'?)"),
        ({"page_size": 0}, "retrievers.p: ValueError: page_size=0 is below 1"),
    ],
)
def test_wrong_options_are_refused_without_calling_the_factory(options: dict[str, object], message: str) -> None:
    def never(values: object) -> object:
        raise AssertionError

    registry = registry_of({"paged": never}, options={"paged": Options})
    for use in (registry.check, registry.make):
        with pytest.raises(ConfigError) as caught:
            use("paged", options, "p")
        assert str(caught.value) == message


def test_a_missing_option_is_named() -> None:
    registry = registry_of({"located": Located}, options={"located": Required})
    with pytest.raises(ConfigError, match=r"^retrievers\.located\.path: missing, wanted str$"):
        registry.make("located", {})


def test_a_retriever_without_options_takes_none() -> None:
    with pytest.raises(ConfigError, match=r"^retrievers\.pariskv\.size: unknown key; valid keys: none$"):
        registry_of().make("pariskv", {"size": 3})


def test_the_error_of_a_factory_is_wrapped_with_its_plugin() -> None:
    def fails() -> object:
        raise ImportError("no numba here")

    message = r"^retriever 'fails' of plugin fake_builtin \(pariskv .*\) cannot be made: ImportError: no numba here$"
    with pytest.raises(PluginLoadError, match=message) as caught:
        registry_of({"fails": fails}).make("fails", {})
    assert isinstance(caught.value.__cause__, ImportError)
    assert "no numba here" in str(row_of(registry_of({"fails": fails}), "fails").error)


def test_what_a_factory_says_about_the_configuration_passes() -> None:
    def refuses() -> object:
        raise ConfigError("page_size must be even")

    with pytest.raises(ConfigError, match=r"^page_size must be even$"):
        registry_of({"refuses": refuses}).make("refuses", {})


def test_a_factory_that_returns_nothing_is_refused() -> None:
    with pytest.raises(PluginContractError, match=r"retriever 'empty' of plugin .*: its factory returned nothing"):
        registry_of({"empty": lambda: None}).make("empty", {})


def test_the_listing_has_stages_in_the_order_of_the_contract() -> None:
    row = row_of(registry_of(), "pariskv")
    assert row.stages == ("allocate_codes", "encode", "encode_query", "coarse_select", "rerank")
    assert (row.format, row.error) == ("fmt", None)
    assert (row.distribution, row.version) == ("pariskv", own_version())


def test_the_listing_reads_the_class_where_an_option_has_no_default() -> None:
    row = row_of(registry_of({"located": Located}, options={"located": Required}), "located")
    assert "rerank" in row.stages
    assert row.error is None


def test_the_listing_shows_what_breaks_the_contract() -> None:
    class Odd(Coarse):
        @hookimpl
        def rerank(self, query, selection, codes):  # type: ignore[no-untyped-def]
            return selection

    row = row_of(registry_of({"odd": Odd}), "odd")
    assert row.stages == ()
    assert "has other arguments than the contract" in str(row.error)


class Profiler:
    @hookimpl(wrapper=True)
    def encode(self):  # type: ignore[no-untyped-def]
        return (yield)


def test_wrappers_are_offered_apart_from_retrievers() -> None:
    registry = registry_of(wrappers={"profiler": Profiler})
    assert isinstance(registry.make_wrapper("profiler"), Profiler)
    assert "profiler" not in registry.names()
    assert row_of(registry, "profiler") == PluginRow("profiler", "pariskv", own_version(), "wrapper", ("encode",))


def test_an_unknown_wrapper_gets_a_suggestion() -> None:
    with pytest.raises(ConfigError) as caught:
        registry_of(wrappers={"profiler": Profiler}).make_wrapper("profile")
    assert str(caught.value) == "wrappers: unknown wrapper 'profile' (did you mean 'profiler'?); known: profiler"


def test_a_plugin_may_offer_several_retrievers_and_keeps_those_before_its_error() -> None:
    def register_all(register: Register) -> None:
        register("first", Rerank)
        raise RuntimeError("the second needs a GPU")

    registry = load(plugin(register_all))
    assert isinstance(registry.make("first", {}), Rerank)
    assert row_of(registry, "plugin_0").error == "RuntimeError: the second needs a GPU"
