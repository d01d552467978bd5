"""A small service: it needs nothing but Python and sleeps after a second without requests."""

from __future__ import annotations

import springtide as st


@st.serve(scale=(0, 1), idle="1s", name="hello-api")
class Greeter:
    """List in, list out: requests that arrive together may be predicted together."""

    def load(self) -> None:
        """A real service reads its model here."""
        self.greeting = "hello, {}"

    def predict(self, names: list[str]) -> list[str]:
        """One greeting for each name."""
        return [self.greeting.format(name) for name in names]
