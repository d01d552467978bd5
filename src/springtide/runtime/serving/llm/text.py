"""The text of an answer while it is written: characters of several tokens, strings that end it, calls of tools."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

# A character of UTF-8 has at most so many bytes, and thus tokens; what does not fit after that never will.
_MAX_TOKENS_OF_A_CHARACTER = 4
_INCOMPLETE = "\ufffd"
_CALL_BEGINS, _CALL_ENDS = "<tool_call>", "</tool_call>"


class TextDecoder:
    """Turns tokens that come one by one into text; `decode` gives the text of a list of them.

    The tokens before are decoded along, because whether a token begins with a space may depend on them.
    """

    def __init__(self, decode: Callable[[list[int]], str]) -> None:
        self._decode = decode
        self._tokens: list[int] = []
        self._start = self._read = 0

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that the tokens complete; empty while they end within a character."""
        shown = ""
        for token in tokens:
            self._tokens.append(token)
            text = self._pending()
            num_pending = len(self._tokens) - self._read
            if num_pending >= _MAX_TOKENS_OF_A_CHARACTER or not text.endswith(_INCOMPLETE):
                shown += self._taken(text)
        return shown

    def flush(self) -> str:
        """The rest, at the end of the answer."""
        return self._taken(self._pending())

    def _pending(self) -> str:
        before = self._decode(self._tokens[self._start : self._read])
        return self._decode(self._tokens[self._start :])[len(before) :]

    def _taken(self, text: str) -> str:
        self._start, self._read = self._read, len(self._tokens)
        return text


class StopStrings:
    """Finds the first of several strings in a text that comes in pieces, and holds back what may begin one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.is_found = False

    def feed(self, text: str) -> str:
        """What may be shown; of the piece in which a string is found, the text before it."""
        if self.is_found:
            return ""
        self._held += text
        places = [place for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if places:
            self.is_found = True
            shown, self._held = self._held[: min(places)], ""
            return shown
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown, self._held = self._held[: len(self._held) - keep], self._held[len(self._held) - keep :]
        return shown

    def flush(self) -> str:
        """What was held back, at the end of the text."""
        shown, self._held = self._held, ""
        return shown


def _overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` may be the beginning of `stop`."""
    return next((num for num in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:num])), 0)


class ToolCalls:
    """Takes calls of tools out of an answer, written as <tool_call>{"name", "arguments"}</tool_call>.

    What does not have that form stays text.
    """

    def __init__(self) -> None:
        self._held = ""

    def feed(self, text: str) -> tuple[str, list[tuple[str, str]]]:
        """What is text, and the calls that are complete: each a name, and its arguments as JSON."""
        self._held += text
        shown = ""
        calls: list[tuple[str, str]] = []
        while True:
            before, mark, inside = self._held.partition(_CALL_BEGINS)
            if not mark:
                keep = len(before) - _overlap(before, _CALL_BEGINS)
                self._held = before[keep:]
                return shown + before[:keep], calls
            body, mark, rest = inside.partition(_CALL_ENDS)
            shown += before
            if not mark:
                self._held = _CALL_BEGINS + inside
                return shown, calls
            call = _call_of(body)
            if call is None:
                shown += f"{_CALL_BEGINS}{body}{_CALL_ENDS}"
            else:
                calls.append(call)
            self._held = rest

    def flush(self) -> str:
        """What was held back, at the end of the answer."""
        shown, self._held = self._held, ""
        return shown


def _call_of(body: str) -> tuple[str, str] | None:
    try:
        call: Any = msgspec.json.decode(body)
        name, arguments = call["name"], call.get("arguments", {})
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    if not isinstance(name, str):
        return None
    return name, arguments if isinstance(arguments, str) else msgspec.json.encode(arguments).decode()
