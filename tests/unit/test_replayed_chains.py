"""Chains replayed along answers: `benchmarks.replayed_chains`."""

from benchmarks.replayed_chains import proposer, replayed

NGRAM = {
    "method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 2, "prompt_lookup_max": 4,
}  # fmt: skip


def test_steps_accept_drafts_until_the_first_wrong_one() -> None:
    drafts = {1: [5, 6, 9], 4: [], 5: [8]}
    asked = []

    def propose(request: int, prompt: list[int], answer: list[int]) -> list[int]:
        asked.append((request, prompt, answer))
        return drafts[len(answer)]

    steps = replayed(propose, [[1, 2]], [[4, 5, 6, 7, 3, 8, 2, 2]], lengths=[6])
    # Two drafts and the target's 7; then one token; then a draft and one more behind the end.
    assert steps == [[1, 3, 1, 2]]
    assert asked[1] == (0, [1, 2], [4, 5, 6, 7])


def test_ngram_drafts_are_vllms() -> None:
    propose = proposer(NGRAM)
    assert propose(0, [1, 2, 3, 4, 5, 9, 1], [2]) == [3, 4, 5]
    assert propose(0, [1, 2, 3, 4], [7]) == []
    assert replayed(propose, [[1, 2, 3, 4, 5, 9, 1]], [[2, 3, 4, 6, 8, 8]], lengths=[4]) == [[1, 3]]
