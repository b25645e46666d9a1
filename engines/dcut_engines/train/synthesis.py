"""Training text from the target itself: it invents what users may ask, and answers, on our own engine."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dcut_engines.build_options import InvalidOption
from dcut_engines.train.corpus import make_corpus
from dcut_trt.engine import Engine
from dcut_trt.tokenizer import Tokenizer
from dcut_trt.types import Request, SamplingParams, StepEvent

MARK = "\u2402"  # a symbol that no template writes
SHORTEST_PROMPT = 3  # tokens
PROMPT_TOKENS = (24, 40, 64, 96)
SEQUENCES_PER_FILE = 400

Progress = Callable[[int, int], None]
"""Takes response tokens written and wanted."""


@dataclass(frozen=True, slots=True)
class SynthesisOptions:
    """tokens: response tokens to write.  response_tokens: the most of one response.  live: requests at once.

    temperature: of responses; 0 is greedy, and what a greedy server will verify against.
    seeds: opening words that begin two in three prompts.  prompts: whole prompts to answer, each once, instead of
    inventing any; the text ends with them.
    """

    tokens: int
    response_tokens: int = 256
    temperature: float = 0.0
    live: int = 32
    seeds: tuple[str, ...] = ()
    prompts: tuple[str, ...] = ()
    seed: int = 0


@dataclass(slots=True)
class _Writing:
    """One prompt under way, then its response. opening: length of the template's opening; begin: of the response."""

    ids: list[int]
    opening: int
    begin: int | None = None


def chat_frame(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids before and after a user's words in the model's chat template. Raises InvalidOption without a template."""
    if tokenizer.chat_template is None:
        raise InvalidOption("--tokens", "(given)", "the target has no chat template to ask itself with; give --data")
    before, _, after = tokenizer.render_chat([{"role": "user", "content": MARK}]).partition(MARK)
    encoded = (tuple(tokenizer.encode(part, add_special_tokens=False)) for part in (before, after))
    opening, closing = encoded
    return opening, closing


def synthesise(engine: Engine, options: SynthesisOptions, folder: Path, progress: Progress) -> list[Path]:
    """Let the engine's target write options.tokens response tokens, or answer all prompts; .npz files in `folder`.

    Prompts are sampled at temperature 1 behind the template's opening of a user's turn, as Magpie does
    (arXiv 2406.08464). The last file is complete when this returns.
    """
    folder.mkdir(parents=True, exist_ok=True)
    writer = _Writer(engine, options, *chat_frame(engine.tokenizer))
    files: list[Path] = []
    done: list[_Writing] = []
    written = 0
    while written < options.tokens and writer.start():
        for finished in writer.step():
            done.append(finished)
            written += len(finished.ids) - (finished.begin or 0)
            progress(min(written, options.tokens), options.tokens)
        if len(done) >= SEQUENCES_PER_FILE:
            files.append(_save(folder, options.seed, len(files), done))
            done = []
    writer.stop()
    return files + ([_save(folder, options.seed, len(files), done)] if done else [])


def _save(folder: Path, seed: int, number: int, done: Sequence[_Writing]) -> Path:
    path = folder / f"part-{seed}-{number:04d}.npz"
    make_corpus([one.ids for one in done], [one.begin or 0 for one in done]).save(path)
    return path


class _Writer:
    """Keeps `live` requests on the engine: prompts being invented, and responses to those that are complete."""

    def __init__(
        self, engine: Engine, options: SynthesisOptions, opening: tuple[int, ...], closing: tuple[int, ...]
    ) -> None:
        self.engine = engine
        self.options = options
        self.opening = opening
        self.closing = closing
        self.random = random.Random(options.seed)
        self.live: dict[str, _Writing] = {}
        self.count = 0
        self.prompts = list(reversed(options.prompts))
        # what is left for a user's words, when the response is to get as much again
        self.longest = (engine.limits.max_len - len(opening) - len(closing)) // 2
        if self.longest < SHORTEST_PROMPT + 1:
            raise InvalidOption("--max-len", engine.limits.max_len, "too short for the chat template and a prompt")

    def start(self) -> bool:
        """Fill the engine with requests; whether there is anything left to do."""
        while len(self.live) < self.options.live:
            if not self.options.prompts:
                self._invent()
            elif self.prompts:
                self._ask(self.prompts.pop())
            else:
                break
        return bool(self.live)

    def step(self) -> list[_Writing]:
        """One step of the engine; the sequences that are complete with it. Raises what a request ends with."""
        finished = []
        for event in self.engine.step():
            if event.error is not None:
                raise event.error
            self.live[event.request_id].ids.extend(event.tokens)
            if event.final:
                one = self.live.pop(event.request_id)
                if one.begin is not None:
                    finished.append(one)
                else:
                    self._answer(one, event)
        return [one for one in finished if len(one.ids) - (one.begin or 0) > 1]

    def stop(self) -> None:
        for request_id in self.live:
            self.engine.cancel(request_id)
        while self.engine.has_work:
            self.engine.step()

    def _ask(self, text: str) -> None:
        tokenizer, room = self.engine.tokenizer, self.engine.limits.max_len
        ids = tokenizer.encode(tokenizer.render_chat([{"role": "user", "content": text}]), add_special_tokens=False)
        if len(ids) + 2 > room:
            raise InvalidOption("--prompts", text[:40], f"{len(ids)} tokens do not fit in --max-len {room}")
        self._respond(_Writing(ids, 0, len(ids)))

    def _invent(self) -> None:
        seeds = self.options.seeds
        words = self.random.choice(seeds) if seeds and self.random.random() < 0.65 else ""
        begun = self.engine.tokenizer.encode(words, add_special_tokens=False)[: self.longest - 1] if words else []
        sampling = SamplingParams(temperature=1.0, top_p=0.95, seed=self.random.getrandbits(60))
        wanted = min(self.random.choice(PROMPT_TOKENS), self.longest - len(begun))
        self._submit(_Writing([*self.opening, *begun], len(self.opening)), wanted, sampling)

    def _answer(self, one: _Writing, event: StepEvent) -> None:
        ended = one.ids[-1] in self.engine.tokenizer.eos_ids
        asked = one.ids[:-1] if ended else one.ids
        if len(asked) - one.opening < SHORTEST_PROMPT:
            return
        ids = [*asked, *self.closing]
        self._respond(_Writing(ids, one.opening, len(ids)))

    def _respond(self, one: _Writing) -> None:
        sampling = SamplingParams(temperature=self.options.temperature, seed=self.random.getrandbits(60))
        self._submit(one, self.options.response_tokens, sampling)

    def _submit(self, one: _Writing, max_tokens: int, sampling: SamplingParams) -> None:
        self.count += 1
        request_id = f"{self.count}"
        self.live[request_id] = one
        self.engine.submit(Request(request_id, tuple(one.ids), max_tokens, sampling))


def read_lines(option: str, path: Path) -> tuple[str, ...]:
    """The lines of a file that hold anything. Raises InvalidOption naming the option when there are none."""
    try:
        lines: Sequence[str] = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidOption(option, path, f"cannot be read: {error}") from error
    filled = tuple(line for line in lines if line.strip())
    if not filled:
        raise InvalidOption(option, path, "at least one line of text is needed")
    return filled
