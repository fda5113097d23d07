"""Questions for a planted fact, in the manner of RULER (arXiv 2404.06654): needles of one and of
several keys, among distractors that differ in the key alone, at several depths."""

import random

_FILLER = (
    "The grass is green. ", "The sky is blue. ", "The sun is yellow. ", "Here we go. ",
    "There and back again. ",
)  # fmt: skip
_NAMES = ("river", "castle", "engine", "garden", "window", "forest", "bottle", "mirror")
_COLOURS = ("red", "white", "green", "black", "brown", "golden")
_KEYS = [f"{colour} {name}" for colour in _COLOURS for name in _NAMES]
_DEPTHS = (0.1, 0.5, 0.9)
_KEY_COUNTS = (1, 8, 32)
_DIGITS = 6


def make_question(tokenizer, item, length):
    """(prompt ids, answer ids, what it is); the same for every call with the same item.

    Items go through 1, 8 and 32 keys, of which one is asked for, then through the depths.
    """
    drawn = random.Random(item)
    depth = _DEPTHS[item // len(_KEY_COUNTS) % len(_DEPTHS)]
    keys = drawn.sample(_KEYS, _KEY_COUNTS[item % len(_KEY_COUNTS)])
    numbers = {key: "".join(drawn.choices("0123456789", k=_DIGITS)) for key in keys}
    facts = [f"The magic number of the {key} is {numbers[key]}. " for key in keys]
    asked = keys[0]
    question = (
        f"\nQuestion: What is the magic number of the {asked}?"
        f"\nAnswer: The magic number of the {asked} is "
    )
    budget = length - len(tokenizer(question + "".join(facts))["input_ids"])
    filler = []
    while len(tokenizer("".join(filler))["input_ids"]) < budget:
        filler.append(drawn.choice(_FILLER))
    # The asked fact at its depth, the others anywhere.
    places = [int(depth * len(filler))] + [drawn.randrange(len(filler)) for _ in facts[1:]]
    for place, fact in sorted(zip(places, facts), reverse=True):
        filler.insert(place, fact)
    prompt = tokenizer("".join(filler) + question)["input_ids"]
    answer = tokenizer(numbers[asked])["input_ids"]
    return prompt, answer, f"{len(keys)} keys, depth {depth}"
