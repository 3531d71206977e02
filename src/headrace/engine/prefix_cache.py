"""Prefixes that no sequence runs on any more, kept for prompts that begin with them.

A tree over token ids: a node holds a span of tokens and the pages that hold their keys and values, children go on
from its end. Reuse is exact at every token, so a node may be entered and cut anywhere. Nothing is copied here: a
sequence that adopts a prefix shares its pages.

Owns references to pages, never their memory. Bounded by the pool: sequences come first, and take what they lack
from the end of the least recently used leaf; heads that several prefixes go on from, or that were marked, last.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from headrace.engine.pages import PAGE_TOKENS, PagePool, pages_for
from headrace.engine.sequence import Sequence

Ids = NDArray[np.int32]


@dataclass(eq=False)
class _Node:
    """Tokens [start, end) of every sequence below; pages[i] holds page start // 64 + i of all of them.

    A page that begins before `start` holds the positions of the nodes above as well: for every page of a prefix,
    the deepest node's is complete.
    """

    start: int
    tokens: Ids
    pages: list[int]
    parent: _Node | None
    reply: int  # where the last tokens that were generated begin; the end where there are none
    used: int = 0  # when, by the cache's clock
    shared: bool = False  # a head that others go on from
    children: dict[int, _Node] = field(default_factory=dict)

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def first_page(self) -> int:
        return self.start // PAGE_TOKENS


@dataclass(frozen=True)
class _Match:
    """How far the tree goes along with some tokens: `length` of them, the last inside or at the end of `node`."""

    node: _Node
    length: int
    pages: list[int]


@dataclass(frozen=True)
class Private:
    """How a generation is kept that others must not see: in memory alone, under a key of its own.

    public_tokens: so many at its beginning are kept for others as well, where reuse is True.
    """

    key: bytes  # that is no salt
    public_tokens: int
    reuse: bool


class PrefixCache:
    """Prefixes by their tokens, and by the salt of the sequences that left them."""

    def __init__(self, pool: PagePool, max_pages: int | None = None) -> None:
        """max_pages: most pages that prefixes may hold; None: all that no sequence needs."""
        self._pool = pool
        self._max_pages = max_pages
        self._roots: dict[bytes, _Node] = {}
        self._held: Counter[int] = Counter()  # page to how many nodes hold it
        self._clock = 0
        pool.keeper = self

    @property
    def num_pages(self) -> int:
        """Different pages that prefixes hold."""
        return len(self._held)

    @property
    def num_tokens(self) -> int:
        """Tokens of all prefixes, a common head counted once."""
        return sum(len(node.tokens) for node in self._nodes())

    def held_elsewhere(self, mine: Mapping[int, int]) -> int:
        """Pages that somebody else than prefixes owns, and those who hold each so many times as `mine` says."""
        pages = range(self._pool.num_pages)
        return sum(self._pool.owners(p) > self._held[p] + mine.get(p, 0) for p in pages)

    def longest(self, tokens: Tokens[int], salt: bytes = b"") -> int:
        """How many of `tokens` would be reused."""
        return self._match(np.asarray(tokens, np.int32), salt).length

    def adopt(self, sequence: Sequence, tokens: Tokens[int], key: bytes | None = None) -> int:
        """Begin an empty sequence with the longest prefix of `tokens` that is held; its length.

        key: of what was kept under it; by default the sequence's salt.
        """
        key = sequence.salt if key is None else key
        match = self._match(np.asarray(tokens, np.int32), key)
        if match.length:
            sequence.adopt(tokens[: match.length], match.pages)
            self._touch(match.node)
        return match.length

    def keep(
        self, sequence: Sequence, prompt_tokens: int | None = None, key: bytes | None = None
    ) -> None:
        """Hold everything that a sequence holds; the sequence stays its owner's.

        prompt_tokens: the rest was generated. What parts from it there makes no head of what is in front: a
        conversation whose reply is sent back in other tokens goes on from itself alone. key: see `adopt`.
        """
        key = sequence.salt if key is None else key
        tokens = np.array(sequence.tokens, np.int32)
        pages = sequence.page_table().tolist()[: pages_for(len(tokens))]
        self._roots.setdefault(key, _root())
        match = self._match(tokens, key)
        node, reply = match.node, min(prompt_tokens or len(tokens), len(tokens))
        if match.length < len(tokens):
            node = self._extend(match, tokens, pages, reply)
        self._touch(node)
        while self._max_pages is not None and self.num_pages > self._max_pages:
            self._drop_page(self._oldest())

    def mark(self, tokens: Tokens[int], salt: bytes = b"") -> None:
        """What is held of `tokens` is a head that others will go on from: it outlives what is none."""
        match = self._match(np.asarray(tokens, np.int32), salt)
        if match.length:
            self._cut(match.node, match.length).shared = True

    def drop(self, key: bytes) -> None:
        """Hold nothing of a key."""
        for node in _below(self._roots.pop(key, _root())):
            self._give(node.pages)

    def clear(self) -> None:
        """Hold nothing."""
        for node in list(self._nodes()):
            self._give(node.pages)
        self._roots.clear()

    def give_up(self, count: int) -> None:
        """Free `count` pages, the least recently used first; nothing where there are not that many."""
        alone = sum(self._pool.owners(page) == held for page, held in self._held.items())
        if alone < count:
            return
        wanted = self._pool.num_free + count
        while self._pool.num_free < wanted:
            leaf = self._oldest()
            while leaf.pages and self._pool.num_free < wanted:
                self._drop_page(leaf)

    def forget(self, page: int) -> None:
        """Hold `page` no longer, nor what lies behind it."""
        for node in [n for n in self._nodes() if page in n.pages]:
            while page in node.pages:
                self._drop_page(_leaf_below(node))

    def _match(self, tokens: Ids, salt: bytes) -> _Match:
        node = self._roots.get(salt) or _root()
        length = 0
        pages: list[int] = []
        while length < len(tokens):
            child = node.children.get(int(tokens[length]))
            if child is None:
                break
            common = common_length(child.tokens, tokens[length:])
            length += common
            pages[child.first_page :] = child.pages
            node = child
            if common < len(child.tokens):
                break
        return _Match(node, length, pages[: pages_for(length)])

    def _extend(self, match: _Match, tokens: Ids, pages: list[int], reply: int) -> _Node:
        """Hold the tokens after a match as well; the node that holds the last of them.

        An interruption loses pages at worst: a node is never left with tokens that its pages do not hold.
        """
        at = match.length
        node = self._cut(match.node, at)
        own = pages[at // PAGE_TOKENS :]
        self._hold(own)
        if node.parent is not None and not node.children and not node.shared:
            kept = at // PAGE_TOKENS - node.first_page
            old = node.pages[kept:]  # a partly filled last page: the new one holds more
            node.pages[kept:] = own
            node.tokens = np.concatenate([node.tokens, tokens[at:]])
            node.reply = reply
            self._give(old)
            return node
        node.shared |= at <= node.reply
        child = _Node(at, tokens[at:].copy(), own, node, reply)
        node.children[int(tokens[at])] = child
        return child

    def _cut(self, node: _Node, at: int) -> _Node:
        """The node that ends at `at`, which is inside of `node` or its end: an upper part of it."""
        if at == node.end or node.parent is None:
            return node
        size, page = at - node.start, at // PAGE_TOKENS - node.first_page
        if at % PAGE_TOKENS:
            self._hold(node.pages[page : page + 1])  # both parts have positions in it
        above = node.pages[: pages_for(at) - node.first_page]
        upper = _Node(
            node.start, node.tokens[:size], above, node.parent, min(node.reply, at), node.used
        )
        lower = replace(
            node, start=at, tokens=node.tokens[size:], pages=node.pages[page:], parent=upper
        )
        upper.children[int(lower.tokens[0])] = lower
        for child in lower.children.values():
            child.parent = lower
        node.parent.children[int(upper.tokens[0])] = upper
        return upper

    def _drop_page(self, leaf: _Node) -> None:
        """Forget the positions of a leaf that its last page holds, and the leaf where none are left."""
        end = (leaf.first_page + len(leaf.pages) - 1) * PAGE_TOKENS
        if end > leaf.start:
            leaf.tokens = leaf.tokens[: end - leaf.start]
        else:
            assert leaf.parent is not None
            del leaf.parent.children[int(leaf.tokens[0])]
        self._give([leaf.pages.pop()])

    def _hold(self, pages: list[int]) -> None:
        self._pool.share(pages)
        self._held.update(pages)

    def _give(self, pages: list[int]) -> None:
        self._pool.give(pages)
        for page in pages:
            self._held[page] -= 1
            if not self._held[page]:
                del self._held[page]

    def _touch(self, node: _Node | None) -> None:
        self._clock += 1
        while node is not None:
            node.used = self._clock
            node = node.parent

    def _oldest(self) -> _Node:
        """The leaf to give up next."""
        leaves = (node for node in self._nodes() if not node.children)
        return min(leaves, key=lambda leaf: (leaf.shared, leaf.used))

    def _nodes(self) -> Iterator[_Node]:
        """Every node but the roots."""
        for root in self._roots.values():
            yield from _below(root)


def _root() -> _Node:
    return _Node(0, np.zeros(0, np.int32), [], None, 0)


def _below(node: _Node) -> Iterator[_Node]:
    found = list(node.children.values())
    while found:
        node = found.pop()
        yield node
        found += node.children.values()


def common_length(ours: Ids, theirs: Ids) -> int:
    """How many tokens two spans have in common at their beginning."""
    size = min(len(ours), len(theirs))
    different = ours[:size] != theirs[:size]
    return int(different.argmax()) if different.any() else size


def _leaf_below(node: _Node) -> _Node:
    while node.children:
        node = next(iter(node.children.values()))
    return node
