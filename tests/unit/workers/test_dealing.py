"""Who gets which prompts: by the lengths that were seen, longest first."""

from __future__ import annotations

from slipstream.engine.requests import GroupRequest, group_requests
from slipstream.types import FinishReason, Prompt, Rollout, RolloutGroup
from slipstream.workers.dealing import SeenLengths, deal


def prompt(name: str, length: int = 4) -> Prompt:
    return Prompt(id=name, text="", token_ids=(1,) * length, answer="")


def group(prompt: Prompt, *lengths: int) -> RolloutGroup:
    return RolloutGroup(
        prompt=prompt,
        rollouts=tuple(
            Rollout(
                prompt_id=prompt.id,
                token_ids=(7,) * length,
                rollout_logprobs=(0.0,) * length,
                finish_reason=FinishReason.STOP,
                policy_version=0,
                draft_version=None,
            )
            for length in lengths
        ),
    )


def seen(**lengths: int) -> SeenLengths:
    history = SeenLengths()
    history.note(group(prompt(name), length) for name, length in lengths.items())
    return history


def names(requests: tuple[GroupRequest, ...]) -> str:
    return "".join(request.prompt.id for request in requests)


def test_before_anything_was_seen_all_are_expected_to_be_equal() -> None:
    assert SeenLengths().expected(prompt("a")) == SeenLengths().expected(prompt("b", length=90)) == 1.0


def test_a_prompt_takes_what_it_took_last() -> None:
    history = SeenLengths()
    history.note([group(prompt("a"), 10, 30)])
    assert history.expected(prompt("a")) == 20.0
    history.note([group(prompt("a"), 100)])
    assert history.expected(prompt("a")) == 100.0


def test_an_unseen_prompt_takes_the_mean_of_its_kind_or_of_all() -> None:
    history = SeenLengths()
    # Kinds are 0-7 and 16-23 prompt tokens; the newest length has a quarter of the weight.
    history.note([group(prompt("a", 4), 8), group(prompt("b", 5), 16), group(prompt("c", 16), 42)])
    assert history.expected(prompt("new", 7)) == 8 + (16 - 8) / 4 == 10.0
    assert history.expected(prompt("new", 23)) == 42.0
    assert history.expected(prompt("new", 8)) == 10 + (42 - 10) / 4 == 18.0


def test_the_longest_goes_first_to_the_engine_with_the_least_to_do() -> None:
    requests = group_requests([prompt(name) for name in "abcde"], group_size=2, seed=0)
    dealt = deal(requests, seen(a=10, b=50, c=20, d=40, e=25), num_engines=2, num_slots=None)
    # 50 | 40, then 25 beside the 40, 20 beside the 50, and 10 beside the 65 of d and e, which is less than 70.
    assert [names(share) for share in dealt.shares] == ["bc", "dea"]
    assert dealt.queue == ()


def test_unknown_lengths_are_dealt_in_turn() -> None:
    requests = group_requests([prompt(name) for name in "abcdef"], group_size=1, seed=0)
    dealt = deal(requests, SeenLengths(), num_engines=3, num_slots=None)
    assert [names(share) for share in dealt.shares] == ["ad", "be", "cf"]


def test_what_has_no_room_waits_longest_first() -> None:
    requests = group_requests([prompt(name) for name in "abcdef"], group_size=2, seed=0)
    dealt = deal(requests, seen(a=1, b=2, c=3, d=4, e=5, f=6), num_engines=2, num_slots=5)
    # Five slots hold two groups of two: f and c, e and d.
    assert [names(share) for share in dealt.shares] == ["fc", "ed"]
    assert names(dealt.queue) == "ba"
    assert deal(requests, seen(a=1, b=2, c=3, d=4, e=5, f=6), num_engines=2, num_slots=4) == dealt


def test_a_group_larger_than_an_engine_is_dealt_to_one_of_its_own() -> None:
    requests = group_requests([prompt(name) for name in "abc"], group_size=8, seed=0)
    dealt = deal(requests, SeenLengths(), num_engines=2, num_slots=5)
    assert [names(share) for share in dealt.shares] == ["a", "b"]
    assert names(dealt.queue) == "c"


def test_with_fewer_prompts_than_engines_some_get_none() -> None:
    dealt = deal(group_requests([prompt("a")], group_size=8, seed=0), SeenLengths(), num_engines=3, num_slots=8)
    assert [names(share) for share in dealt.shares] == ["a", "", ""]
