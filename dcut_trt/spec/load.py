"""The traffic of a step, as far as what is learnt under it holds for other steps."""

from __future__ import annotations

from typing import NamedTuple


class Load(NamedTuple):
    """batch: live requests.  sampled: whether most of them are sampled, so that fewer of their drafts are accepted."""

    batch: int
    sampled: bool = False

    @property
    def kind(self) -> tuple[int, bool]:
        """What is learnt of one load holds for its kind: sizes from one power of two to the next."""
        return self.batch.bit_length(), self.sampled
