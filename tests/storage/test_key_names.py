"""What is a key and what is none."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from springtide.core.errors import StorageError
from springtide.storage.key_names import checked_key, checked_keys, checked_prefix
from springtide.testing.store import BAD_KEYS

PARTS = st.text("abzAZ019._-", min_size=1, max_size=20).filter(lambda part: part not in {".", ".."})


@given(st.lists(PARTS, min_size=1, max_size=20))
def test_parts_joined_by_slashes_are_keys_and_their_beginnings_are_prefixes(parts):
    key = "/".join(parts)
    assert checked_key(key) == key
    for end in range(len(key) + 1):
        assert checked_prefix(key[:end]) == key[:end]


@pytest.mark.parametrize("key", BAD_KEYS)
def test_a_bad_key_is_refused_with_a_sentence_that_shows_it(key):
    with pytest.raises(StorageError, match="key") as caught:
        checked_keys(["good", key])
    assert len(str(caught.value)) < 900
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("prefix", ["/", "a//", "../", "a/../b", "a b", "a*", "x" * 513])
def test_no_key_begins_so(prefix):
    with pytest.raises(StorageError, match="no key begins"):
        checked_prefix(prefix)


@given(st.text(max_size=30))
def test_whatever_is_taken_stays_under_its_root(text):
    try:
        key = checked_key(text)
    except StorageError:
        return
    assert key.isascii()
    assert not key.startswith("/")
    assert ".." not in key.split("/")


def test_repeated_keys_are_asked_for_once():
    assert checked_keys(["b", "a", "b"]) == ["b", "a"]
