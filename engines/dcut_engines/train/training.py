"""The training loop: AdamW under a cosine, a curve of held-out acceptance, and checkpoints that resume exactly."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from dcut_engines.build_options import InvalidOption
from dcut_engines.train.blocks import Example, make_batch
from dcut_engines.train.drafting import TorchDrafter
from dcut_engines.train.evaluate import measure_acceptance
from dcut_engines.train.examples import Pool, Schedule
from dcut_trt.errors import UnknownModel

CHECKPOINT = "checkpoint.pt"
WARM_UP = 0.02  # share of the training over which the learning rate rises
BETAS, GRADIENT_NORM = (0.9, 0.95), 1.0
MICRO_BLOCKS = 128  # blocks of one forward; more fall out of a CPU's caches
CURVE_ANCHORS = 16  # of each held-out sequence
CURVE_SEQUENCES = 64


@dataclass(frozen=True, slots=True)
class Point:
    """One row of the curve. loss: mean since the row before.  tau: as in Acceptance, on part of what is held out."""

    step: int
    minutes: float
    blocks: int
    learning_rate: float
    loss: float | None
    tau: float


@dataclass(frozen=True, slots=True)
class Pace:
    """When a training ends and how its learning rate falls. The first limit that is reached ends it."""

    learning_rate: float
    steps: int | None
    minutes: float | None

    def done(self, step: int, minutes: float) -> float:
        """How much of the training is over, in [0, 1]."""
        shares = [step / self.steps if self.steps else 0.0, minutes / self.minutes if self.minutes else 0.0]
        return min(1.0, max(shares))

    def rate(self, done: float) -> float:
        risen = min(1.0, (done + 1e-3) / WARM_UP)
        return self.learning_rate * risen * 0.5 * (1.0 + math.cos(math.pi * done))


@dataclass(slots=True)
class Training:
    """A run that can be stopped between any two steps and continued as if it had not been.

    facts: everything that shapes the run; a checkpoint of other facts is refused.
    publish: writes the drafter and its curve wherever the caller wants them, at every evaluation.
    """

    drafter: TorchDrafter
    schedule: Schedule
    held_out: Pool
    pace: Pace
    gamma: float
    evaluate_every: int
    folder: Path
    facts: Mapping[str, Any]
    publish: Callable[[Sequence[Point]], None]
    step: int = 0
    minutes: float = 0.0
    curve: list[Point] = field(default_factory=list)
    optimizer: torch.optim.AdamW = field(init=False)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(
            list(self.drafter.trained.values()), lr=self.pace.learning_rate, betas=BETAS, weight_decay=0.0, fused=True
        )

    def run(self) -> None:
        """Train to the end of the pace."""
        begun, before = time.monotonic(), self.minutes
        losses: list[float] = []
        if not self.curve:
            self._evaluate(None)
        while (done := self.pace.done(self.step, self.minutes)) < 1.0:
            losses.append(self._train_step(self.pace.rate(done)))
            self.step += 1
            self.minutes = before + (time.monotonic() - begun) / 60
            over = self.pace.done(self.step, self.minutes) >= 1.0
            if over or self.step % self.evaluate_every == 0:
                self._evaluate(sum(losses) / len(losses))
                self.minutes = before + (time.monotonic() - begun) / 60
                losses.clear()

    def _train_step(self, learning_rate: float) -> float:
        examples = self.schedule.examples(self.step)
        micro = max(1, MICRO_BLOCKS // self.schedule.anchors)
        parts = [examples[first : first + micro] for first in range(0, len(examples), micro)]
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate
        self.optimizer.zero_grad()
        loss = sum(self._backward(part, len(part) / len(examples)) for part in parts)
        torch.nn.utils.clip_grad_norm_(list(self.drafter.trained.values()), GRADIENT_NORM)
        self.optimizer.step()
        return loss

    def _backward(self, examples: Sequence[Example], share: float) -> float:
        batch = make_batch(examples, self.drafter.config, self.drafter.ids.device)
        loss = self.drafter.loss(batch, self.gamma) * share
        loss.backward()
        return float(loss.detach())

    def _evaluate(self, loss: float | None) -> None:
        sample = Pool(self.held_out.corpora, self.held_out.caches, self.held_out.members[:CURVE_SEQUENCES])
        tau = measure_acceptance(self.drafter, sample, CURVE_ANCHORS).tau
        blocks = self.step * self.schedule.sequences * self.schedule.anchors
        rate = self.pace.rate(self.pace.done(self.step, self.minutes))
        self.curve.append(Point(self.step, round(self.minutes, 3), blocks, rate, loss, tau))
        self.save()
        self.publish(self.curve)

    def save(self) -> None:
        """Write the checkpoint; one that is there stays until the new one is complete."""
        state = {
            "facts": dict(self.facts),
            "step": self.step,
            "minutes": self.minutes,
            "curve": [[getattr(point, name) for name in Point.__dataclass_fields__] for point in self.curve],
            "weights": {name: tensor.detach() for name, tensor in self.drafter.trained.items()},
            "optimizer": self.optimizer.state_dict(),
        }
        scratch = self.folder / f".{CHECKPOINT}"
        torch.save(state, scratch)
        scratch.replace(self.folder / CHECKPOINT)

    def resume(self) -> None:
        """Continue from the folder's checkpoint. Raises UnknownModel without one, InvalidOption for another run's."""
        path = self.folder / CHECKPOINT
        if not path.is_file():
            raise UnknownModel(f"{path} is missing: there is nothing to resume")
        state = torch.load(path, map_location=self.drafter.ids.device, weights_only=True)
        for name, value in self.facts.items():
            before = state["facts"].get(name)
            if before != value:
                raise InvalidOption("--resume", self.folder, f"{name} was {before}, now it is {value}")
        self.step, self.minutes = state["step"], state["minutes"]
        self.curve = [Point(*values) for values in state["curve"]]
        with torch.no_grad():
            for name, tensor in self.drafter.trained.items():
                tensor.copy_(state["weights"][name])
        self.optimizer.load_state_dict(state["optimizer"])
