import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.errors import InvalidInputError
from storage.names import NAME_PATTERN, suggest_name, validate_name
from tlp.core.next_steps import next_command


@pytest.mark.parametrize("name", ["a", "0", "resnet_50", "epyc-7b13", "x" * 40])
def test_accepted(name: str) -> None:
    assert validate_name("device", name) == name


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("My CPU", "my-cpu"),
        ("-x", "x"),
        ("", "x"),
        ("ResNet.50", "resnet-50"),
        ("y" * 41, "y" * 40),
        ("../etc", "etc"),
        ("a\n", "a"),
    ],
)
def test_refused_with_a_suggestion(name: str, suggestion: str) -> None:
    with pytest.raises(InvalidInputError, match="network name") as error:
        validate_name("network", name)
    assert f"try {suggestion!r}" in error.value.message
    assert next_command(error.value)


@given(st.text(max_size=60))
def test_a_suggestion_is_always_acceptable(text: str) -> None:
    assert NAME_PATTERN.fullmatch(suggest_name(text))
