"""The decision of one step, as frozen values. The scheduler makes it, the model runner executes it.

Positions are absolute within a sequence. A `slot` is a row of the fixed-shape decode program; a request keeps
its slot from admission until it finishes or is preempted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from serving.request import Request, RequestContext
from serving.scheduling.swap import SwapIn, SwapOut

NULL_PAGE = 0  # what a page table names where it has none: never allocated, written or read as valid


@dataclass(frozen=True, kw_only=True)
class SlotReset:
    """Rewrite a slot's whole row on the device before the step: a request was just given this slot."""

    slot: int
    request: Request
    page_ids: tuple[int, ...]  # pages of the sequence in order, allocated so far
    is_decoding: bool = False  # K/V of all its tokens but the last is there, so the slot decodes from this step on


@dataclass(frozen=True, kw_only=True)
class SlotMove:
    """Carry a slot's whole row to another slot, which nobody uses, before the step."""

    source: int
    target: int


@dataclass(frozen=True, kw_only=True)
class PageCopy:
    """Write the first `num_tokens` tokens of page `source` to page `target` before the step, and zeros after them."""

    source: int
    target: int
    num_tokens: int


class PageAppend(NamedTuple):
    """`page_table[slot, page_index] = page_id` before the step."""

    slot: int
    page_index: int
    page_id: int


@dataclass(frozen=True, kw_only=True)
class PrefillChunk:
    """Compute positions [start, start + len(token_ids)) of a request. Where `samples`, the chunk ends the known
    tokens: its last token's logits give the next token and the slot decodes from the next step on."""

    slot: int
    request: Request
    start: int
    token_ids: tuple[int, ...]
    samples: bool


type PreemptionReason = Literal["pages", "priority"]


@dataclass(frozen=True, kw_only=True)
class Preemption:
    """A running sequence gave its pages back and waits again."""

    context: RequestContext  # of the one that gave way
    by: RequestContext  # of the one that needed them
    reason: PreemptionReason  # pages: one that runs needed a page more; priority: one of a better class came
    num_tokens: int  # computed, that are to be computed again, less prefix hits


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """What a step may take at most, below the config's own sizes. With nothing to decode and nothing in flight,
    `max_prefill_tokens` does not bind: a prompt alone slows nobody down."""

    max_prefill_tokens: int  # padding included
    max_num_seqs: int  # sequences that run; those that do already stay
    # Of those, requests of `background_priority` or more; None: as many as max_num_seqs.
    max_background_seqs: int | None = None
    # They get what the others leave of a step, up to so many tokens of it or the end of the bucket that the others need,
    # and never less than the smallest bucket; and sit out the decoding of steps in which the others have more. None: up to
    # max_prefill_tokens.
    max_background_prefill_tokens: int | None = None
    background_priority: int = 0


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """One step. Order on the device: swap out, zero pages, page copies, swap in, moves, resets, deactivate, page appends,
    then one forward pass over the decode slots and the prefill chunks together, then sampling. A slot that is not in
    `decode` does not advance."""

    step_id: int
    swap_outs: tuple[SwapOut, ...] = ()
    zero_pages: tuple[int, ...] = ()  # hold values that are not finite: masked keys would still spread them (0 * NaN)
    page_copies: tuple[PageCopy, ...] = ()  # no target is a source of another
    swap_ins: tuple[SwapIn, ...] = ()
    deactivate: tuple[int, ...] = ()  # slots whose request was aborted or preempted, or was never started
    moves: tuple[SlotMove, ...] = ()
    resets: tuple[SlotReset, ...] = ()
    page_appends: tuple[PageAppend, ...] = ()
    decode: tuple[tuple[int, Request], ...] = ()  # (slot, request) that decode; the device drops those that stopped
    num_decode_slots: int = 0  # of the program: every slot in `decode`, and of a mixed one in `prefill`, is below it
    num_decode_steps: int = 1  # K; above 1 only when prefill is empty
    prefill: tuple[PrefillChunk, ...] = ()
    prefill_bucket: int = 0  # of the program, tokens: holds the chunks, each padded to query_block; 0 without any
    preemptions: tuple[Preemption, ...] = ()  # since the step before

    @property
    def num_prefill_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.prefill)
