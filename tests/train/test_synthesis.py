"""Text that a target writes: prompts behind the template's opening, and the target's own answers to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from dcut_engines.build_options import InvalidOption
from dcut_engines.train.corpus import Corpus, read_corpus
from dcut_engines.train.synthesis import SynthesisOptions, chat_frame, read_lines, synthesise
from dcut_trt.backends.scripted import Script, scripted_engine

SCRIPT = Script(258, 256, 30.0, seed=0)


def written(folder: Path, **options: object) -> list[Corpus]:
    engine = scripted_engine("plain", max_len=160, script=SCRIPT)
    said: list[tuple[int, int]] = []
    wanted = SynthesisOptions(tokens=600, response_tokens=40, live=6, **options)  # type: ignore[arg-type]
    files = synthesise(engine, wanted, folder, lambda done, total: said.append((done, total)))
    assert said[-1] == (600, 600)
    assert not engine.has_work
    return [read_corpus(file, 258) for file in files]


def test_every_response_is_what_the_target_answers_greedily(tmp_path: Path) -> None:
    opening, closing = chat_frame(scripted_engine("plain").tokenizer)
    corpora = written(tmp_path)
    assert sum(corpus.response_tokens for corpus in corpora) >= 600
    for corpus in corpora:
        for index in range(len(corpus)):
            tokens, begin = corpus.sequence(index).tolist(), int(corpus.response_start[index])
            assert tuple(tokens[: len(opening)]) == opening
            assert tuple(tokens[begin - len(closing) : begin]) == closing
            for place in range(begin, len(tokens)):
                assert tokens[place] == SCRIPT.next_token(tokens[:place])
            assert tokens[-1] == 256 or len(tokens) - begin == 40 or len(tokens) == 160


def test_prompts_differ_and_some_begin_with_the_seeds(tmp_path: Path) -> None:
    [corpus] = written(tmp_path, seeds=("Tell me",))
    texts = [bytes(token for token in corpus.sequence(index).tolist() if token < 256) for index in range(len(corpus))]
    assert len(set(texts)) == len(texts)
    assert len(texts) >= 4


def test_the_same_seed_writes_the_same_text(tmp_path: Path) -> None:
    first, again, other = (
        written(tmp_path / name, seed=seed)[0].sha256 for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert first == again != other


def test_seeds_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n \n")
    for path, message in ((tmp_path / "none", "cannot be read"), (tmp_path / "empty", "at least one line")):
        with pytest.raises(InvalidOption, match=f"--prompts .*{message}"):
            read_lines("--prompts", path)
    (tmp_path / "words").write_text("How do I\n\nWrite\n")
    assert read_lines("--prompts", tmp_path / "words") == ("How do I", "Write")


def test_given_prompts_are_answered_each_once(tmp_path: Path) -> None:
    engine = scripted_engine("plain", max_len=160, script=Script(258, 256, 1e9, seed=0))  # never ends by itself
    prompts = tuple(f"question {number}" for number in range(9))
    options = SynthesisOptions(tokens=10_000, response_tokens=20, live=4, prompts=prompts)
    [file] = synthesise(engine, options, tmp_path, lambda *_: None)
    corpus = read_corpus(file, 258)
    begins = zip(range(len(corpus)), corpus.response_start.tolist(), strict=True)
    asked = sorted(engine.tokenizer.decode(corpus.sequence(index)[:begin].tolist()) for index, begin in begins)
    assert asked == [engine.tokenizer.render_chat([{"role": "user", "content": prompt}]) for prompt in prompts]


def test_a_prompt_longer_than_the_context_is_refused(tmp_path: Path) -> None:
    options = SynthesisOptions(tokens=10, prompts=("x" * 200,))
    with pytest.raises(InvalidOption, match=r"--prompts x+: 2\d\d tokens do not fit in --max-len 160"):
        synthesise(scripted_engine("plain", max_len=160), options, tmp_path, lambda *_: None)


def test_a_context_too_short_for_a_prompt_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidOption, match="--max-len 24"):
        synthesise(scripted_engine("plain", max_len=24), SynthesisOptions(tokens=5), tmp_path, lambda *_: None)
