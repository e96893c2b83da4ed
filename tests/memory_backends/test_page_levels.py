"""Page levels against a plain dictionary, and that they cost nothing while all is full."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from memory_backends.page_levels import PageLevels

BASE = 12
PAGES = 20

page_sets = st.lists(st.integers(1, PAGES - 1), min_size=1, max_size=6, unique=True)


class Model:
    """Pages in use and their levels, as they must be."""

    def __init__(self) -> None:
        self.levels = PageLevels(PAGES, "cpu")
        self.used: dict[int, int] = {}

    def compute(self, pages: list[int], level: int) -> None:
        self.levels.computed(torch.tensor(pages, dtype=torch.int32), level)
        self.used.update(dict.fromkeys(pages, level))

    def move(self, pages: list[int]) -> None:
        free = [p for p in range(1, PAGES) if p not in self.used]
        pairs = list(zip([p for p in pages if p in self.used], free, strict=False))
        if pairs:
            source, target = (torch.tensor(ids) for ids in zip(*pairs, strict=True))
            self.levels.move(target, source)
            for old, new in pairs:
                self.used[new] = self.used.pop(old)

    def free(self, pages: list[int]) -> None:
        for page in pages:
            self.used.pop(page, None)

    def settle(self) -> None:
        if any(page > BASE for page in self.used):
            return  # not at level 0
        free = [p for p in range(1, BASE + 1) if p not in self.used]
        self.levels.settle(torch.tensor(free, dtype=torch.int64), BASE)

    def check(self) -> None:
        pages = list(self.used)
        lowered = self.levels.lowered(torch.tensor(pages, dtype=torch.int64)).tolist()
        assert lowered == [self.used[page] > 0 for page in pages]
        if not self.levels.any:
            assert not self.levels._levels.any()


ACTIONS = st.one_of(
    st.tuples(st.just("compute"), page_sets, st.sampled_from([0, 0, 1, 3])),
    st.tuples(st.sampled_from(["move", "free", "settle"]), page_sets, st.just(0)),
)


@settings(max_examples=200, deadline=None)
@given(st.lists(ACTIONS, max_size=40))
def test_a_page_in_use_keeps_the_level_it_was_computed_at(
    actions: list[tuple[str, list[int], int]],
) -> None:
    model = Model()
    for action, pages, level in actions:
        if action == "compute":
            model.compute(pages, level)
        elif action == "settle":
            model.settle()
        else:
            getattr(model, action)(pages)
        model.check()


def test_nothing_is_written_while_everything_is_full() -> None:
    levels = PageLevels(PAGES, "cpu")
    version = levels._levels._version
    levels.computed(torch.arange(1, 5), 0)
    levels.move(torch.tensor([7]), torch.tensor([2]))
    levels.clear()
    assert levels._levels._version == version
    assert not levels.any


def test_settling_ends_the_watch_once_no_page_in_use_is_lowered() -> None:
    levels = PageLevels(PAGES, "cpu")
    levels.computed(torch.tensor([3, 4]), 2)
    in_use = torch.tensor([p for p in range(1, BASE + 1) if p != 3])
    for _ in range(4):
        levels.settle(in_use, BASE)
    assert levels.any  # page 3 is still in use
    everything = torch.arange(1, BASE + 1)
    levels.settle(everything, BASE)
    levels.settle(everything, BASE)
    assert not levels.any


def test_an_answer_that_is_out_of_date_is_not_believed() -> None:
    levels = PageLevels(PAGES, "cpu")
    levels.computed(torch.tensor([3]), 1)
    levels.settle(torch.arange(1, BASE + 1), BASE)
    levels.computed(torch.tensor([3]), 1)
    levels.settle(torch.tensor([], dtype=torch.int64), BASE)
    assert levels.any
    assert levels.lowered(torch.tensor([3])).tolist() == [True]
