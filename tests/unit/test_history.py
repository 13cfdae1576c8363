"""The store of earlier answers: bounded, forgotten by age, and apart by salt and adapter."""

import tracemalloc

import pytest

from sequoia_vllm.engine.core import history
from sequoia_vllm.engine.core.history import MOST_TOKENS, History, key_of

A, B = key_of("a", None), key_of("b", None)


def test_the_latest_answer_comes_first_and_each_is_kept_once():
    kept = History()
    kept.add(A, [7, 7, 7])  # too short
    assert (kept.tokens(A), kept.size) == ([], 0)
    for answer in ([1, 2, 3, 4], [5, 6, 7, 8, 9], [1, 2, 3, 4, 5], [1, 2, 3, 4]):
        kept.add(A, answer)
    size = kept.size
    assert kept.tokens(A) == [1, 2, 3, 4, 1, 2, 3, 4, 5, 5, 6, 7, 8, 9]
    kept.add(A, [1, 2, 3, 4, 5])
    assert kept.tokens(A) == [1, 2, 3, 4, 5, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert (kept.tokens(B), kept.size) == ([], size)


def test_a_key_keeps_its_latest_answers_and_the_beginning_of_a_long_one():
    kept = History()
    for number in range(9):
        kept.add(A, [number] * 1_000)
    assert kept.tokens(A) == [number for number in range(8, 0, -1) for _ in range(1_000)]
    kept.add(A, [2**31 - 1] * MOST_TOKENS + [0])
    assert kept.tokens(A) == [2**31 - 1] * MOST_TOKENS


def test_all_keys_share_the_memory_and_the_one_unused_for_longest_goes_first(monkeypatch):
    kept, keys = History(), [A, B, b"c", b"d"]
    kept.add(A, [1] * 100)
    monkeypatch.setattr(history, "MOST_BYTES", 3 * kept.size)
    for key in keys[1:]:
        assert kept.tokens(A)  # it is used
        kept.add(key, [2] * 100)
    assert [len(kept.tokens(key)) for key in keys] == [100, 0, 100, 100]
    kept.add(b"e", [4] * 900)
    assert [len(kept.tokens(key)) for key in (*keys, b"e")] == [0, 0, 0, 0, 900]


@pytest.mark.parametrize(("keys", "answers"), [(3_000, 1), (1, 2_000), (40, 40)])
def test_its_size_is_at_least_what_python_takes(keys, answers):
    tracemalloc.start()
    kept = History()
    for key in range(keys):
        for number in range(answers):
            kept.add(key_of(f"{key}" * 99, None), [number, key, 1, 2])
    taken, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 0.3 * kept.size < taken < kept.size


def test_an_unused_key_is_forgotten_after_an_hour():
    now = [100.0]
    kept = History(lambda: now[0])
    kept.add(A, [1, 2, 3, 4])
    kept.add(B, [5, 6, 7, 8])
    now[0] += 3_599
    assert kept.tokens(A) == [1, 2, 3, 4]
    now[0] += 1
    assert (kept.tokens(B), kept.tokens(A)) == ([], [1, 2, 3, 4])
    now[0] += 3_600
    kept.add(B, [1])  # whatever comes next
    assert (kept.size, kept.tokens(A)) == (0, [])


def test_keys_are_of_one_salt_and_adapter():
    names = None, "", "a", "None", "a', 'b", "\udc80", "a" * 10**6
    keys = {key_of(salt, adapter) for salt in names for adapter in names}
    assert (len(keys), {len(key) for key in keys}) == (len(names) ** 2, {32})
