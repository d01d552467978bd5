"""Folders as a client has sent them: contents and their list, in a platform's directory of contents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from springtide.core.workload import JobFolder
from springtide.storage.folders.contents import ContentDirectory
from springtide.storage.folders.tree import FolderFile, FolderTree, encode_tree


def sent_tree(contents: ContentDirectory, files: Mapping[str, bytes], folders: Iterable[str] = ()) -> FolderTree:
    """Keep the contents of a folder and its list; the list."""
    listed = []
    for path, data in sorted(files.items()):
        sha256 = hashlib.sha256(data).hexdigest()
        contents.put(sha256, data)
        listed.append(FolderFile(path, sha256, len(data)))
    tree = FolderTree(tuple(listed), tuple(folders))
    contents.put(*encode_tree(tree))
    return tree


def folder_of_tree(tree: FolderTree, path: str, directory: str = "") -> JobFolder:
    """What a job says of such a folder."""
    return JobFolder(sha256=encode_tree(tree)[0], path=path, directory=directory, origin="/projects/mine")
