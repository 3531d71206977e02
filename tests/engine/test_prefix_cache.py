"""The tree of prefixes finds what a list of all kept tokens would, and gives up the right end first."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.engine.pages import PagePool
from headrace.engine.prefix_cache import PrefixCache
from headrace.engine.sequence import Sequence

CONTEXT = 1024


class World:
    """A pool and a cache; what a page holds is recorded as the tokens up to each position."""

    def __init__(self, num_pages: int = 64, max_pages: int | None = None) -> None:
        self.pool = PagePool(num_pages, self.copy)
        self.cache = PrefixCache(self.pool, max_pages)
        self.memory: list[list[tuple[int, ...] | None]] = [[None] * 64 for _ in range(num_pages)]

    def copy(self, source: int, target: int) -> None:
        self.memory[target] = list(self.memory[source])

    def read(self, sequence: Sequence, tokens: list[int]) -> None:
        sequence.reserve(len(tokens))
        begin = len(sequence)
        sequence.commit(tokens)
        table = sequence.page_table()
        for at in range(begin, len(sequence)):
            self.memory[table[at // 64]][at % 64] = sequence.tokens[: at + 1]

    def run(self, prompt: list[int], answer: list[int], salt: bytes = b"") -> int:
        """One request; how much of its prompt was reused."""
        sequence = Sequence(self.pool, CONTEXT, salt)
        reused = self.cache.adopt(sequence, prompt[:-1])
        self.check(sequence)
        self.read(sequence, prompt[reused:] + answer)
        self.check(sequence)
        self.cache.keep(sequence, len(prompt))
        sequence.release()
        return reused

    def check(self, sequence: Sequence) -> None:
        table = sequence.page_table()
        for at in range(len(sequence)):
            assert self.memory[table[at // 64]][at % 64] == sequence.tokens[: at + 1]


def common(a: list[int], b: list[int]) -> int:
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


def test_conversations_that_alternate_are_all_reused() -> None:
    world = World()
    a, b = list(range(300)), [*range(100), *range(500, 600)]
    assert world.run(a, [1, 2]) == 0
    assert world.run(b, [3]) == 100
    assert world.run([*a, 1, 2, 7], [8]) == 302
    assert world.run([*b, 3, 4], [5]) == 201
    assert world.run(a, [1, 2]) == 299
    assert world.run([*a, 1, 2, 7, 8, 9], [8]) == 304


def test_a_prefix_is_held_once() -> None:
    world = World()
    for index in range(20):
        world.run([*range(128), 1000 + index], [])
    assert world.cache.num_tokens == 128 + 20
    assert world.cache.num_pages == world.pool.num_used == 2 + 20


def test_a_tail_that_grows_replaces_its_partly_filled_page() -> None:
    world = World()
    tokens: list[int] = []
    for turn in range(30):
        tokens += [turn, *range(10)]
        assert world.run(tokens, []) == max(0, len(tokens) - 11)
    assert world.cache.num_pages == -(-len(tokens) // 64)


def test_an_exact_repeat_and_one_token() -> None:
    world = World()
    assert [world.run([5], []), world.run([5], []), world.run([5, 6], [])] == [0, 0, 1]
    assert world.run([5, 6], []) == 1
    assert world.cache.num_tokens == 2


def test_salts_share_nothing() -> None:
    world = World()
    tokens = list(range(100))
    world.run(tokens, [])
    assert world.run(tokens, [], b"adapter") == 0
    assert [world.run(tokens, []), world.run(tokens, [], b"adapter")] == [99, 99]
    world.cache.clear()
    assert [world.cache.num_pages, world.pool.num_used, world.cache.num_tokens] == [0, 0, 0]
    assert world.run(tokens, []) == 0


def test_the_least_recently_used_end_goes_first() -> None:
    world = World(num_pages=8)
    a, b = list(range(200)), list(range(1000, 1200))
    world.run(a, []), world.run(b, [])
    live = Sequence(world.pool, CONTEXT)
    world.read(live, list(range(2000, 2128)))  # needs two of eight pages
    assert world.cache.longest(a) == 128
    assert world.cache.longest(b) == 200
    assert world.cache.num_pages == 6


def test_common_and_marked_heads_outlive_conversations() -> None:
    world = World(num_pages=16)
    head, system = list(range(128)), list(range(500, 628))
    world.run([*head, 1, 1], []), world.run([*head, 2, 2], [])
    world.run([*system, 3], [])
    world.cache.mark(system)
    late = list(range(1000, 1600))
    world.run(late, [])  # takes ten pages, all of them later than the heads
    assert (world.cache.longest(head), world.cache.longest(system)) == (128, 128)
    live = Sequence(world.pool, CONTEXT)
    world.read(live, list(range(2000, 2000 + 64 * 12)))
    assert (world.cache.longest(head), world.cache.longest(system)) == (128, 128)
    assert world.cache.longest(late) == 0
    live.release()


def test_a_reply_in_other_tokens_makes_no_head() -> None:
    """A conversation that goes on from a reply that was spelled otherwise is one conversation, not two."""
    world = World(num_pages=10)
    talk = list(range(100))
    world.run(talk, [1, 2, 3, 4])
    world.run([*talk, 1, 2, 9, 9], [5])
    other = list(range(500, 700))
    world.run(other, [])
    live = Sequence(world.pool, CONTEXT)
    world.read(live, list(range(2000, 2000 + 64 * 6)))
    assert (world.cache.longest(talk), world.cache.longest(other)) == (0, 200)


def test_a_bound_on_its_pages() -> None:
    world = World(max_pages=3)
    world.run(list(range(1000)), [])
    assert (world.cache.num_pages, world.pool.num_used) == (3, 3)
    assert world.cache.longest(list(range(1000))) == 192


TOKENS = st.lists(st.integers(0, 2), max_size=12).map(
    lambda parts: [t for t in parts for _ in range(11)]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(TOKENS, TOKENS, st.sampled_from([b"", b"x"])), max_size=12))
def test_it_finds_the_longest_of_all_that_was_left(
    requests: list[tuple[list[int], list[int], bytes]],
) -> None:
    world = World(num_pages=200)
    left: list[tuple[bytes, list[int]]] = []
    for prompt, answer, salt in requests:
        prompt = [*prompt, 0]
        wanted = max((common(prompt[:-1], t) for s, t in left if s == salt), default=0)
        assert world.run(prompt, answer, salt) == wanted
        left.append((salt, prompt + answer))
    assert world.pool.num_used == world.cache.num_pages
    world.cache.clear()
    assert world.pool.num_used == 0


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_interleaving_in_a_small_pool_holds_what_it_says(data: st.DataObject) -> None:
    """Forks, rewinds, requests and marks; the cache gives way; every position is that of its own tokens."""
    world = World(num_pages=7)
    live: list[Sequence] = []
    for _ in range(data.draw(st.integers(1, 14))):
        act = data.draw(
            st.sampled_from(["request", "new", "grow", "fork", "rewind", "end", "mark"])
        )
        tokens = data.draw(TOKENS)
        if act in ("request", "mark", "new") or not live:
            if act == "mark":
                world.cache.mark(tokens)
            elif world.pool.num_used - world.cache.num_pages < 3 and len(live) < 2:
                if act == "new":
                    live.append(Sequence(world.pool, 128))
                    world.cache.adopt(live[-1], tokens[:60])
                else:
                    world.run([*tokens[:120], 1], tokens[:60])
            continue
        sequence = data.draw(st.sampled_from(live))
        if act == "grow":
            world.read(sequence, tokens[: min(60, sequence.room)])
        elif act == "fork" and len(live) < 2:
            live.append(sequence.fork(data.draw(st.integers(0, len(sequence)))))
        elif act == "rewind":
            sequence.rewind(data.draw(st.integers(0, len(sequence))))
        elif act == "end":
            world.cache.keep(sequence)
            sequence.release()
            live.remove(sequence)
        for one in live:
            world.check(one)
    _check_counts(world, live)


def _check_counts(world: World, live: list[Sequence]) -> None:
    held = Counter(int(page) for sequence in live for page in sequence.page_table())
    for page, count in world.cache._held.items():
        held[page] += count
    assert world.pool.num_used == len(held)
    assert all(world.pool.owners(page) == count for page, count in held.items())
