"""What holds for every test of the studies."""

from __future__ import annotations

from kits.collecting import pytest_ignore_collect as pytest_ignore_collect
