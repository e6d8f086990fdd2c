"""A task that a person can judge at sight: one sentence about a topic, written as an instruction says."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

from coalign import Sample

# What is written about, and the words that are asked for: those of training, and those of the evaluation.
TOPICS = {
    "train": "tea, rain, a train, bread, winter, a bicycle, a cat, music, a mountain, a window, a bee, chess, "
    "a garden, football, a market, a river, snow, coffee, a clock, a bridge, a horse, a film, a star, soup, a forest, "
    "a kite, a school, a boat, an apple, summer, a tree, a painting, a bird, a dancer, a museum, honey, an island, "
    "a letter, a candle, thunder",
    "eval": "a dog, the sea, a robot, chocolate, cheese, the moon, a poem, a volcano, a shoe, autumn, a whale, pizza, "
    "sleep, a map",
}
WORDS = {
    "train": "today, always, slowly, together, sometimes, everyone, often, children, yesterday, people",
    "eval": "quietly, nobody, tomorrow, nature, perhaps",
}


def list_words(text: str) -> list[str]:
    return re.findall(r"[a-z']+", text.lower())


# What is asked, and whether a sentence does it. {word} is another word in each row.
INSTRUCTIONS: dict[str, tuple[str, Callable[[str, str], bool]]] = {
    "begin": ('Begin with the word "{word}".', lambda text, word: list_words(text)[0] == word),
    "contain": ('Use the word "{word}".', lambda text, word: word in text.lower()),
    "short": ("Use at most ten words.", lambda text, word: len(list_words(text)) <= 10),
    "question": ("Write it as a question.", lambda text, word: text.endswith("?")),
    "plain": ("Use no commas.", lambda text, word: "," not in text),
}


def follows(sample: Sample) -> float:
    """1 for one whole sentence of five words or more that names the topic and does what the instruction says."""
    text, row = sample.response.strip(), sample.meta
    words = list_words(text)
    is_sentence = re.fullmatch(r"[^.!?\n]{10,}[.!?]", text) is not None and len(words) >= 5
    _, is_done = INSTRUCTIONS[row["data_source"]]
    return float(is_sentence and row["topic"].split()[-1] in text.lower() and is_done(text, row["word"]))


def make_data(directory: Path, *, seed: int = 0) -> None:
    """Write `train.jsonl` and `eval.jsonl`: each instruction with each topic. They share no topic and no word."""
    choose = random.Random(seed)
    directory.mkdir(parents=True, exist_ok=True)
    for name in TOPICS:
        rows = []
        for topic in TOPICS[name].split(", "):
            for instruction, (text, _) in INSTRUCTIONS.items():
                word = choose.choice(WORDS[name].split(", "))
                prompt = f"Write one sentence about {topic}. {text.format(word=word)}"
                rows.append({"prompt": prompt, "data_source": instruction, "topic": topic, "word": word})
        choose.shuffle(rows)
        (directory / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
