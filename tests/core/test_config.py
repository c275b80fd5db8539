"""Loading, overriding and printing the configuration, and every message that refuses one."""

from __future__ import annotations

import re
from dataclasses import FrozenInstanceError, fields, is_dataclass
from pathlib import Path
from typing import get_type_hints

import pytest

from pariskv.config import (
    DEFAULT_LAYER,
    Config,
    LayerConfig,
    describe_schema,
    layer_range,
    load_config,
    parse_config,
    to_dict,
    to_yaml,
)
from pariskv.errors import ConfigError

CONFIGS = Path(__file__).parents[2] / "configs"


def refusal(text: object, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_config(text, overrides)  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_an_empty_text_means_the_defaults() -> None:
    config = parse_config("")
    assert config == Config() == load_config(None) == parse_config({})
    assert config.layers == {"default": DEFAULT_LAYER}
    assert (config.window.sink, config.window.local, config.prefill.chunk) == (64, 256, "auto")


def test_the_example_of_the_design_is_understood() -> None:
    config = parse_config(
        """
        model: {name: smollm2-135m, dtype: auto, device: auto}
        retrievers:
          pariskv: {subspace_dim: 8}
          quest64: {type: quest, page_size: 64}
        layers:
          default: {retriever: pariskv, candidates: auto, top_k: 512}
          "0-1":   {retriever: dense}
          2-9:     {coarse_select: quest64}
        store: auto
        window: {sink: 64, local: 256, update_interval: 256, dense_below: 2000}
        prefill: {chunk: auto}
        generation: {max_new_tokens: 128, temperature: 0.0}
        runtime: {graph: auto, compile: false, attend: auto}
        wrappers: []
        quickstart: {prompt_tokens: 4000}
        """
    )
    assert config.retrievers["quest64"] == {"type": "quest", "page_size": 64}
    assert list(config.layers) == ["default", "0-1", "2-9"]
    assert config.layers["2-9"] == LayerConfig(coarse_select="quest64")


def test_the_default_layer_keeps_what_the_yaml_leaves_out() -> None:
    config = parse_config("layers: {default: {top_k: 64}, 3: {rerank: none}}")
    assert config.layers["default"] == LayerConfig(retriever="pariskv", candidates="auto", top_k=64)
    assert config.layers["3"].top_k is None
    assert config.layers["3"].rerank == "none"


def test_on_and_off_are_words_and_true_and_false_are_not() -> None:
    config = parse_config("runtime: {graph: on, compile: true}")
    assert config.runtime.graph == "on"
    assert config.runtime.compile is True
    assert parse_config("runtime: {graph: off}").runtime.graph == "off"


def test_keys_are_strings_whatever_they_look_like() -> None:
    config = parse_config("layers: {5: {retriever: dense}}\nretrievers: {on: {1: no, 2: 1e-3, 3: 010, 4: 2020-01-01}}")
    assert list(config.layers) == ["default", "5"]
    assert config.retrievers == {"on": {"1": "no", "2": 0.001, "3": 10, "4": "2020-01-01"}}
    assert list(parse_config({"layers": {5: {}}}).layers) == ["default", "5"]


def test_an_empty_section_is_one_with_nothing_in_it() -> None:
    config = parse_config("window:\nretrievers:\n  pariskv:\nlayers:\n  2:\n")
    assert config.window == Config().window
    assert config.retrievers == {"pariskv": {}}
    assert config.layers["2"] == LayerConfig()


def test_candidates_keep_the_difference_between_a_ratio_and_a_count() -> None:
    got = [
        parse_config(f"layers: {{default: {{candidates: {c}}}}}").layers["default"].candidates for c in (1, 1.0, 0.1)
    ]
    assert [(type(value), value) for value in got] == [(int, 1), (float, 1.0), (float, 0.1)]


def test_encode_is_a_name_or_a_list_of_names() -> None:
    assert parse_config("layers: {1: {encode: a}}").layers["1"].encode == "a"
    assert parse_config("layers: {1: {encode: [a, b]}}").layers["1"].encode == ["a", "b"]
    assert refusal("layers: {1: {encode: [[a]]}}").endswith("got [['a']] (list), wanted str | list[str] | none")


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        Config().window.local = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("window.local=128", "window.local", 128),
        ("layers.0-1.retriever=dense", "layers.0-1.retriever", "dense"),
        ("layers.default.top_k=64", "layers.default.top_k", 64),
        ("runtime.graph=on", "runtime.graph", "on"),
        ("layers.default.candidates=0.25", "layers.default.candidates", 0.25),
        ("layers.4={rerank: none, encode: [a, b]}", "layers.4.encode", ["a", "b"]),
        ("retrievers.q.type=quest=64", "retrievers.q.type", "quest=64"),
        (" window.sink =0", "window.sink", 0),
    ],
)
def test_overrides_are_read_like_the_file(override: str, path: str, value: object) -> None:
    got: object = to_dict(parse_config("", [override]))
    for key in path.split("."):
        got = got[key]  # type: ignore[index]
    assert got == value


def test_overrides_come_last_and_leave_the_given_mapping_alone() -> None:
    given = {"window": {"local": 32, "sink": 4}}
    config = parse_config(given, ["window.local=64", "window.local=128"])
    assert (config.window.local, config.window.sink) == (128, 4)
    assert given == {"window": {"local": 32, "sink": 4}}


def test_interpolations_are_filled_in() -> None:
    config = parse_config("window: {local: 128, update_interval: '${window.local}'}")
    assert config.window.update_interval == 128


def test_what_is_printed_reads_back_the_same() -> None:
    config = parse_config(
        "runtime: {graph: on}\nretrievers: {q: {type: '1e5', note: 'yes', n: 1e-5, e: null, s: '010'}}\n"
        "layers: {0-1: {encode: [a, b], candidates: 0.1}, 5: {retriever: dense}}"
    )
    assert parse_config(to_yaml(config)) == config == parse_config(to_dict(config))
    assert to_dict(config)["layers"]["5"] == {"retriever": "dense"}
    assert list(to_dict(config)) == [item.name for item in fields(Config)]


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.name)
def test_the_configs_that_come_with_the_project_load(path: Path) -> None:
    assert load_config(path).quickstart.prompt_tokens == 4000


def test_the_quickstart_retrieves_128_tokens() -> None:
    config = load_config(CONFIGS / "smollm2.yaml")
    assert config.layers == {"default": LayerConfig(retriever="pariskv", candidates="auto", top_k=128)}
    assert config.window == Config().window


def test_layer_keys_are_inclusive_ranges() -> None:
    assert list(layer_range("5")) == [5]
    assert list(layer_range("2-4")) == [2, 3, 4]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml: no such configuration file \(looked in .*an empty file"):
        load_config(tmp_path / "nowhere.yaml")


def test_a_folder_and_a_binary_file_are_not_configurations(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read as a text file"):
        load_config(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.yaml: cannot be read as a text file"):
        load_config(tmp_path / "binary.yaml")


def test_malformed_yaml_is_placed_by_file_line_and_column(tmp_path: Path) -> None:
    path = tmp_path / "bad.yaml"
    path.write_text("window:\n  local: [1, 2\nmodel: {}\n")
    with pytest.raises(ConfigError, match=r"bad\.yaml, line 3, column 6: expected ',' or ']'"):
        load_config(path)


REFUSED = {
    "window: {locl: 3}": "window.locl: unknown key (did you mean 'local'?); "
    "valid keys: sink, local, update_interval, dense_below",
    "windw: {}": "windw: unknown key (did you mean 'window'?); valid keys: model, retrievers, layers, store, window, "
    "prefill, generation, runtime, wrappers, debug, quickstart, evaluation",
    "layers: {0-1: {retreiver: x}}": "layers.0-1.retreiver: unknown key (did you mean 'retriever'?); valid keys: "
    "retriever, encode, coarse_select, rerank, fetch, update, candidates, top_k, codes_from",
    "window: {local: many}": "window.local: got 'many' (str), wanted int",
    "window: {local: 1.5}": "window.local: got 1.5 (float), wanted int",
    "window: {local: true}": "window.local: got True (bool), wanted int",
    "window: {local: }": "window.local: got nothing, wanted int",
    "window: 3": "window: got 3 (int), wanted a section with sink, local, update_interval, dense_below",
    "model: {name: [a]}": "model.name: got ['a'] (list), wanted str",
    "model: {dtype: float23}": "model.dtype: got 'float23' (str), wanted auto | float32 | bfloat16 | float16 | float64 "
    "(did you mean 'float32'?)",
    "runtime: {graph: true}": "runtime.graph: got True (bool), wanted auto | on | off",
    "runtime: {compile: 3}": "runtime.compile: got 3 (int), wanted bool",
    "wrappers: profiler": "wrappers: got 'profiler' (str), wanted list[str]",
    "layers: {default: {candidates: true}}": "layers.default.candidates: got True (bool), wanted "
    "auto | int | float | none",
    "layers: {default: {rerank: [a]}}": "layers.default.rerank: got ['a'] (list), wanted str | none",
    "layers: 3": "layers: got 3 (int), wanted dict[str, LayerConfig]",
    "retrievers: {q: 3}": "retrievers.q: got 3 (int), wanted dict[str, Any]",
    "retrievers: {q: {type: 3}}": "retrievers.q.type: got 3, wanted a retriever's name",
    "window: {sink: -1}": "window.sink: got -1, wanted an integer >= 0",
    "window: {local: 0}": "window.local: got 0, wanted an integer >= 1",
    "window: {update_interval: 0}": "window.update_interval: got 0, wanted an integer >= 1",
    "window: {dense_below: -1}": "window.dense_below: got -1, wanted an integer >= 0",
    "prefill: {chunk: 0}": "prefill.chunk: got 0, wanted an integer >= 1",
    "prefill: {chunk: all}": "prefill.chunk: got 'all' (str), wanted auto | int",
    "quickstart: {prompt_tokens: 0}": "quickstart.prompt_tokens: got 0, wanted an integer >= 1",
    "generation: {max_new_tokens: 0}": "generation.max_new_tokens: got 0, wanted an integer >= 1",
    "generation: {seed: -1}": "generation.seed: got -1, wanted an integer >= 0",
    "generation: {top_k: -1}": "generation.top_k: got -1, wanted an integer >= 0",
    "generation: {temperature: -0.1}": "generation.temperature: got -0.1, wanted a number >= 0",
    "generation: {temperature: .nan}": "generation.temperature: got nan, wanted a number >= 0",
    "generation: {temperature: .inf}": "generation.temperature: got inf, wanted a number >= 0",
    "generation: {top_p: 0}": "generation.top_p: got 0.0, wanted 0 < top_p <= 1",
    "generation: {top_p: 1.1}": "generation.top_p: got 1.1, wanted 0 < top_p <= 1",
    "layers: {3: {top_k: -1}}": "layers.3.top_k: got -1, wanted an integer >= 0",
    "layers: {default: {candidates: 0}}": "layers.default.candidates: got 0, wanted auto, a ratio "
    "(a float with 0 < ratio <= 1) or a count (an int >= 1)",
    "layers: {2: {candidates: 1.5}}": "layers.2.candidates: got 1.5, wanted auto, a ratio "
    "(a float with 0 < ratio <= 1) or a count (an int >= 1)",
    "layers: {0-3: {}, 2: {}}": "layers.0-3 and layers.2 overlap at layer 2",
    "layers: {2-4: {}, 0-2: {}}": "layers.2-4 and layers.0-2 overlap at layer 2",
    "layers: {3-1: {}}": "layers.3-1: the range is reversed, write 1-3",
    "layers: {1-: {}}": "layers.1-: wanted `default`, a layer `N` or a range `A-B`",
    "layers: {defalt: {}}": "layers.defalt: wanted `default`, a layer `N` or a range `A-B` (did you mean 'default'?)",
    "store: a\nstore: b": "configuration, line 2, column 1: store: given twice",
    "layers: {5: {}, '5': {}}": "configuration, line 1, column 17: 5: given twice",
    "? [1]\n: 2": "configuration, line 1, column 3: a key must be plain text",
    "dense": "configuration: got 'dense' (str), wanted sections such as `model:` and `layers:`",
    "model: {name: '${window.nothing}'}": "model.name: Interpolation key 'window.nothing' not found",
    "model: {name: '???'}": "model.name: Missing mandatory value: name",
    "model: {name: !!python/name:os.system x}": "configuration, line 1, column 15: could not determine a constructor "
    "for the tag 'tag:yaml.org,2002:python/name:os.system'",
    "a: &a [*a]": "configuration, line 1, column 4: found unconstructable recursive node",
    "a\0": "configuration: not a YAML text: unacceptable character #x0000: special characters are not allowed in "
    '"<unicode string>", position 1',
}


@pytest.mark.parametrize("text", REFUSED, ids=repr)
def test_a_wrong_configuration_is_refused_in_one_line(text: str) -> None:
    assert refusal(text) == REFUSED[text]


@pytest.mark.parametrize("override", ["window.local", "=3", "window..local=3", ".local=3", ""])
def test_a_malformed_override_is_refused(override: str) -> None:
    assert refusal("", override) == f"override {override!r}: wanted key=value, such as window.local=128"


def test_an_override_below_a_value_is_refused() -> None:
    message = refusal("window: {local: 3}", "window.local.more=4")
    assert message == "override 'window.local.more=4': window.local is a value, not a section"


def test_an_override_with_a_wrong_value_is_refused_like_the_file() -> None:
    assert refusal("", "window.local=x") == "window.local: got 'x' (str), wanted int"
    assert refusal("", "window.local=") == "window.local: got nothing, wanted int"
    assert refusal("", "windw.local=3").startswith("windw: unknown key (did you mean 'window'?)")
    assert refusal("", "window.local=[1").startswith("override 'window.local=[1', line 1, column 3: expected")


def test_every_field_of_the_schema_is_described() -> None:
    rows = {row.path: row for row in describe_schema()}
    assert rows["window.local"].type == "int"
    assert rows["window.local"].default == "256"
    assert rows["runtime.graph"].type == "auto | on | off"
    assert rows["layers.KEY.top_k"].default == "512"
    assert rows["model.trust_remote_code"].default == "false"
    for path, row in rows.items():
        assert re.fullmatch(r"\S.*[^.]", row.help), path
    for section, hint in get_type_hints(Config).items():
        inner = fields(hint) if isinstance(hint, type) and is_dataclass(hint) else ()
        assert all(f"{section}.{item.name}" in rows for item in inner)
