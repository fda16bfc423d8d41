"""The key of an effect, and the hash tags of keys in Redis."""

from __future__ import annotations

import pytest

from sinks.contract import SinkMisused
from sinks.effect_keys import effect_key
from sinks.hash_tags import hash_tag, key_beside, require_same_hash_tag


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({"business_key": "b", "event_id": "e", "original_message_id": "m"}, "business:b"),
        ({"business_key": None, "event_id": "e", "original_message_id": "m"}, "event:e"),
        ({"business_key": "", "event_id": "", "original_message_id": "m"}, "message:m"),
    ],
)
def test_the_business_key_comes_before_the_event_id_and_that_before_the_message_id(
    given: dict[str, str | None], key: str
) -> None:
    assert effect_key(**given) == key


def test_the_same_text_as_business_key_and_as_event_id_are_two_effects() -> None:
    assert effect_key(business_key="17") != effect_key(event_id="17")


def test_an_effect_without_any_key_is_refused() -> None:
    with pytest.raises(SinkMisused, match="The effect has no key"):
        effect_key()


@pytest.mark.parametrize(
    ("key", "tag"),
    [("a", "a"), ("{t}:a", "t"), ("a:{t}:{u}", "t"), ("{}a", "{}a"), ("{a", "{a"), ("a}{t}", "t"), ("{a}{t}", "a")],
)
def test_the_hash_tag_is_what_redis_cluster_uses(key: str, tag: str) -> None:
    assert hash_tag(key) == tag
    if "{" not in tag and "}" not in tag:
        assert hash_tag(key_beside(key, "{other}")) == tag


@pytest.mark.parametrize("key", ["a}b", "{}a"])
def test_a_key_whose_companions_would_be_stored_elsewhere_is_refused(key: str) -> None:
    with pytest.raises(SinkMisused, match="has an unpaired brace"):
        key_beside(key, "seen")


def test_keys_that_one_script_cannot_change_together_are_refused_with_an_example() -> None:
    require_same_hash_tag("orders", ["orders", "{orders}:totals"])
    with pytest.raises(SinkMisused, match=r"must share one hash tag.* for example, '\{orders\}:totals'"):
        require_same_hash_tag("orders", ["{orders}:a", "totals"])
