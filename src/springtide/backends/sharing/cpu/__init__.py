"""Shares of CPU slots: control groups, signals, the guard."""
