"""The traffic of a step, as far as what is learnt under it holds for other steps."""

from __future__ import annotations

from typing import NamedTuple

Kind = tuple[int, bool]  # bit length of the batch, and whether most of it is sampled


class Load(NamedTuple):
    """batch: live requests.  sampled: whether most of them are sampled, so that fewer of their drafts are accepted."""

    batch: int
    sampled: bool = False

    @property
    def kind(self) -> Kind:
        """What is learnt of one load holds for its kind: sizes from one power of two to the next."""
        return self.batch.bit_length(), self.sampled
