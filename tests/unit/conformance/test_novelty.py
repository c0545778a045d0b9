"""Calls that join what was not joined yet come first."""

from __future__ import annotations

import itertools
import random

import pytest
import torch

from ditorch.conformance.novelty import Pairs, features, layout
from ditorch.conformance.variants import Variant


def test_a_layout_is_named_by_what_a_kernel_sees() -> None:
    image = torch.zeros(2, 3, 4, 5)
    assert layout(image) == "plain"
    assert layout(image.to(memory_format=torch.channels_last)) == "channels_last"
    assert layout(image.transpose(2, 3)) == "permuted"
    assert layout(image[..., ::2]) == "gaps"
    assert layout(image[1:]) == "offset"
    assert layout(image[:1].expand(4, 3, 4, 5)) == "expanded"
    assert layout(torch.zeros(3, 1).t()) == "plain"  # a dimension of one element has no stride


def test_features_tell_arguments_layouts_and_sizes() -> None:
    x = torch.zeros(2, 3, 8, 8)
    plain = features("float32", "plain", Variant((x, 2), {"padding": 0}))
    padded = features("float32", "plain", Variant((x, 2), {"padding": 1}))
    last = features("float32", "plain", Variant((x.to(memory_format=torch.channels_last), 2), {"padding": 0}))
    assert len({tuple(map(tuple, one)) for one in (plain, padded, last)}) == 3


@pytest.mark.parametrize("seed", range(3))
def test_the_newest_of_two_covers_pairs_sooner_than_chance(seed: int) -> None:
    names = "abcdef"

    def drawn(choose: random.Random) -> list[tuple[str, int]]:
        return [(name, choose.randrange(5)) for name in names]

    def covered(candidates: int) -> int:
        choose, pairs, seen = random.Random(seed), Pairs(), set()
        for _ in range(60):
            best = max((drawn(choose) for _ in range(candidates)), key=pairs.news)
            pairs.add(best, accepted=True)
            seen.update(itertools.combinations(best, 2))
        return len(seen)

    assert covered(2) > covered(1)


def test_what_was_refused_is_worth_less_than_what_is_new_and_more_than_what_was_done() -> None:
    pairs = Pairs()
    done, refused, new = ([("a", n), ("b", n)] for n in range(3))
    pairs.add(done, accepted=True)
    pairs.add(refused, accepted=False)
    pairs.add(done, accepted=False)
    assert pairs.news(done) < pairs.news(refused) < pairs.news(new)
