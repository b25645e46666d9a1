"""commit() ends a request at the first EOS, stop id, stop string or limit, wherever in a block that is."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted_runs import EOS, LETTERS, TOKENIZER

from dcut_trt.detokenizer import Detokenizer
from dcut_trt.sequence import Sequence
from dcut_trt.types import Commit, FinishReason, Request, RequestTimes

PROMPT = (65, 66, 67)
SPOKEN = [*TOKENIZER.encode(LETTERS + "日"), EOS]


def live(max_tokens: int = 100, max_len: int = 256, **options: object) -> Sequence:
    request = Request("r", PROMPT, max_tokens, **options)  # type: ignore[arg-type]
    return Sequence(request, 0, max_len, (EOS,), Detokenizer(TOKENIZER.decode))


def ids(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def speak(sequence: Sequence, tokens: list[int], cuts: list[int]) -> list[Commit]:
    """Commit tokens in blocks that end at the cuts, as long as the sequence has not ended."""
    ends = sorted({0, len(tokens), *(cut % (len(tokens) + 1) for cut in cuts)})
    commits: list[Commit] = []
    for start, end in pairwise(ends):
        commits.append(sequence.commit(tokens[start:end], drafted=7, verified=end - start - 1))
        if commits[-1].finish is not None:
            break
    return commits


def one_by_one(request: Request, tokens: list[int], max_len: int) -> tuple[list[int], str, FinishReason | None]:
    """The definition: after every token decode everything and look for an end."""
    for count in range(1, len(tokens) + 1):
        head = tokens[:count]
        if head[-1] in request.stop_token_ids or (head[-1] == EOS and not request.ignore_eos):
            return head, TOKENIZER.decode(head[:-1]), FinishReason.STOP
        text = TOKENIZER.decode(head)
        found = [text.index(stop) for stop in request.stop if stop in text]
        if found:
            return head, text[: min(found)], FinishReason.STOP
        if count == min(request.max_tokens, max_len - len(PROMPT)):
            return head, text, FinishReason.LENGTH
    return tokens, TOKENIZER.decode(tokens), None


@settings(max_examples=300)
@given(
    st.lists(st.sampled_from(SPOKEN[:-1]) | st.sampled_from(SPOKEN), min_size=1, max_size=30),
    st.lists(st.integers(0, 30), max_size=10),
    st.builds(
        Request,
        request_id=st.just("r"),
        prompt_ids=st.just(PROMPT),
        max_tokens=st.integers(1, 40),
        stop=st.lists(st.text(LETTERS, min_size=1, max_size=4), max_size=3).map(tuple),
        stop_token_ids=st.sampled_from([(), (), (SPOKEN[0],)]),
        ignore_eos=st.booleans(),
    ),
    st.integers(4, 40),
)
def test_any_blocks_give_what_one_token_at_a_time_gives(
    tokens: list[int], cuts: list[int], request_: Request, max_len: int
) -> None:
    sequence = Sequence(request_, 0, max_len, (EOS,), Detokenizer(TOKENIZER.decode))
    commits = speak(sequence, tokens, cuts)
    emitted, text, finish = one_by_one(request_, tokens, max_len)

    assert [token for commit in commits for token in commit.tokens] == emitted
    assert [commit.finish for commit in commits] == [None] * (len(commits) - 1) + [finish]
    streamed = "".join(commit.text for commit in commits)
    assert streamed == text if finish is not None else text.startswith(streamed)
    assert sequence.tokens == [*PROMPT, *emitted]
    usage = sequence.usage
    assert (usage.prompt_tokens, usage.output_tokens, usage.steps) == (len(PROMPT), len(emitted), len(commits))
    assert usage.drafted == 7 * len(commits)
    assert usage.verified == sum(commit.verified for commit in commits)
    assert usage.accepted == sum(commit.accepted for commit in commits) <= usage.verified
    for commit in commits:
        assert commit.accepted <= min(commit.verified, len(commit.tokens))


@pytest.mark.parametrize("offset", range(8))
def test_eos_at_every_offset_of_a_block_ends_there(offset: int) -> None:
    block = ids("abcdefgh")
    block[offset] = EOS
    commit = live().commit(block, drafted=7, verified=7)
    assert commit.tokens == tuple(block[: offset + 1])
    assert commit.text == "abcdefgh"[:offset]
    assert commit.finish is FinishReason.STOP
    assert commit.accepted == min(offset + 1, 7)


@pytest.mark.parametrize("offset", range(8))
def test_the_limit_of_tokens_at_every_offset_of_a_block(offset: int) -> None:
    for sequence in (live(max_tokens=offset + 1), live(max_len=len(PROMPT) + offset + 1)):
        commit = sequence.commit(ids("abcdefgh"), drafted=7, verified=7)
        assert (commit.text, commit.finish) == ("abcdefgh"[: offset + 1], FinishReason.LENGTH)
        assert sequence.usage.output_tokens == len(commit.tokens) == offset + 1


@pytest.mark.parametrize("stop", ["c", "cd", "cde"])
def test_a_stop_string_cuts_text_ids_and_usage_at_one_boundary(stop: str) -> None:
    sequence = live(stop=(stop,))
    commit = sequence.commit(ids("abcdefgh"), drafted=7, verified=7)
    end = len("ab" + stop)
    assert (commit.text, commit.tokens) == ("ab", tuple(ids("abcdefgh"[:end])))
    assert sequence.usage.output_tokens == end
    assert commit.accepted == end


def test_a_stop_string_over_three_blocks_is_never_shown() -> None:
    sequence = live(stop=("STOP",))
    shown = [sequence.commit(ids(part)).text for part in ("x S", "TO", "Py")]
    assert shown == ["x ", "", ""]


def test_what_only_looked_like_a_stop_string_is_shown_in_the_end() -> None:
    sequence = live(stop=("STOP",))
    assert [sequence.commit(ids(part)).text for part in ("x STO", "x", "ST")] == ["x ", "STOx", ""]
    end = sequence.commit([EOS])
    assert (end.text, end.finish) == ("ST", FinishReason.STOP)


def test_the_earliest_stop_in_the_text_wins() -> None:
    commit = live(stop=("a", "is", ",")).commit(ids(" The user is a"))
    assert commit.text == " The user "


def test_a_stop_id_ends_and_is_not_part_of_the_text() -> None:
    commit = live(stop_token_ids=(ids("c")[0],)).commit(ids("abcd"))
    assert (commit.tokens, commit.text, commit.finish) == (tuple(ids("abc")), "ab", FinishReason.STOP)


def test_ignore_eos_goes_on_and_hides_the_special_token() -> None:
    sequence = live(ignore_eos=True)
    commit = sequence.commit([*ids("a"), EOS, *ids("b")])
    assert (len(commit.tokens), commit.text, commit.finish) == (3, "ab", None)


def test_an_end_inside_a_character_still_shows_all_of_the_output() -> None:
    tokens = ids("a日")[:3]
    commit = live(max_tokens=3).commit(tokens)
    assert commit.text == TOKENIZER.decode(tokens)


def test_features_wait_until_they_are_taken_and_count_as_context_then() -> None:
    sequence = live()
    rows = np.arange(8, dtype=np.float32).reshape(4, 2)
    sequence.computed(3, rows[:3])
    sequence.computed(1, rows[3:])
    assert (sequence.kv_len, sequence.context_len, sequence.pending_rows) == (4, 0, 4)
    np.testing.assert_array_equal(np.concatenate(sequence.take_features()), rows)
    assert (sequence.context_len, sequence.pending_rows) == (4, 0)


def test_a_hole_in_the_drafters_context_is_noticed() -> None:
    sequence = live()
    sequence.computed(2, None)
    sequence.computed(1, np.zeros((1, 2), np.float32))
    with pytest.raises(AssertionError, match="hole"):
        sequence.take_features()


def test_a_stop_string_in_what_was_held_back_ends_the_request_as_a_stop() -> None:
    request = Request("r", PROMPT, 2, stop=("b",))
    sequence = Sequence(request, 0, 256, (EOS,), Detokenizer(TOKENIZER.decode, byte_ids=ids("b")))
    commit = sequence.commit(ids("ab"))
    assert (commit.text, commit.finish, commit.matched) == ("a", FinishReason.STOP, "b")


def test_min_tokens_hides_the_text_before_it_from_stop_strings() -> None:
    sequence = live(min_tokens=2, stop=("ab",))
    commits = [sequence.commit([token]) for token in ids("abab")]
    assert [commit.text for commit in commits] == ["a", "b", "", ""]
    assert [commit.matched for commit in commits] == [None, None, None, "ab"]


def test_the_times_of_a_request_are_those_of_its_commits() -> None:
    sequence = live()
    sequence.submitted, sequence.admitted = 1.0, 2.0
    assert sequence.times(2.5) == RequestTimes(1.0, 2.0, None, 2.5)
    for now in (3.0, 4.0):
        sequence.commit(ids("a"), now=now)
    assert sequence.times(5.0) == RequestTimes(1.0, 2.0, 3.0, 5.0)
