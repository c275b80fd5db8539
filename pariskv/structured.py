"""YAML text and mappings into frozen dataclasses: every error is one line that names the key.

`pariskv.config` reads the configuration with it, `pariskv.registry` the options of retrievers.
"""

from __future__ import annotations

import difflib
import re
import types
import warnings
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass, make_dataclass
from typing import Any, ClassVar, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml  # type: ignore[import-untyped]
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from pariskv.errors import ConfigError

T = TypeVar("T")

_INT = re.compile(r"[-+]?[0-9][0-9_]*$")
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)
_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):  # type: ignore[misc]
    """YAML as people mean it: on, off, yes and no are strings, keys are strings, no key twice.

    Numbers are read as in YAML 1.2: 1e-3 is a float, 010 is ten, 1:30 and dates are strings.
    """

    yaml_implicit_resolvers: ClassVar[dict[str, list[tuple[str, re.Pattern[str]]]]] = {}

    def construct_mapping_node(self, node: yaml.MappingNode) -> dict[Hashable, Any]:
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key.start_mark)
            if key.tag != _TAG + "merge":
                key.tag = _TAG + "str"
                if key.value in seen:
                    raise yaml.constructor.ConstructorError(None, None, f"{key.value}: given twice", key.start_mark)
                seen.add(key.value)
        self.flatten_mapping(node)
        mapping: dict[Hashable, Any] = self.construct_mapping(node, deep=True)
        return mapping

    def construct_integer(self, node: yaml.ScalarNode) -> int:
        return int(node.value.replace("_", ""))


_Loader.add_implicit_resolver(_TAG + "bool", re.compile(r"(true|True|TRUE|false|False|FALSE)$"), list("tTfF"))
_Loader.add_implicit_resolver(_TAG + "int", _INT, list("-+0123456789"))
_Loader.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))
_Loader.add_implicit_resolver(_TAG + "null", re.compile(r"(~|null|Null|NULL|)$"), ["~", "n", "N", ""])
_Loader.add_implicit_resolver(_TAG + "merge", re.compile(r"<<$"), ["<"])
_Loader.add_constructor(_TAG + "map", _Loader.construct_mapping_node)
_Loader.add_constructor(_TAG + "int", _Loader.construct_integer)


class _Dumper(yaml.SafeDumper):  # type: ignore[misc]
    """Quotes what either this loader or another YAML reader would take for something else than text."""


_Dumper.add_implicit_resolver(_TAG + "int", _INT, list("-+0123456789"))
_Dumper.add_implicit_resolver(_TAG + "float", _FLOAT, list("-+.0123456789"))


def load_yaml(text: str, source: str) -> dict[str, Any]:
    """The mapping that a YAML text holds, empty for an empty text."""
    values = _load(text, source)
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{source}: got {describe_value(values)}, wanted sections such as `model:` and `layers:`")
    return values


def _load(text: str, source: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = f", line {mark.line + 1}, column {mark.column + 1}" if mark else ""
        raise ConfigError(f"{source}{place}: {_one_line(error.problem or error.context or error)}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{source}: not a YAML text: {_one_line(error)}") from error


def dump_yaml(values: Mapping[str, Any]) -> str:
    """A YAML text that `load_yaml` reads back to the same values."""
    text: str = yaml.dump(dict(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=110)
    return text


def apply_overrides(values: Mapping[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """A copy of values in which every `key.path=value` has replaced what was at its key."""
    result = {str(key): _string_keys(value) for key, value in values.items()}
    for override in overrides:
        path, equals, text = override.partition("=")
        keys = path.strip().split(".")
        if not equals or not all(keys):
            raise ConfigError(f"override {override!r}: wanted key=value, such as window.local=128")
        section = result
        for depth, key in enumerate(keys[:-1]):
            inner = section.get(key)
            if inner is not None and not isinstance(inner, Mapping):
                raise ConfigError(f"override {override!r}: {'.'.join(keys[: depth + 1])} is a value, not a section")
            section[key] = dict(inner or {})
            section = section[key]
        section[keys[-1]] = _load(text, f"override {override!r}")
    return result


def _string_keys(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _string_keys(inner) for key, inner in value.items()}
    return value


def resolve_interpolations(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with OmegaConf's `${section.key}` and `${oc.env:NAME}` filled in."""
    try:
        resolved = OmegaConf.to_container(OmegaConf.create(dict(values)), resolve=True, throw_on_missing=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"{error.full_key or 'configuration'}: {_one_line(str(error).splitlines()[0])}") from error
    assert isinstance(resolved, dict)
    return {str(key): value for key, value in resolved.items()}


def build(schema: type[T], values: object, path: str = "") -> T:
    """An instance of the dataclass `schema` from a mapping; an empty section (None) means its defaults.

    Raises ConfigError for unknown and missing keys and for wrong types; `path` is the section's key.
    """
    if values is None:
        values = {}
    if not isinstance(values, Mapping):
        raise ConfigError(f"{path}: got {describe_value(values)}, wanted a section with {', '.join(keys_of(schema))}")
    hints = get_type_hints(schema)
    prefix = f"{path}." if path else ""
    for key in values:
        if key not in keys_of(schema):
            raise unknown_key(f"{prefix}{key}", str(key), keys_of(schema))
    for item in fields(schema):  # type: ignore[arg-type]
        if item.init and item.name not in values and is_required(item):
            raise ConfigError(f"{prefix}{item.name}: missing, wanted {type_name(hints[item.name])}")
    return schema(**{key: _convert(hints[key], value, f"{prefix}{key}") for key, value in values.items()})


def keys_of(schema: type) -> list[str]:
    return [item.name for item in fields(schema) if item.init]


def is_required(item: Field[Any]) -> bool:
    return item.default is MISSING and item.default_factory is MISSING


def unknown_key(path: str, key: str, known: Sequence[str]) -> ConfigError:
    valid = ", ".join(known) if known else "none"
    return ConfigError(f"{path}: unknown key{did_you_mean(key, known)}; valid keys: {valid}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` where a known name is close, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def describe_value(value: object) -> str:
    return "nothing" if value is None else f"{value!r} ({type(value).__name__})"


def type_name(hint: object) -> str:
    """A type as the documentation prints it: `auto | int`."""
    if hint is type(None):
        return "none"
    if get_origin(hint) is Literal:
        return " | ".join(str(choice) for choice in get_args(hint))
    if get_origin(hint) in (Union, types.UnionType):
        return " | ".join(type_name(part) for part in get_args(hint))
    if isinstance(hint, type) and get_origin(hint) is None:
        return hint.__name__
    return re.sub(r"\w+\.", "", str(hint))


def _convert(hint: Any, value: object, path: str) -> Any:
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value, path)
    if get_origin(hint) is dict and (value is None or isinstance(value, Mapping)):
        return {str(key): _convert(get_args(hint)[1], inner, f"{path}.{key}") for key, inner in (value or {}).items()}
    converted = _convert_leaf(hint, value)
    if converted is _REFUSED:
        choices = [str(choice) for choice in get_args(hint)] if get_origin(hint) is Literal else []
        raise ConfigError(
            f"{path}: got {describe_value(value)}, wanted {type_name(hint)}{did_you_mean(str(value), choices)}"
        )
    return converted


_REFUSED = object()


def _convert_leaf(hint: Any, value: object) -> Any:
    if hint is Any:
        return value
    if hint is type(None):
        return None if value is None else _REFUSED
    if get_origin(hint) is Literal:
        return next((choice for choice in get_args(hint) if choice == value and type(choice) is type(value)), _REFUSED)
    if get_origin(hint) in (Union, types.UnionType):
        return _convert_union(get_args(hint), value)
    if get_origin(hint) is list and isinstance(value, list | tuple):
        items = [_convert_leaf(get_args(hint)[0], item) for item in value]
        return _REFUSED if any(item is _REFUSED for item in items) else items
    if hint is bool and not isinstance(value, bool | str):
        return _REFUSED
    return _convert_by_omegaconf(hint, value)


def _convert_union(hints: Sequence[Any], value: object) -> Any:
    """The first of the union's types that takes the value; one that it already has comes first."""
    exact = [hint for hint in hints if hint is type(value)]
    for hint in [*exact, *hints]:
        converted = _convert_leaf(hint, value)
        if converted is not _REFUSED:
            return converted
    return _REFUSED


def _convert_by_omegaconf(hint: Any, value: object) -> Any:
    try:
        with warnings.catch_warnings():
            # OmegaConf 2.4 announces that it will refuse to convert; until then "5" is an int.
            warnings.simplefilter("ignore", FutureWarning)
            leaf = OmegaConf.structured(make_dataclass("Leaf", [("value", hint)]))
            container = OmegaConf.to_container(OmegaConf.merge(leaf, {"value": value}), throw_on_missing=True)
    except (OmegaConfBaseException, ValueError, TypeError):
        return _REFUSED
    assert isinstance(container, dict)
    return container["value"]


def _one_line(error: object) -> str:
    return " ".join(str(error).split())
