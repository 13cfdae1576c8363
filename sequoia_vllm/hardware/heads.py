"""What a head has besides its layers: EAGLE-3, DFlash, DSpark, multi-token prediction (MTP)."""

from __future__ import annotations

from pydantic import Field

from sequoia_vllm.drafters import HeadKind
from sequoia_vllm.json_file import FileModel


class HeadShape(FileModel):
    """Matrices of a head that a model of its own has not.

    Of all but MTP layers a matrix takes the target's hidden states to the head's width,
    when what was committed is read (vLLM's ``fc``, which is on each device as a whole). The
    embedding is the target's.

    An EAGLE-3 head drafts level by level: its first layer's queries, keys and values are made
    of two vectors, the token's embedding and the parent's hidden state. A DFlash head drafts
    all levels in one pass over a block, a position for each level and one before them; so does
    a DSpark head, whose matrices for the tokens drafted meanwhile are not counted.
    An MTP layer drafts level by level: a matrix of its own makes one vector of the token's
    embedding and the parent's hidden state, in every pass. Its output matrix is the target's.
    """

    kind: HeadKind
    reads: int = Field(
        ge=0,
        description="Width of what it reads of the target for one token, the hidden states of "
        "some layers side by side; 0: one hidden state, as it is.",
    )
    output_vocab: int | None = Field(
        default=None,
        ge=1,
        description="Tokens of its own output matrix; none: it uses the target's.",
    )
    levels: int | None = Field(
        default=None, ge=1, description="Most levels that it drafts; none: any number."
    )

    @property
    def drafts_in_one_pass(self) -> bool:
        """Whether deeper trees need no more passes."""
        return self.kind in ("dflash", "dspark")
