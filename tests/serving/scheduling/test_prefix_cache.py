from __future__ import annotations

import struct

import pytest
import xxhash

from serving.scheduling.prefix_cache import PrefixCache


def hash_8_bits(data: bytes) -> bytes:
    return xxhash.xxh3_128_digest(data)[:1]


def hash_0_bits(data: bytes) -> bytes:
    return b"\0"


def make_chain(cache, tokens, salt=b""):
    chain = cache.new_chain(salt)
    cache.extend(chain, tokens)
    return chain


def matched_pages(cache, tokens, salt=b"", max_pages=1000):
    return [page.page_id for page in cache.match_prefix(make_chain(cache, tokens, salt), max_pages)]


def test_the_longest_published_prefix_of_full_pages_is_found():
    cache = PrefixCache(page_size=4)
    tokens = list(range(12))
    cache.publish(make_chain(cache, tokens), [7, 8, 9], 2)
    assert matched_pages(cache, tokens) == [7, 8]
    assert matched_pages(cache, tokens[:8]) == [7, 8]
    assert matched_pages(cache, tokens, max_pages=1) == [7]
    assert matched_pages(cache, [*tokens[:4], 99, *tokens[5:]]) == [7]
    assert matched_pages(cache, [99, *tokens[1:]]) == []


def test_the_same_page_after_another_prefix_is_another_page():
    cache = PrefixCache(page_size=2)
    cache.publish(make_chain(cache, [1, 2, 5, 6]), [10, 11], 2)
    assert matched_pages(cache, [5, 6]) == []
    assert matched_pages(cache, [3, 4, 5, 6]) == []


def test_chains_of_different_salts_share_nothing_even_where_all_hashes_collide():
    for hash_fn in (xxhash.xxh3_128_digest, hash_0_bits):
        cache = PrefixCache(page_size=2, hash_fn=hash_fn)
        cache.publish(make_chain(cache, [1, 2], b"tenant a"), [10], 1)
        assert matched_pages(cache, [1, 2], b"tenant b") == []
        assert matched_pages(cache, [1, 2], b"tenant a") == [10]


def test_a_collision_of_the_parent_does_not_hand_over_a_page_with_equal_tokens():
    child = struct.pack("2i", 5, 6)
    cache = PrefixCache(page_size=2, hash_fn=lambda data: b"child" if data.endswith(child) else b"parent")
    first, second = make_chain(cache, [1, 2, 5, 6]), make_chain(cache, [3, 4, 5, 6])
    assert first.page_hashes == second.page_hashes
    cache.publish(first, [10, 11], 2)
    assert matched_pages(cache, [3, 4, 5, 6]) == []
    cache.publish(second, [20, 21], 2)
    assert matched_pages(cache, [1, 2, 5, 6]) == [10, 11]
    assert matched_pages(cache, [3, 4, 5, 6]) == []
    cache.remove(11)
    cache.publish(make_chain(cache, [3, 4, 5, 6]), [20, 21], 2)
    assert matched_pages(cache, [1, 2, 5, 6]) == [10]


def test_a_page_published_twice_stays_and_the_second_chain_goes_on_from_it():
    cache = PrefixCache(page_size=2)
    cache.publish(make_chain(cache, [1, 2]), [10], 1)
    second = make_chain(cache, [1, 2, 3, 4])
    cache.publish(second, [20, 21], 2)
    assert matched_pages(cache, [1, 2, 3, 4]) == [10, 21]
    assert 20 not in cache


def test_a_page_whose_parent_left_the_cache_is_not_published_or_found():
    cache = PrefixCache(page_size=2)
    chain = make_chain(cache, [1, 2, 3, 4, 5, 6])
    cache.publish(chain, [10, 11, 12], 2)
    cache.remove(10)
    assert matched_pages(cache, [1, 2, 3, 4]) == []
    cache.remove(11)
    cache.publish(chain, [10, 11, 12], 3)
    assert len(cache) == 0
    # A new page with the first page's tokens is another parent: orphans stay unreachable.
    cache.publish(make_chain(cache, [1, 2]), [30], 1)
    assert matched_pages(cache, [1, 2, 3, 4]) == [30]


@pytest.mark.parametrize("hash_fn", [hash_0_bits, hash_8_bits, xxhash.xxh3_128_digest])
def test_a_hit_always_holds_the_very_tokens_asked_for_whatever_the_hash(rng, hash_fn):
    cache = PrefixCache(page_size=2, hash_fn=hash_fn)
    content: dict[int, tuple[bytes, list[int]]] = {}  # page id -> salt and all tokens up to the page's end
    num_hits = 0
    for next_page in range(0, 12000, 4):
        tokens = [rng.randrange(3) for _ in range(8)]
        salt = rng.choice([b"", b"tenant"])
        chain = make_chain(cache, tokens, salt)
        match = cache.match_prefix(chain, 4)
        for index, page in enumerate(match):
            assert content[page.page_id] == (salt, tokens[: 2 * index + 2])
        num_hits += len(match)
        page_ids = [page.page_id for page in match]
        for index in range(len(match), 4):
            page_ids.append(next_page + index)
            content[next_page + index] = (salt, tokens[: 2 * index + 2])
        chain.restart(match)
        cache.publish(chain, page_ids, 4)
        for _ in range(rng.randrange(4)):
            cache.remove(rng.randrange(next_page + 4))
        cache.check_integrity()
    print("hits", num_hits, "of", 12000)
    assert num_hits > 0
