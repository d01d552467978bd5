"""Folders that are submitted with jobs: their lists of files, their contents, and copies of them."""
