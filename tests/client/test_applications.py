"""What `st.asgi` and `st.process` make of a function, and what they refuse."""

from __future__ import annotations

import pytest

import springtide as st
from springtide.client.applications import typed_command
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


@st.process(ready="/health", scale=(0, 2))
def my_program(port):
    return f"program --port {port}"


def test_a_command_is_declared_by_a_function_or_typed(tmp_path):
    assert my_program.source().object_name == "my_program"
    assert (my_program.cls.ready, derive_schema(my_program.cls).concurrency) == ("/health", 64)
    typed = typed_command("bin/my-server '{port} x'", ready="/up?full=1", folder=tmp_path)
    source = typed.source()
    assert (typed.name, source.kind, source.location.parent) == ("my-server", "class", tmp_path)
    here = {}
    exec(source.text, here)
    made = here[source.object_name].cls
    assert (made.make(), made.ready) == (["bin/my-server", "{port} x"], "/up?full=1")


@pytest.mark.parametrize("ready", ["health", "/a b", "/ä", "/a\r\nHost: x", 7])
def test_a_readiness_that_is_no_path_is_refused(ready):
    with pytest.raises(InvalidRequest, match="path"):
        st.process(ready=ready)
    with pytest.raises(InvalidRequest, match="path"):
        typed_command("server", ready=ready)


@pytest.mark.parametrize(("command", "why"), [("", "empty"), ("say 'x", "quotes")])
def test_a_command_that_is_none_is_refused(command, why):
    with pytest.raises(InvalidRequest, match=why):
        typed_command(command)


def test_what_is_no_function_or_no_option_is_refused():
    with pytest.raises(InvalidRequest, match="a function that returns"):
        st.asgi()(object())
    with pytest.raises(InvalidRequest, match="a function that returns the command"):
        st.process()("server")
    with pytest.raises(InvalidRequest, match="does not know 'speed'"):
        st.asgi(speed=1)
