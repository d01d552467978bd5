"""How the functions of a platform are called: apart from those of others in one account, within the clouds' limits."""

from __future__ import annotations

import re

import pytest

from springtide.backends.functions.provider import MAX_PREFIX, check_prefix, function_prefix
from springtide.core.errors import InvalidRequest

# Both clouds': letters, digits, - and _, 64 of them at most; Alibaba wants no digit at the beginning.
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_-]{0,63}", re.ASCII)


def test_a_name_says_whose_the_functions_are() -> None:
    prefix = function_prefix("team", "s3://bucket/team?region=eu-central-1")
    assert re.fullmatch(r"springtide-team-[0-9a-f]{6}", prefix)
    assert re.fullmatch(r"springtide-[0-9a-f]{6}", function_prefix("springtide", "s3://bucket/team"))
    assert function_prefix("", "s3://bucket/team") == function_prefix("springtide", "s3://bucket/team")


def test_platforms_that_share_no_store_share_no_functions() -> None:
    places = ("s3://bucket/a", "s3://bucket/b", "s3://other/a", "s3://bucket/a?endpoint=https://minio.example.com")
    assert len({function_prefix("springtide", place) for place in places}) == len(places)


def test_how_a_store_is_reached_does_not_change_the_names() -> None:
    place = "s3://bucket/a"
    for same in (f"{place}/", f"{place}?region=eu-central-1", f"{place}?style=virtual&allow_http=true"):
        assert function_prefix("team", same) == function_prefix("team", place)


@pytest.mark.parametrize("name", ["", "a", "a" * 40, "b" * 200, "ä b/c", "-x-", "springtide"])
def test_every_name_is_one_that_the_clouds_take(name: str) -> None:
    prefix = function_prefix(name, "s3://bucket/platform")
    check_prefix(prefix)
    assert NAME.fullmatch(f"{prefix}-10240")
    assert NAME.fullmatch("a" * MAX_PREFIX + "-32768")


@pytest.mark.parametrize("prefix", ["", "1a", "a b", "a/b", "a" * (MAX_PREFIX + 1), "ä"])
def test_what_clouds_do_not_take_is_refused(prefix: str) -> None:
    with pytest.raises(InvalidRequest, match="1 to 58 letters"):
        check_prefix(prefix)
