"""Slow ReFusion training row and loss (arXiv 2512.13586, Eq. 2-4), token by token.

The row is prompt, clean slots in generation order, masked slots in text order; a position id is the place in
prompt + response. A clean token predicts its successor in the same slot ("ar"), a mask its own token ("mdm").

Shapes: every list returned by `arrange_reference` is [N], N = prompt + response tokens; R = response tokens.
"""

IGNORED = -100


def arrange_reference(
    prompt_ids: list[int],
    response_ids: list[int],
    slot_size: int,
    masked_slots: list[int],
    clean_slot_order: list[int],
    mask_id: int,
) -> tuple[list[int], list[int], list[int], list[str | None]]:
    """Arrange one example for given masked slots and clean order.

    Returns:
        input_ids, position_ids, targets (aligned with the logits of the same place, -100 where none) and the
        loss term each place belongs to ("ar", "mdm" or None).
    """
    num_slots = -(-len(response_ids) // slot_size)
    if sorted(masked_slots + clean_slot_order) != list(range(num_slots)):
        raise ValueError(f"{masked_slots=} and {clean_slot_order=} must together hold {num_slots} slots once")
    input_ids, position_ids, targets, terms = [], [], [], []

    def put(input_id: int, position: int, target: int, term: str | None) -> None:
        input_ids.append(input_id)
        position_ids.append(position)
        targets.append(target)
        terms.append(term)

    for position, token in enumerate(prompt_ids):
        put(token, position, IGNORED, None)  # the last prompt token predicts nothing either
    for slot in clean_slot_order:
        first = slot * slot_size
        last = min(first + slot_size, len(response_ids)) - 1  # the last slot may be short
        for i in range(first, last + 1):
            if i < last:
                put(response_ids[i], len(prompt_ids) + i, response_ids[i + 1], "ar")
            else:
                put(response_ids[i], len(prompt_ids) + i, IGNORED, None)
    for slot in sorted(masked_slots):
        first = slot * slot_size
        for i in range(first, min(first + slot_size, len(response_ids))):
            put(mask_id, len(prompt_ids) + i, response_ids[i], "mdm")
    return input_ids, position_ids, targets, terms


def loss_reference(
    token_cross_entropies: list[float],
    terms: list[str | None],
    *,
    p_mask: float,
    response_length: int,
    masking: str = "bernoulli",
) -> tuple[float, float]:
    """AR and MDM term of one example; lambda and the mean over examples are left to the caller.

    Args:
        token_cross_entropies: [N] nats, read only where `terms` names a term.
        terms: [N] as from `arrange_reference`.
        p_mask: probability with which each slot was masked; unused for "exact".
        response_length: R.
        masking: "bernoulli" (official code: sum of CE / p_mask over masks, / R) or "exact" (mean over masks,
            Eq. 3).

    Returns:
        (mean over the AR targets, MDM term); a term without targets is 0.0.
    """
    ar = [ce for ce, term in zip(token_cross_entropies, terms, strict=True) if term == "ar"]
    mdm = [ce for ce, term in zip(token_cross_entropies, terms, strict=True) if term == "mdm"]
    ar_term = sum(ar) / len(ar) if ar else 0.0
    if masking == "bernoulli":
        return ar_term, sum(ce / p_mask for ce in mdm) / response_length
    if masking == "exact":
        return ar_term, sum(mdm) / len(mdm) if mdm else 0.0
    raise ValueError(f"masking={masking!r}: use bernoulli or exact")
