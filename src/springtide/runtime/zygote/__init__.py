"""Warm processes that workers are forked from: one with torch, and a few with the libraries of programs beside it."""
