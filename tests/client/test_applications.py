"""What `st.asgi` makes of a function, and what it refuses."""

from __future__ import annotations

import pytest

import springtide as st
from springtide.core.errors import InvalidRequest
from springtide.serving.schema import derive_schema


@st.asgi(scale=(0, 2), concurrency=7)
def my_site():
    """Tells the time."""
    raise AssertionError("only replicas make the application")


def test_a_function_stands_for_its_application_with_the_options_of_a_service():
    assert my_site.name == "my_site"
    assert my_site.options.as_request()["concurrency"] == 7
    source = my_site.source()
    assert (source.object_name, source.kind, source.filename) == ("my_site", "class", "test_applications.py")
    schema = derive_schema(my_site.cls, 7)
    assert (schema.kind, schema.concurrency, schema.doc) == ("asgi", 7, "Tells the time.")


def test_what_is_no_function_or_no_option_is_refused():
    with pytest.raises(InvalidRequest, match="a function that returns"):
        st.asgi()(object())
    with pytest.raises(InvalidRequest, match="does not know 'speed'"):
        st.asgi(speed=1)
