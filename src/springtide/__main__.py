"""`python -m springtide` is the `springtide` command."""

from __future__ import annotations

from springtide.cli.main import main

if __name__ == "__main__":
    main()
