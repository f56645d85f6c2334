"""Seeded arithmetic word problems with worked solutions: the data of the embedded demo.

A story opens with a number of things, one to three events change that number, and the solution writes one
equation per event before it repeats the last number as the answer:

    query     Mia has 12 pens. Mia buys 5 more. Then Mia gives 4 pens to Leo. How many pens does Mia have now?
    response  Mia has 12 + 5 = 17 pens. Then 17 - 4 = 13 pens. The answer is 13.

Whether a question is held out is a property of its text (``is_held_out``), so no question can be in both splits,
whatever the seeds. The numbers are small on purpose: a model of 500K parameters has a few minutes of one CPU core to
learn the few hundred sums, and the wording settles every sign (nobody "gives Mia" anything, Mia "gets" it).
"""

import random
import zlib
from collections.abc import Callable

# fmt: off
NAMES = (
    "Ana", "Ben", "Cal", "Dora", "Eli", "Finn", "Gina", "Hugo",
    "Ivy", "Jack", "Kim", "Leo", "Mia", "Nora", "Otto", "Pia",
)
ITEMS = (
    "apples", "balls", "books", "cards", "coins", "cookies", "eggs", "kites",
    "nuts", "pens", "rings", "roses", "shells", "stamps", "stones", "toys",
)
# fmt: on
HELD_OUT_ONE_IN = 20

Event = tuple[str, str, int]  # what happens (query), its equation (response), the number of things afterwards


def generate(num_problems: int, *, seed: int, held_out: bool = False) -> list[dict[str, str]]:
    """Draws ``num_problems`` distinct problems from one split.

    Args:
        num_problems: number of problems.
        seed: seed of the random stream; equal arguments give equal problems.
        held_out: draw from the held-out questions rather than from the training questions.

    Returns:
        Records with the keys ``id``, ``query``, ``response`` and ``answer``.

    Raises:
        ValueError: ``num_problems`` is negative.
    """
    if num_problems < 0:
        raise ValueError(f"num_problems must be at least 0, got {num_problems}")
    rng = random.Random(seed)
    split = "heldout" if held_out else "train"
    responses: dict[str, tuple[str, int]] = {}
    while len(responses) < num_problems:
        query, response, answer = rng.choice(STORIES)(rng)
        if is_held_out(query) == held_out:
            responses.setdefault(query, (response, answer))
    return [
        {
            "id": f"{split}-{seed}-{index}",
            "query": query,
            "response": f"{response} The answer is {answer}.",
            "answer": str(answer),
        }
        for index, (query, (response, answer)) in enumerate(responses.items())
    ]


def is_held_out(query: str) -> bool:
    """Tells whether a question belongs to the held-out split: one in ``HELD_OUT_ONE_IN``, chosen by its CRC-32."""
    return zlib.crc32(query.encode()) % HELD_OUT_ONE_IN == 0


def write_change_story(rng: random.Random) -> tuple[str, str, int]:
    """Somebody has things, then gains or loses some, one to three times."""
    name, friend = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    count = rng.randint(5, 20)
    query, response = f"{name} has {count} {item}.", ""
    for step in range(rng.choice((1, 2, 2, 3))):
        event, equation, count = draw_event(rng, name=name, friend=friend, item=item, count=count)
        query += f" {'Then ' if step else ''}{event}"
        response += f" Then {equation}" if step else f"{name} has {equation}"
    return f"{query} How many {item} does {name} have now?", response, count


def write_pack_story(rng: random.Random) -> tuple[str, str, int]:
    """Somebody buys equal packs of things, then gains or loses some."""
    name, friend = rng.sample(NAMES, 2)
    item, pack = rng.choice(ITEMS), rng.choice(("bags", "boxes", "packs"))
    num_packs, size = rng.randint(2, 5), rng.randint(2, 5)
    count = num_packs * size
    query = f"{name} buys {num_packs} {pack} with {size} {item} each."
    response = f"{name} has {num_packs} * {size} = {count} {item}."
    for _ in range(rng.choice((0, 1, 1))):
        event, equation, count = draw_event(rng, name=name, friend=friend, item=item, count=count)
        query += f" Then {event}"
        response += f" Then {equation}"
    return f"{query} How many {item} does {name} have now?", response, count


def write_comparison_story(rng: random.Random) -> tuple[str, str, int]:
    """The second of two people has more or fewer things than the first; asked for the second's or for both together."""
    name, friend = rng.sample(NAMES, 2)
    item = rng.choice(ITEMS)
    count, difference = rng.randint(6, 12), rng.randint(2, 5)
    word, sign = rng.choice((("more", "+"), ("fewer", "-")))
    other = count + difference if sign == "+" else count - difference
    query = f"{name} has {count} {item}. {friend} has {difference} {word} than {name}."
    response = f"{friend} has {count} {sign} {difference} = {other} {item}."
    if rng.random() < 0.5:
        return f"{query} How many {item} does {friend} have?", response, other
    query = f"{query} How many {item} do they have together?"
    return query, f"{response} Together they have {count} + {other} = {count + other} {item}.", count + other


def draw_event(rng: random.Random, *, name: str, friend: str, item: str, count: int) -> Event:
    """Draws a gain or a loss that leaves at least one thing."""
    amount = rng.randint(2, 5)
    if count > amount and rng.random() < 0.5:
        event = rng.choice(LOSSES).format(name=name, friend=friend, item=item, amount=amount)
        return event, f"{count} - {amount} = {count - amount} {item}.", count - amount
    event = rng.choice(GAINS).format(name=name, friend=friend, item=item, amount=amount)
    return event, f"{count} + {amount} = {count + amount} {item}.", count + amount


GAINS = (
    "{name} buys {amount} more.",
    "{name} finds {amount} more.",
    "{name} gets {amount} {item} from {friend}.",
)
LOSSES = ("{name} loses {amount}.", "{name} sells {amount} {item}.", "{name} gives {amount} {item} to {friend}.")
STORIES: tuple[Callable[[random.Random], tuple[str, str, int]], ...] = (
    write_change_story,
    write_change_story,
    write_pack_story,
    write_comparison_story,
)
