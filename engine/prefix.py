"""Checkpoints: which token prefixes have all their pages in the host store, so that a later turn resumes from them.

A tree of closed pages. A page is found by its parent and its 64 tokens (the hash finds, the tokens decide), and only
if it was computed in a way that the request accepts: pages of an exact pass serve everybody, pages computed under a
window or a selection serve requests of the same settings. Eviction takes the least recently used page that nobody
uses and no other page hangs from: tail first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field

import numpy as np

from engine.config import PAGE

EXACT = "exact"


@dataclass
class _Node:
    page: int
    tag: str
    parent: _Node | None
    key: tuple[int, bytes]
    children: int = 0
    used: int = 0


@dataclass
class PrefixIndex:
    """Holds one reference to each page in it; the caller retains and releases."""

    _nodes: dict[tuple[int, bytes], list[_Node]] = field(default_factory=dict)
    _clock: int = 0

    def __len__(self) -> int:
        return sum(len(nodes) for nodes in self._nodes.values())

    def match(self, tokens: list[int], accepts: set[str]) -> tuple[list[int], list[str]]:
        """Pages and tags of the longest known prefix of `tokens`, whole pages only."""
        path = self._walk(tokens, accepts)
        self._clock += 1
        for node in path:
            node.used = self._clock
        return [node.page for node in path], [node.tag for node in path]

    def publish(self, tokens: list[int], pages: list[int], tags: list[str]) -> list[int]:
        """Add the closed pages of a sequence; the page ids that were new (to be retained)."""
        self._clock += 1
        parent, added = None, []
        for key, page, tag in zip(_keys(tokens, len(tags)), pages, tags, strict=False):
            whole = (id(parent) if parent else 0, key)
            node = next((node for node in self._nodes.get(whole, []) if node.tag == tag), None)
            if node is None:
                node = _Node(page, tag, parent, whole)
                self._nodes.setdefault(whole, []).append(node)
                if parent is not None:
                    parent.children += 1
                added.append(page)
            node.used = self._clock
            parent = node
        return added

    def standing(self, tokens: list[int], tags: list[str]) -> list[int]:
        """The pages that stand here for those of a sequence that was published: its own, or another's before it."""
        parent, pages = None, []
        for key, tag in zip(_keys(tokens, len(tags)), tags, strict=True):
            nodes = self._nodes[id(parent) if parent else 0, key]
            parent = next(node for node in nodes if node.tag == tag)
            pages.append(parent.page)
        return pages

    def evict(self, count: int, references: np.ndarray) -> list[int]:
        """Forget up to `count` pages that only this index holds; their ids, for the caller to release."""
        leaves = [node for nodes in self._nodes.values() for node in nodes if not node.children]
        heap = [(node.used, node.page, node) for node in leaves if references[node.page] == 1]
        heapq.heapify(heap)
        evicted: list[int] = []
        while heap and len(evicted) < count:
            _, page, node = heapq.heappop(heap)
            self._forget(node)
            evicted.append(page)
            parent = node.parent
            if parent is not None and not parent.children and references[parent.page] == 1:
                heapq.heappush(heap, (parent.used, parent.page, parent))
        return evicted

    def pages(self) -> list[int]:
        return [node.page for nodes in self._nodes.values() for node in nodes]

    def _walk(self, tokens: list[int], accepts: set[str]) -> list[_Node]:
        path: list[_Node] = []
        for key in _keys(tokens, len(tokens) // PAGE):
            nodes = self._nodes.get((id(path[-1]) if path else 0, key), [])
            usable = [node for node in nodes if node.tag == EXACT or node.tag in accepts]
            if not usable:
                break
            path.append(min(usable, key=lambda node: node.tag != EXACT))
        return path

    def _forget(self, node: _Node) -> None:
        self._nodes[node.key].remove(node)
        if not self._nodes[node.key]:
            del self._nodes[node.key]
        if node.parent is not None:
            node.parent.children -= 1


def shared_tokens(first: list[int], second: list[int]) -> int:
    """Tokens that both begin with, in whole pages."""
    low, high = 0, min(len(first), len(second)) // PAGE
    while low < high:
        middle = (low + high + 1) // 2
        if first[low * PAGE : middle * PAGE] == second[low * PAGE : middle * PAGE]:
            low = middle
        else:
            high = middle - 1
    return low * PAGE


def _keys(tokens: list[int], pages: int) -> list[bytes]:
    data = np.asarray(tokens[: pages * PAGE], dtype=np.int32).tobytes()
    return [data[i * 4 * PAGE : (i + 1) * 4 * PAGE] for i in range(pages)]
