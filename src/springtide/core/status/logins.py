"""Signing browsers in, as the API answers."""

from __future__ import annotations

import msgspec


class NewLogin(msgspec.Struct, frozen=True, kw_only=True):
    """A code for `/login?code=`. It works once, within `expires_in_s` seconds."""

    code: str
    expires_in_s: float


class SignedOut(msgspec.Struct, frozen=True, kw_only=True):
    """How many browsers were signed out."""

    num_sessions: int
