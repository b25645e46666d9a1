"""What a runtime must offer: two protocols, one for the target, one for the drafter."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from dcut_trt.stage_types import Draft, DraftInput, DraftTraits, Rows, Verified
from dcut_trt.types import IntArray


@dataclass(frozen=True, slots=True)
class Limits:
    """What the loaded engines can hold.

    max_batch: requests per step.  max_len: committed tokens per request.  draft_length: D.
    vocab_size: valid ids are 0 .. vocab_size - 1.  block_size, num_blocks: KV blocks, in tokens and in number.
    feature_size: F, width of a target feature row.  any_budget, short_blocks: as in DraftTraits.
    """

    max_batch: int
    max_len: int
    draft_length: int
    vocab_size: int
    block_size: int
    num_blocks: int
    feature_size: int
    any_budget: bool = False
    short_blocks: bool = False

    @property
    def traits(self) -> DraftTraits:
        """What a policy needs to know of this."""
        return DraftTraits(self.draft_length, self.any_budget, self.short_blocks)

    @property
    def shares_blocks(self) -> bool:
        """Whether requests can own a block together; where a block is a request's whole cache they cannot."""
        return self.block_size < self.max_len


class Target(Protocol):
    """The model whose output is served. Writes its own KV cache at the rows it is given."""

    limits: Limits

    @property
    def network_ms(self) -> float:
        """Milliseconds spent inside the runtime's own calls since the start; the rest of a step is host time."""

    def forward(self, rows: Rows, head_rows: IntArray, logit_rows: IntArray) -> Verified:
        """Run K packed rows; what it returns is valid until the next call.

        head_rows: [H] rows whose next token is wanted (all K in verification, the last row of a prompt in prefill).
        logit_rows: [S] indices into head_rows whose logits the sampler needs; empty when all are greedy.
        """

    def close(self) -> None: ...


class Drafter(Protocol):
    """The DFlash block drafter. Writes its own KV cache for the context features it is given."""

    @property
    def network_ms(self) -> float:
        """As in Target."""

    def propose(self, drafts: DraftInput) -> Draft:
        """Append the new context features, then draft D tokens, or drafts.depth, for every request in one pass.

        A backend that selects on its device follows drafts.offer and gives its plan along.
        """

    def close(self) -> None: ...
