"""Which models the paper's experiments run, without importing the framework they are written in."""

from __future__ import annotations

BATCHES: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys(("alexnet", "googlenet", "inception3", "overfeat", "vgg11", "vgg16", "vgg19"), (25, 50, 100)),
    **dict.fromkeys(("inception4", "resnet50", "resnet101", "resnet152", "speech"), (25, 50, 75)),
    "vae": (64, 128, 256),
    "superres": (32, 64, 128),
    "seq2seq": (200, 650, 1500),
}
"""The paper's three sizes of each; of seq2seq it is the width, at a batch of 20."""
ON_THE_PROCESSOR = ("tiny", "small", "vae")
"""Light enough for a machine without a GPU."""
