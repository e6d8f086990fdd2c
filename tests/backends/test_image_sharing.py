"""What many samples of a prompt with images share: pixels, features, and references to files."""

from __future__ import annotations

import pickle
import tracemalloc

import pytest
import torch

from coalign.backends.engines.request import begin_samples
from coalign.data.batch import Batch
from coalign.types import ImageSpan
from tests.backends.test_images import build_policy, count_images, load_pictures
from tests.vision import vision_model_dir


def test_an_engine_makes_and_computes_the_image_of_a_prompt_once(tmp_path):
    """64 samples of 8 prompts, more than an engine computes at once."""
    path = vision_model_dir(tmp_path / "model")
    prompts = load_pictures(tmp_path, path)
    policy = build_policy("native", path, native={"max_sequences": 12}, sampling={"max_new_tokens": 3})
    policy.ensure_weights()  # whose probes have pictures of their own
    images, seen = policy.engine.model.images, count_images(policy.engine.model.module)
    batch = policy.generate(prompts, samples=8)
    assert len(batch) == 64 and images.pixels.made == sum(seen) == 8


def list_references(samples: int, each: int) -> Batch:
    """Prompts with an image each, drawn ``each`` times, as a loader makes them: no two share an object."""
    count = samples // each
    spans = [
        (ImageSpan(f"{i:064x}", f"/data/images/of/a/long/path/{i:08}.png", i % 7, 64 + i % 3, (1, 16 + i % 9, 16)),)
        for i in range(count)
    ]
    tokens = {"tokens": torch.zeros(count, dtype=torch.int32)}
    columns = {"group": torch.arange(count), "images": spans}
    return begin_samples(Batch(torch.ones(count, dtype=torch.int64), tokens, columns), each)


@pytest.mark.slow
@pytest.mark.parametrize("each", [1, 8])
def test_references_of_100_000_samples_take_less_than_a_kilobyte_each(each):
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    batch = list_references(100_000, each)
    parts = [part.only("images") for part in batch.split(50, by="sequences")]
    made = (tracemalloc.get_traced_memory()[0] - before) / len(batch)
    arrived = pickle.loads(pickle.dumps(parts))  # what another process holds
    held = (tracemalloc.get_traced_memory()[0] - before) / len(batch) - made
    tracemalloc.stop()
    assert sum(map(len, arrived)) == 100_000
    assert made < 1024 and held < 1024, f"{made:.0f} and {held:.0f} bytes a sample"
