"""Slow ReFusion decoding (arXiv 2512.13586, A.3) without a cache: each call recomputes everything.

What a cache would freeze, the context a token was computed in, is kept as the buffer places that token saw.
Shapes: N = buffer tokens + queries of one call, Q = queries, V = vocabulary, k = slot_size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

LogitsFn = Callable[[list[int], list[int], Tensor], Tensor]  # ids, positions, may see [N, N] -> logits [N, V]


@dataclass(frozen=True)
class ReferenceDecode:
    """What one prompt was decoded to."""

    response_ids: list[int]  # in position order, tokens behind an EOS included
    response_ids_to_eos: list[int]  # cut behind the first EOS
    forward_passes: int  # the prompt rides on the first; a predict or verify round of completion counts once
    reported_tpf: float  # the official statistic: mean over iterations of k * slots / passes
    verified_slots: float  # share of slots that were accepted as drafted, and not completed


@dataclass(frozen=True)
class Token:
    """One token of the buffer."""

    id: int
    position: int  # index in prompt + response
    seen: list[int]  # buffer places its keys and values were computed from, its own included


@dataclass
class Draft:
    """One slot on its way to acceptance."""

    slot: int  # index in the response
    positions: list[int]  # [k]
    ids: list[int]  # [k]
    certainty: float  # of Stage I
    num_accepted: int = 0  # leading tokens that are final


def decode(
    logits_fn: LogitsFn,
    prompt_ids: list[int],
    *,
    gen_length: int,
    slot_size: int,
    block_size: int,
    slot_threshold: float,
    token_threshold: float,
    mask_id: int,
    eos_id: int,
    certainty: str = "first_token",
    as_released: bool = False,
) -> ReferenceDecode:
    """Decode one prompt; `as_released` keeps the official fault of deleting open slots left of an EOS."""
    if block_size % slot_size:
        raise ValueError(f"{block_size=} is not a multiple of {slot_size=}: change one of them")
    per_block, num_slots = block_size // slot_size, -(-gen_length // slot_size)
    buffer = [Token(id, i, list(range(i + 1))) for i, id in enumerate(prompt_ids)]
    ask = partial(query_logits, logits_fn, buffer)
    forward_passes, rates, num_fast_slots, num_slow_slots = 0, [], 0, 0
    for start in range(0, num_slots, per_block):
        todo = list(range(start, min(start + per_block, num_slots)))  # open slots of this block
        while todo:
            drafts = draft_slots(ask, todo, len(prompt_ids), slot_size, mask_id, certainty)
            selected = [draft for draft in drafts if draft.certainty > slot_threshold]
            selected = selected or [max(drafts, key=lambda draft: draft.certainty)]
            verify_jointly(ask, selected, token_threshold)
            num_fast, rounds = count_accepted(selected, eos_id), 0
            accepted = selected[:num_fast]
            if num_fast == 0:
                accepted, rounds = complete(ask, selected, token_threshold, mask_id, eos_id)
            forward_passes += 2 + 2 * rounds
            num_fast_slots += num_fast
            num_slow_slots += 0 if num_fast else len(selected)
            rates.append(slot_size * (num_fast or len(selected)) / (2 + 2 * rounds))  # dropped slots count
            append_slots(buffer, accepted, eos_id, is_joint=num_fast > 0)
            if eos_id in accepted[-1].ids:
                if as_released and num_fast == 0:  # fault: place among the selected, used among the open
                    todo = todo[: len(accepted) - 1]
                todo = [slot for slot in todo if slot < accepted[-1].slot]
            todo = [slot for slot in todo if slot not in [draft.slot for draft in accepted]]
        if eos_id in [token.id for token in buffer[len(prompt_ids) :]]:
            break
    response = [token.id for token in sorted(buffer[len(prompt_ids) :], key=lambda token: token.position)]
    share = num_fast_slots / (num_fast_slots + num_slow_slots)
    return ReferenceDecode(response, cut_behind(response, eos_id), forward_passes, sum(rates) / len(rates), share)


def query_logits(logits_fn: LogitsFn, buffer: list[Token], ids: list[int], positions: list[int]) -> Tensor:
    """Logits [Q, V] of queries that see the whole buffer and, causally, each other."""
    n, size = len(buffer), len(buffer) + len(ids)
    allowed = torch.zeros(size, size, dtype=torch.bool)
    for row in range(size):
        allowed[row, buffer[row].seen if row < n else list(range(row + 1))] = True
    ids, positions = [token.id for token in buffer] + ids, [token.position for token in buffer] + positions
    return logits_fn(ids, positions, allowed)[n:].float()


def draft_slots(ask, slots, num_prompt, k, mask_id, certainty) -> list[Draft]:
    """Stage I: certainty and argmax draft of every open slot, all masks in one causal row."""
    positions = [num_prompt + slot * k + j for slot in slots for j in range(k)]
    probs = ask([mask_id] * len(positions), positions).softmax(-1)  # [Q, V]
    drafts = []
    for i, slot in enumerate(slots):
        own = slice(i * k, (i + 1) * k)
        ids, value = probs[own].argmax(-1).tolist(), score(probs[own], certainty)
        drafts.append(Draft(slot, positions[own], ids, value))
    return drafts


def score(probs: Tensor, certainty: str) -> float:
    """Certainty in [0, 1] of one slot from its Stage-I probabilities [k, V].

    "mean_entropy" is exp(-mean entropy), our choice: the paper (Table 7) fixes no scale for the threshold.
    """
    drafted = probs.max(-1).values  # [k]
    if certainty == "first_token":
        return drafted[0].item()
    if certainty == "mean_probability":
        return drafted.mean().item()
    if certainty == "mean_entropy":
        return torch.special.entr(probs).sum(-1).mean().neg().exp().item()
    raise ValueError(f"certainty={certainty!r}: use first_token, mean_probability or mean_entropy")


def verify_jointly(ask, selected: list[Draft], threshold: float) -> None:
    """Stage II: find every slot's leading run, each slot seeing the drafts to its left."""
    ids = [id for draft in selected for id in draft.ids]
    logits = ask(ids, [position for draft in selected for position in draft.positions])
    for draft, slot_logits in zip(selected, logits.split(len(selected[0].ids)), strict=True):
        draft.num_accepted = count_run(slot_logits, draft.ids, 0, threshold)


def count_run(logits: Tensor, ids: list[int], num_kept: int, threshold: float) -> int:
    """Final tokens of one slot [k, V]: the kept ones, one by force, then while probability > threshold."""
    probs = logits.softmax(-1)
    num = min(num_kept + 1, len(ids))
    while num < len(ids) and probs[num - 1, ids[num]].item() > threshold:
        num += 1
    return num


def count_accepted(selected: list[Draft], eos_id: int) -> int:
    """Slots that Stage II accepts: all up to an EOS in the verified prefix, else the complete ones."""
    prefix, k = [], len(selected[0].ids)
    for draft in selected:
        prefix += draft.ids[: draft.num_accepted]
        if draft.num_accepted < k:
            break
    return prefix.index(eos_id) // k + 1 if eos_id in prefix else len(prefix) // k


def complete(ask, selected, threshold, mask_id, eos_id) -> tuple[list[Draft], int]:
    """Finish the slots one by one; returns those up to the first EOS and the predict + verify rounds."""
    drafts, rounds = selected, 0  # runs found in Stage II stay, although no slot sees another from here on
    while any(draft.num_accepted < len(draft.ids) for draft in drafts):
        rounds += 1
        for draft in drafts:
            kept = draft.ids[: draft.num_accepted]
            masked = kept + [mask_id] * (len(draft.ids) - len(kept))
            draft.ids = kept + ask(masked, draft.positions).argmax(-1).tolist()[len(kept) :]
            draft.num_accepted = count_run(ask(draft.ids, draft.positions), draft.ids, len(kept), threshold)
        ends = [i for i, draft in enumerate(drafts) if eos_id in draft.ids[: draft.num_accepted]]
        if ends:
            drafts = drafts[: ends[0] + 1]
            drafts[-1].num_accepted = len(drafts[-1].ids)  # what follows the EOS is cut on acceptance
    return drafts, rounds


def append_slots(buffer: list[Token], accepted: list[Draft], eos_id: int, *, is_joint: bool) -> None:
    """Append slots, cut behind an EOS; each has seen all before it if `is_joint`, else none of this call."""
    num_before = len(buffer)
    for draft in accepted:
        start = len(buffer)
        for j, id in enumerate(cut_behind(draft.ids, eos_id)):
            seen = [*range(start if is_joint else num_before), *range(start, start + j + 1)]
            buffer.append(Token(id, draft.positions[j], seen))


def cut_behind(ids: list[int], eos_id: int) -> list[int]:
    """The tokens up to and including the first EOS."""
    return ids[: ids.index(eos_id) + 1] if eos_id in ids else ids


def model_logits_fn(hf_model: torch.nn.Module) -> LogitsFn:
    """Wrap a Hugging Face causal LM on the CPU: fp32, no cache, explicit additive mask [1, 1, N, N]."""
    hf_model.float().eval()

    @torch.inference_mode()
    def logits_fn(input_ids: list[int], position_ids: list[int], allowed: Tensor) -> Tensor:
        bias = torch.zeros(1, 1, *allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
        ids, places = torch.tensor([input_ids]), torch.tensor([position_ids])
        return hf_model(ids, attention_mask=bias, position_ids=places, use_cache=False).logits[0]

    return logits_fn
