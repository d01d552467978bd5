"""Shares of a device as people write them, and as they are sent."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from springtide.client.goals import TrainOptions
from springtide.client.serving_goals import ServeOptions
from springtide.client.shares import is_auto, read_memory_mb, read_share, settled_share, share_text
from springtide.core.errors import InvalidRequest
from springtide.core.shares import Share

NOON = datetime(2026, 1, 1, 12)


@pytest.mark.parametrize(
    ("share", "request_fraction", "limit"),
    [
        (0.3, 0.3, 0.6),
        ("0.3", 0.3, 0.6),
        ("30%", 0.3, 0.6),
        (0.7, 0.7, 1.0),
        ((0.3, 0.4), 0.3, 0.4),
        ("0.3..0.4", 0.3, 0.4),
        ("30% .. 40%", 0.3, 0.4),
        (1, 1.0, 1.0),
    ],
)
def test_a_share_as_it_is_written(share: Any, request_fraction: float, limit: float) -> None:
    assert read_share(share) == Share(request=request_fraction, limit=limit)


def test_gpu_is_the_short_form_and_one_device_is_no_share() -> None:
    assert read_share(None, gpu=0.3) == Share(request=0.3, limit=0.6) == read_share(None, gpu="30%")
    assert read_share(None, gpu=1) is None
    assert read_share(None) is None


def test_memory_goes_with_a_share() -> None:
    assert read_share(0.5, "1.5GB") == Share(request=0.5, limit=1.0, memory_mb=1500)
    assert read_memory_mb(1) == 1, "rounded up: what is asked for must be there"


@pytest.mark.parametrize("share", ["", "third", "0.3..", (0.1, 0.2, 0.3), (), True, float("nan"), "0.3...0.6", "-0.3"])
def test_what_is_no_fraction(share: Any) -> None:
    with pytest.raises(InvalidRequest, match="no fraction of a device"):
        read_share(share)


@pytest.mark.parametrize(("share", "sentence"), [(0.0, "above 0"), (1.5, "at most 1"), ((0.6, 0.3), "leave it out")])
def test_fractions_that_are_no_share(share: Any, sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        read_share(share)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"gpu": (0.3, 0.6)}, r"share=\(0\.3, 0\.6\)"),
        ({"gpu": 2}, r"add it, like share=\(0\.3, 0\.6\) \(--share 0\.3\.\.0\.6\)"),
        ({"gpu": 3, "share": 0.5}, "1, 2, 4 or 8 devices of one node"),
        ({"gpu": 2, "share": "auto"}, "a profile on one device"),
        ({"gpu": "fast"}, "gpu=0.3"),
        ({"gpu": 0.5, "share": 0.5}, "keep one"),
        ({"memory": "4GB"}, "share beside it"),
        ({"share": 0.5, "memory": "much"}, "memory 'much'"),
    ],
)
def test_what_does_not_go_together_says_what_would(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InvalidRequest, match=sentence):
        ServeOptions(**given)


def test_a_share_of_each_of_several_devices_is_sent_with_their_number() -> None:
    sent = ServeOptions(gpu=2, share=(0.3, 0.6)).as_request()
    assert (sent["devices_each"], sent["share"]) == (2, {"request": 0.3, "limit": 0.6, "memory_mb": 0})
    assert "devices_each" not in ServeOptions(gpu=0.3).as_request()


def test_auto_is_what_a_profile_says_and_refused_without_one() -> None:
    assert is_auto("auto")
    asked = ServeOptions(share="auto")
    with pytest.raises(InvalidRequest, match=r"springtide profile FILE --shares.*--share 0\.3\.\.0\.6"):
        asked.as_request()
    with pytest.raises(InvalidRequest, match="springtide profile FILE --shares"):
        settled_share("auto")
    settled = asked.override({"share": (0.2, 0.4), "capacity": 30})
    assert settled.as_request()["share"] == {"request": 0.2, "limit": 0.4, "memory_mb": 0}
    assert settled.as_request()["capacity_per_s"] == 30.0


def test_jobs_and_services_send_their_share_and_nothing_without_one() -> None:
    job = TrainOptions(share="30%", memory="2GB").as_request(2, NOON)
    assert job["share"] == {"request": 0.3, "limit": 0.6, "memory_mb": 2000}
    assert "share" not in TrainOptions().as_request(2, NOON)
    assert ServeOptions(gpu=0.3).as_request()["share"] == {"request": 0.3, "limit": 0.6, "memory_mb": 0}
    assert not {"share", "capacity_per_s"} & set(ServeOptions().as_request())


def test_functions_share_no_device() -> None:
    with pytest.raises(InvalidRequest, match="leave share out"):
        TrainOptions(share=0.3, on="functions").as_request(2, NOON)


def test_a_share_reads_as_it_is_typed() -> None:
    share = Share(request=0.25, limit=0.5)
    assert read_share(share_text(share)) == share
