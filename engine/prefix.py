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
    _of_page: dict[int, _Node] = field(default_factory=dict)
    _clock: int = 0

    def __len__(self) -> int:
        return len(self._of_page)

    def match(self, tokens: np.ndarray, accepts: set[str]) -> tuple[list[int], list[str]]:
        """Pages and tags of the longest known prefix of `tokens` (int32 [n]), whole pages only."""
        path = self._walk(tokens, accepts)
        self._clock += 1
        for node in path:
            node.used = self._clock
        return [node.page for node in path], [node.tag for node in path]

    def publish(self, tokens: list[int], pages: list[int], tags: list[str]) -> list[int]:
        """Add the closed pages of a sequence; the page ids that were new (to be retained).

        Pages that are here already stand for all before them, so a long conversation's next turn costs its new pages.
        """
        self._clock += 1
        start = next((i + 1 for i in reversed(range(len(tags))) if pages[i] in self._of_page), 0)
        parent, added = self._of_page[pages[start - 1]] if start else None, []
        if parent is not None:
            parent.used = self._clock
        for key, page, tag in zip(_keys(tokens, start, len(tags)), pages[start:], tags[start:], strict=False):
            whole = (id(parent) if parent else 0, key)
            node = next((node for node in self._nodes.get(whole, []) if node.tag == tag), None)
            if node is None:
                node = self._of_page[page] = _Node(page, tag, parent, whole)
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
        for key, tag in zip(_keys(tokens, 0, len(tags)), tags, strict=True):
            nodes = self._nodes[id(parent) if parent else 0, key]
            parent = next(node for node in nodes if node.tag == tag)
            pages.append(parent.page)
        return pages

    def evict(self, count: int, references: np.ndarray) -> list[int]:
        """Forget up to `count` pages that only this index holds; their ids, for the caller to release."""
        leaves = [node for node in self._of_page.values() if not node.children]
        heap = [(node.used, node.page, node) for node in leaves if references[node.page] == 1]
        heapq.heapify(heap)
        evicted: list[int] = []
        while heap and len(evicted) < count:
            _, page, node = heapq.heappop(heap)
            self._forget(node)
            evicted.append(page)
            parent = node.parent
            if parent is not None:
                parent.used = max(parent.used, node.used)
            if parent is not None and not parent.children and references[parent.page] == 1:
                heapq.heappush(heap, (parent.used, parent.page, parent))
        return evicted

    def pages(self) -> list[int]:
        return list(self._of_page)

    def _walk(self, tokens: np.ndarray, accepts: set[str]) -> list[_Node]:
        path: list[_Node] = []
        parent = 0
        for key in _keys(tokens, 0, len(tokens) // PAGE):
            best = None
            for node in self._nodes.get((parent, key), ()):
                if node.tag == EXACT or (best is None and node.tag in accepts):
                    best = node
            if best is None:
                break
            path.append(best)
            parent = id(best)
        return path

    def _forget(self, node: _Node) -> None:
        del self._of_page[node.page]
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


def _keys(tokens: list[int] | np.ndarray, start: int, end: int) -> list[bytes]:
    """The tokens of pages [start, end), each page's as bytes."""
    data = np.asarray(tokens[start * PAGE : end * PAGE], dtype=np.int32).tobytes()
    size = 4 * PAGE
    return [data[i : i + size] for i in range(0, (end - start) * size, size)]
