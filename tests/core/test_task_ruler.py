"""RULER's thirteen tasks: prompts that fit their length, hold their answer, and are made the same every time."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from pariskv.errors import ConfigError
from pariskv.evaluation.tasks.item import Item
from pariskv.evaluation.tasks.ruler import NAMES, ruler_task
from pariskv.evaluation.tasks.ruler.made import largest_fitting
from pariskv.evaluation.tasks.ruler.published import ESSAYS, HOTPOTQA, SQUAD, Material
from pariskv.needle import HAY

OWN = Material(None, "own")


def count(item: Item) -> int:
    """About what a tokenizer says: words, and numbers as digits."""
    return len(re.findall(r"[a-z]+|\d|\S", item.prompt.lower()))


@pytest.mark.parametrize("length", [1024, 4096])
@pytest.mark.parametrize("name", NAMES)
def test_a_prompt_fills_its_length_and_leaves_room_for_the_answer(name: str, length: int) -> None:
    task = ruler_task(name, length, count, OWN)
    for index in range(3):
        room = length - task.max_new_tokens
        unit = 100  # the largest unit of hay of any task, and the search's half per cent
        assert room - unit - length // 100 <= count(task.item(index)) <= room


@pytest.mark.parametrize("name", NAMES)
def test_items_differ_and_are_the_same_when_asked_again(name: str) -> None:
    first, second = ruler_task(name, 1024, count, OWN), ruler_task(name, 1024, count, OWN)
    items = [first.item(index) for index in range(4)]
    assert items == [second.item(index) for index in (0, 1, 2, 3)]
    assert second.item(2) == items[2]  # whatever was asked before
    assert len({item.prompt for item in items}) == len({item.wanted for item in items}) == 4
    assert ruler_task(name, 1024, count, OWN, seed=1).item(0) != items[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_in_the_text_and_not_in_the_question(name: str) -> None:
    item = ruler_task(name, 1024, count, OWN).item(0)
    for wanted in item.wanted:
        assert wanted in item.context
        assert wanted not in item.question + item.answer_prefix
    assert item.question
    assert item.prompt == item.context + item.question + item.answer_prefix


def test_a_single_needle_asks_as_the_paper_does() -> None:
    item = ruler_task("niah_single_1", 1024, count, OWN).item(0)
    (key,) = re.findall(r"number for ([a-z-]+) mentioned in the provided text\?", item.question)
    assert f"One of the special magic numbers for {key} is: {item.wanted[0]}." in item.context
    assert item.context.startswith("A special magic number is hidden within the following text.")
    assert item.answer_prefix == f" The special magic number for {key} mentioned in the provided text is"
    assert item.context.count(HAY.strip()) > 20


def test_the_position_is_where_the_needle_lies() -> None:
    task = ruler_task("niah_single_1", 4096, count, OWN)
    for index in range(10):
        item = task.item(index)
        assert item.position is not None
        assert item.context.index(item.wanted[0]) / len(item.context) == pytest.approx(item.position, abs=0.06)


@pytest.mark.parametrize(
    ("name", "needles", "wanted", "value"),
    [
        ("niah_single_2", 1, 1, r"\d{7}"),
        ("niah_single_3", 1, 1, r"[0-9a-f-]{36}"),
        ("niah_multikey_1", 4, 1, r"\d{7}"),
        ("niah_multivalue", 4, 4, r"\d{7}"),
        ("niah_multiquery", 4, 4, r"\d{7}"),
    ],
)
def test_needles_of_each_kind(name: str, needles: int, wanted: int, value: str) -> None:
    item = ruler_task(name, 2048, count, OWN).item(0)
    assert len(re.findall(r"One of the special magic", item.context)) == needles
    assert len(item.wanted) == wanted
    assert all(re.fullmatch(value, one) for one in item.wanted)


def test_hay_of_needles_has_one_with_the_key_that_is_asked_for() -> None:
    item = ruler_task("niah_multikey_3", 4096, count, OWN).item(0)
    (key,) = re.findall(r"uuid for ([0-9a-f-]{36}) mentioned", item.question)
    assert item.context.count("One of the special magic uuids") > 20
    assert item.context.count(key) == 1


def test_variables_form_a_chain_in_the_order_of_the_text() -> None:
    item = ruler_task("vt", 1024, count, OWN).item(0)
    ours = item.context.rpartition("Memorize and track")[2]
    given = dict(re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", ours))
    (value,) = re.findall(r"assigned the value (\d{5})", item.question)
    assert list(given) == list(item.wanted)
    assert [given[item.wanted[0]], *(given[name] for name in item.wanted[1:])] == [value, *item.wanted[:-1]]


def test_common_and_frequent_words_are_the_most_common() -> None:
    item = ruler_task("cwe", 4096, count, OWN).item(0)
    listed = re.findall(r"\d+\. ([a-z]+)", item.context.rpartition("Below is")[2])
    assert {word for word, _ in Counter(listed).most_common(10)} == set(item.wanted)
    item = ruler_task("fwe", 4096, count, OWN).item(0)
    coded = Counter(re.findall(r"\b[a-z]{6}\b", item.context.partition("coded words. ")[2]))
    assert [word for word, _ in coded.most_common(3)] == list(item.wanted)


def test_a_length_without_room_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"niah_single_1@150: the smallest prompt takes \d+ tokens .* got 22"):
        ruler_task("niah_single_1", 150, count, OWN).item(0)


@pytest.mark.parametrize("room", [100, 101, 1234, 99_999])
@pytest.mark.parametrize("each", [1, 7, 33])
def test_the_search_finds_about_the_largest_that_fits(room: int, each: int) -> None:
    found = largest_fitting(lambda units: 40 + units * each + units // 3, room, 0, "test")
    best = max(units for units in range(room) if 40 + units * each + units // 3 <= room)
    assert best - max(1, best // 100) <= found <= best


def test_published_texts_are_used_where_they_are_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ruler").mkdir()
    essays = " ".join(f"essay{index}" for index in range(500))
    (tmp_path / ESSAYS.path).write_text(json.dumps({"text": essays}))
    paragraphs = [
        {
            "context": f"Paragraph {index} tells of cats and dogs.",
            "qas": [
                {
                    "question": f"What of {index}?",
                    "is_impossible": False,
                    "answers": [{"text": "cats"}, {"text": "cats"}],
                },
                {"question": "And birds?", "is_impossible": True, "answers": []},
            ],
        }
        for index in range(40)
    ]
    (tmp_path / SQUAD.path).write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    hops = [
        {"question": "Who?", "answer": "Ann", "context": [[f"T{i}", ["Ann sings."]], [f"U{i}", ["Bob does not."]]]}
        for i in range(40)
    ]
    (tmp_path / HOTPOTQA.path).write_text(json.dumps(hops))
    material = Material(tmp_path)
    essay = ruler_task("niah_single_2", 1024, count, material)
    assert "essays of Paul Graham" in essay.source.data
    assert "essay7 " in essay.item(0).context
    assert "own haystack" in ruler_task("niah_single_2", 1024, count, Material(tmp_path, "own")).source.data

    with pytest.raises(ConfigError, match=r"squad\.json: its sha256 is [0-9a-f]{64}, wanted 80a5225e"):
        ruler_task("qa_1", 1024, count, material)
    for name, published in (("SQUAD", SQUAD), ("HOTPOTQA", HOTPOTQA)):
        made_up = type(published)(published.path, published.where)
        monkeypatch.setattr(f"pariskv.evaluation.tasks.ruler.published.{name}", made_up)
    one, two = (ruler_task(name, 1024, count, material) for name in ("qa_1", "qa_2"))
    assert len(one) == len(two) == 40
    assert one.item(3).wanted == ("cats",)
    assert one.item(3).context.count("Paragraph 3 tells") == 1
    assert two.item(5).wanted == ("Ann",)
    assert "T5\nAnn sings." in two.item(5).context
    assert "U5\nBob does not." in two.item(5).context
    assert "SQuAD 2.0" in one.source.data
    assert "HotpotQA" in two.source.data
