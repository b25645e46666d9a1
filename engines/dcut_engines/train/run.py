"""A whole training, stage by stage: text, features, blocks, curve, checkpoint directory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dcut_engines.build_options import InvalidOption
from dcut_engines.checkpoint import TargetCheckpoint, load_target
from dcut_engines.model_config import Weights
from dcut_engines.sources import resolve_target
from dcut_engines.train.corpus import Corpus, cut, frequent_ids, held_out, read_corpus, response_counts
from dcut_engines.train.drafting import TorchDrafter, torch_drafter
from dcut_engines.train.evaluate import Acceptance, measure_acceptance
from dcut_engines.train.examples import Pool, Schedule
from dcut_engines.train.features import FeatureCache, TargetFeatures, cached_features, load_features
from dcut_engines.train.options import GAMMA, TrainOptions
from dcut_engines.train.output import write_card, write_curve, write_drafter
from dcut_engines.train.start import Start, start_from
from dcut_engines.train.training import CHECKPOINT, Pace, Point, Training

MEASURED_SEQUENCES = 200  # of what is held out, for the figures on the card
PRECISIONS = {"fp32": torch.float32, "bf16": torch.bfloat16}

Report = Callable[[str], None]
Synthesise = Callable[[Path], Sequence[Path]]
"""Takes the directory of a drafter that fits the target; returns .npz files that the target wrote."""


@dataclass(frozen=True, slots=True)
class Run:
    """What the stages share."""

    options: TrainOptions
    target: TargetCheckpoint
    start: Start
    draft_vocab: tuple[int, ...] | None
    device: torch.device
    report: Report

    @property
    def pin(self) -> dict[str, str]:
        return {"name": self.start.target_name, "tokenizer_sha256": self.target.tokenizer.vocabulary_sha256}

    @property
    def precision(self) -> torch.dtype:
        return PRECISIONS[self.options.precision]

    def drafter(self, weights: Weights) -> TorchDrafter:
        return torch_drafter(
            self.start.config,
            weights,
            self.target,
            self.draft_vocab,
            max_len=self.options.max_len,
            precision=self.precision,
            device=self.device,
        )

    def write(self, folder: Path, drafter: TorchDrafter) -> None:
        write_drafter(folder, drafter, self.draft_vocab, self.target.config.max_position, self.pin)


def train(options: TrainOptions, synthesise: Synthesise, report: Report) -> Acceptance:
    """Train as the options say; options.out is a DFlash checkpoint from the first evaluation on.

    synthesise is called when options.tokens asks for text. Returns the acceptance on what was held out.
    Raises InvalidOption, UnknownModel, UnsupportedModel or DrafterMismatch.
    """
    if not options.resume and any((options.out / name).exists() for name in (CHECKPOINT, "config.json")):
        raise InvalidOption("--out", options.out, "holds a drafter already; --resume continues its training")
    device = choose_device(options.device)
    torch.manual_seed(options.seed)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    target = load_target(resolve_target(options.target))
    start = start_from(options, target)
    fresh = Run(options, target, start, start.draft_vocab, device, report)
    corpora, seen = _texts(fresh, synthesise)
    run = Run(options, target, start, _draft_vocab(options, start, [*corpora, *seen]), device, report)
    pools = _pools(run, corpora, seen)
    return _train(run, *pools)


def choose_device(name: str) -> torch.device:
    """Raises InvalidOption for a GPU that torch does not see."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InvalidOption("--device", name, "torch sees no GPU here")
    return torch.device("cuda" if name != "cpu" and torch.cuda.is_available() else "cpu")


def _texts(run: Run, synthesise: Synthesise) -> tuple[list[Corpus], list[Corpus]]:
    """What is trained on and partly held out, and what was seen before."""
    options, folder = run.options, run.options.out / "data"
    files = list(options.data)
    if options.tokens:
        written = sorted(folder.glob("*.npz")) if options.resume else []
        if not written:
            run.write(options.out / "start", run.drafter(run.start.weights))
            written = list(synthesise(options.out / "start"))
        files += written
    vocab_size = run.target.config.vocab_size
    corpora, seen = (
        [cut(read_corpus(path, vocab_size), options.max_len) for path in of] for of in (files, options.seen)
    )
    run.report(
        f"{sum(len(corpus) for corpus in [*corpora, *seen]):,} sequences, "
        f"{sum(corpus.response_tokens for corpus in [*corpora, *seen]):,} response tokens"
    )
    return corpora, seen


def _draft_vocab(options: TrainOptions, start: Start, corpora: Sequence[Corpus]) -> tuple[int, ...] | None:
    vocab_size = start.config.vocab_size
    if options.draft_vocab is None:
        return start.draft_vocab
    if options.draft_vocab == 0:
        return None
    if options.draft_vocab > vocab_size:
        raise InvalidOption("--draft-vocab", options.draft_vocab, f"the vocabulary has {vocab_size} ids")
    return frequent_ids(response_counts(corpora, vocab_size), options.draft_vocab)


def _pools(run: Run, corpora: Sequence[Corpus], seen: Sequence[Corpus]) -> tuple[Pool, Pool]:
    """To train on, and held out."""
    caches = _features(run, [*corpora, *seen])
    trained: list[tuple[int, int]] = []
    kept: list[tuple[int, int]] = []
    for number, corpus in enumerate([*corpora, *seen]):
        out = held_out(corpus, run.options.held_out if number < len(corpora) else 0.0)
        trained += [(number, int(index)) for index in (~out).nonzero()[0]]
        kept += [(number, int(index)) for index in out.nonzero()[0]]
    if not trained or not kept:
        raise InvalidOption(
            "--held-out", run.options.held_out, f"{len(trained)} sequences to train on and {len(kept)} held out"
        )
    everything = (*corpora, *seen)
    return Pool(everything, caches, tuple(trained)), Pool(everything, caches, tuple(kept))


def _features(run: Run, corpora: Sequence[Corpus]) -> tuple[FeatureCache, ...]:
    options, config = run.options, run.start.config
    loaded: list[TargetFeatures] = []

    def load() -> TargetFeatures:
        if not loaded:
            layers, precision = config.target_layer_ids, run.precision
            loaded.append(
                load_features(run.target, layers, max_len=options.max_len, precision=precision, device=run.device)
            )
        return loaded[0]

    folder, layers = options.out / "features", config.target_layer_ids
    width, total = len(layers) * config.hidden_size, sum(len(corpus.tokens) for corpus in corpora)
    caches: list[FeatureCache] = []
    before, said = 0, 0

    def progress(done: int) -> None:
        nonlocal said
        if before + done - said >= total / 10:
            said = before + done
            run.report(f"target features of {said:,} / {total:,} tokens")

    for corpus in corpora:
        caches.append(cached_features(folder, run.target.sha256, corpus, load, layers, width, progress))
        before += len(corpus.tokens)
    run.report(f"target features of all {total:,} tokens")
    return tuple(caches)


def _train(run: Run, pool: Pool, kept: Pool) -> Acceptance:
    options = run.options
    drafter = run.drafter(run.start.weights)
    facts = _facts(run, pool, kept)

    def publish(curve: Sequence[Point]) -> None:
        run.write(options.out, drafter)
        write_curve(options.out, curve)
        run.report(_line(curve[-1]))

    training = Training(
        drafter=drafter,
        schedule=Schedule(pool, options.sequences, options.anchors, options.seed),
        held_out=kept,
        pace=Pace(options.learning_rate, options.steps, options.minutes),
        gamma=options.gamma or GAMMA.get(run.start.config.block_size, 7.0),
        evaluate_every=options.evaluate_every,
        folder=options.out,
        facts=facts,
        publish=publish,
    )
    if options.resume:
        training.resume()
    training.run()
    measured = _measure(run, drafter, kept)
    write_card(options.out, facts, measured, training.curve)
    return measured["trained"]


def _measure(run: Run, drafter: TorchDrafter, kept: Pool) -> dict[str, Acceptance]:
    """The trained drafter, and beside it the one that was continued, on the same blocks."""
    sample = Pool(kept.corpora, kept.caches, kept.members[:MEASURED_SEQUENCES])
    measured: dict[str, Acceptance] = {}
    if run.start.identity is not None:
        measured["before"] = measure_acceptance(run.drafter(run.start.weights), sample)
    return measured | {"trained": measure_acceptance(drafter, sample)}


def _facts(run: Run, pool: Pool, kept: Pool) -> dict[str, Any]:
    """What shapes a run: a checkpoint is resumed only where all of it is the same."""
    options, config = run.options, run.start.config
    return {
        "target": run.target.identity,
        "target sha256": run.target.sha256,
        "continued from": run.start.identity or "the target's last layers",
        "block": config.block_size,
        "layers": config.layers,
        "features from layers": ", ".join(map(str, config.target_layer_ids)),
        "attention in the block": "causal" if config.causal else "bidirectional",
        "draft vocabulary": config.vocab_size if run.draft_vocab is None else len(run.draft_vocab),
        "sequences trained on": len(pool),
        "sequences held out": len(kept),
        "response tokens trained on": pool.response_tokens,
        "data": " ".join(corpus.sha256[:12] for corpus in pool.corpora),
        "blocks of a step": f"{options.sequences} x {options.anchors}",
        "learning rate": options.learning_rate,
        "limit": f"{options.steps or '-'} steps, {options.minutes or '-'} minutes",
        "precision": options.precision,
        "seed": options.seed,
    }


def _line(point: Point) -> str:
    loss = "" if point.loss is None else f"  loss {point.loss:.3f}"
    return (
        f"step {point.step:5d}  {point.minutes:6.1f} min  {point.blocks:9,d} blocks{loss}  held-out tau {point.tau:.3f}"
    )
