from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tlp.core.errors import ModelFormatError
from tlp.language.vocabulary import PADDING, UNKNOWN, Vocabulary, normalise_word

names = st.lists(st.text("abcXYZ_.0", min_size=1, max_size=6), max_size=8)


@given(names, names)
def test_growing_keeps_every_number(first: list[str], second: list[str]) -> None:
    old = Vocabulary().extended(words=first, kinds=first)
    new = old.extended(words=second, kinds=second)
    assert all(new.word_id(word) == old.word_id(word) for word in first)
    assert all(new.kind_id(kind) == old.kind_id(kind) for kind in old.kinds)
    assert all(new.word_id(word) > UNKNOWN for word in second)


@given(names)
def test_order_of_arrival_within_one_growth_does_not_matter(words: list[str]) -> None:
    assert Vocabulary().extended(words=words) == Vocabulary().extended(words=reversed(words))


def test_unknown_names_have_a_token_that_is_not_padding() -> None:
    assert Vocabulary().word_id("never") == UNKNOWN != PADDING
    assert Vocabulary().kind_id("Never") == UNKNOWN


def test_numbered_blocks_are_one_word() -> None:
    vocabulary = Vocabulary().extended(words=["T_add"])
    assert vocabulary.word_id("T_add_1") == vocabulary.word_id("T_add") == vocabulary.word_id("T_add_1_2")
    assert normalise_word('"SSRSRS"') == "SSRSRS"
    assert normalise_word("_1") == "_1"


def test_json_round_trip() -> None:
    vocabulary = Vocabulary().extended(["K"], ["a", "b"])
    assert Vocabulary.from_json(vocabulary.to_json()) == vocabulary


@pytest.mark.parametrize("value", [{}, {"kinds": [], "words": None}, {"kinds": ["a", "a"], "words": []}])
def test_damaged_json_is_refused(value: dict[str, object]) -> None:
    with pytest.raises(ModelFormatError) as caught:
        Vocabulary.from_json(value)
    assert caught.value.next_command
