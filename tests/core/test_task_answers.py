"""What made-up answers score: right, wrong, right in another form, empty, two answers."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from task_data import write_all

from pariskv.evaluation.tasks.answers import is_same_value, last_boxed, last_letter
from pariskv.evaluation.tasks.catalogue import SUITES, Choice, make_tasks
from pariskv.evaluation.tasks.item import Task


@pytest.fixture
def tasks(tmp_path: Path) -> dict[str, Task]:
    write_all(tmp_path)
    ruler = ("niah_multivalue", "niah_single_1", "qa_1")
    made = make_tasks(Choice((*SUITES[1:], *ruler), (2000,), tmp_path, "own", 0), lambda item: len(item.prompt.split()))
    return {task.name.partition("@")[0]: task for task in made}


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        ("The correct answer is (B).", 1),
        ("The correct answer is B", 1),
        ("the correct answer is **(B)** because", 1),
        ("The correct answer is (C)", 0),
        ("The correct answer is (C). No: the correct answer is (B).", 1),  # the last one counts
        ("<think>The correct answer is (C)</think> The correct answer is (B)", 1),
        ("The correct answer is Berlin", 0),
        ("B", 0),  # not in the form that was asked for
        ("", 0),
    ],
)
def test_longbench2_goes_by_the_letter_in_the_form_that_was_asked_for(
    tasks: dict[str, Task], answer: str, score: float
) -> None:
    task = tasks["longbench2"]
    assert task.item(0).wanted == ("B",)
    assert task.score(task.item(0), answer) == score


def test_longbench2_thinks_where_it_is_asked_to_and_concludes_without_the_text(tasks: dict[str, Task]) -> None:
    at_once, thinks = tasks["longbench2"].item(0), tasks["longbench2_cot"].item(0)
    assert at_once.second is None
    assert at_once.prompt.endswith('"The correct answer is (insert answer here)".')
    assert thinks.prompt.endswith("\n(D) w3 D\n\nLet’s think step by step:")
    assert thinks.second is not None
    asked = thinks.second.item(thinks, "It is (C)? No.")
    assert "w3 w4?\nChoices:\n(A) w0 A" in asked.prompt
    assert "think step by step: It is (C)? No.\n\nBased on the above, what is" in asked.prompt
    assert thinks.context.split("<text>")[1] not in asked.prompt
    assert "omitted" in asked.prompt
    assert (asked.second, asked.wanted, asked.groups) == (None, thinks.wanted, thinks.groups)
    assert tasks["longbench2_cot"].score(asked, "The correct answer is (B).") == 1


def test_gpqa_wants_the_letter_at_which_the_right_choice_lies(tasks: dict[str, Task]) -> None:
    task = tasks["gpqa_diamond"]
    letters = set()
    for index in range(len(task)):
        item = task.item(index)
        (letter,) = item.wanted
        letters.add(letter)
        assert f"({letter}) right {index}\n" in f"{item.prompt}\n"
        others = [one for one in "ABCD" if one != letter]
        forms = (
            f"Answer: {letter}",
            f"so\n**Answer: {letter}**",
            f"Answer: ({letter})",
            rf"Answer: $\boxed{{{letter}}}$",
        )
        assert [task.score(item, f"Thinking.\n{form}") for form in forms] == [1, 1, 1, 1]
        assert [task.score(item, f"Answer: {one}") for one in others] == [0, 0, 0]
        assert task.score(item, f"Answer: {others[0]}\nI was wrong.\nAnswer: {letter}") == 1
        assert task.score(item, "") == 0
        assert task.item(index) == item
    assert len(letters) > 1  # choices are shuffled


@pytest.mark.parametrize(
    ("answer", "score"),
    [
        (r"It is \boxed{\frac{1}{2}}.", 1),
        (r"It is \boxed{0.5}", 1),
        (r"It is $\boxed{ \dfrac{2}{4} }$", 1),
        (r"It is \boxed{\frac{1}{3}}", 0),
        (r"\boxed{3}, no, \boxed{\frac12}", 1),
        (r"\boxed{\frac12}, no, \boxed{3}", 0),
        (r"\boxed{7} <think> \boxed{8} </think> \boxed{1/2}", 1),
        (r"It is \boxed{\frac{1}{2}", 0),  # never closed
        ("It is one half.", 0),
        ("", 0),
    ],
)
def test_math500_compares_values_in_the_last_box(tasks: dict[str, Task], answer: str, score: float) -> None:
    assert tasks["math500"].score(tasks["math500"].item(0), answer) == score


def test_aime_wants_the_integer(tasks: dict[str, Task]) -> None:
    task = tasks["aime25"]
    item = task.item(0)
    assert item.wanted == ("70",)
    assert [task.score(item, text) for text in (r"\boxed{70}", r"\boxed{070}", r"\boxed{71}", "70")] == [1, 1, 0, 0]
    assert (task.samples, tuple(task.pass_at)) == (8, (8,))


@pytest.mark.parametrize(
    ("wanted", "given", "same"),
    [
        (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\pi/2)", True),
        ("p - q", "-q+p", True),
        (r"\text{Evelyn}", "Evelyn", True),
        ("(1,2]", "[1,2]", False),
        ("14", "41", False),
    ],
)
def test_forms_of_a_value(wanted: str, given: str, same: bool) -> None:
    assert is_same_value(wanted, given) is same


def test_values_are_compared_in_other_threads_too() -> None:
    found: list[bool] = []
    thread = threading.Thread(target=lambda: found.append(is_same_value("1/2", "0.5")))
    thread.start()
    thread.join()
    assert found == [True]


def test_boxes_within_boxes_and_other_braces() -> None:
    assert last_boxed(r"\boxed{\sqrt{2}^{\frac{1}{2}}}") == r"\sqrt{2}^{\frac{1}{2}}"
    assert last_boxed(r"\boxed{a} and \boxed{\text{b} ") == "a"
    assert last_boxed("nothing") is None
    assert last_letter("Answer: E", "answer") is None


def test_ruler_counts_the_share_of_the_values_or_any_of_the_references(tasks: dict[str, Task]) -> None:
    many, one, any_of = tasks["niah_multivalue"], tasks["niah_single_1"], tasks["qa_1"]
    item = many.item(0)
    assert len(set(item.wanted)) == 4
    assert many.score(item, "; ".join(item.wanted)) == 1
    assert many.score(item, f"{item.wanted[0]} and {item.wanted[3]}") == 0.5
    assert many.score(item, "") == 0
    assert one.score(one.item(0), f"It is {one.item(0).wanted[0]}, or 1.") == 1
    assert one.score(one.item(0), "1") == 0
    asked = any_of.item(0)
    assert any_of.score(asked, asked.wanted[0].upper()) == 1
    assert any_of.score(asked, asked.wanted[0].partition(" ")[0]) == 0
