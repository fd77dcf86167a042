"""The kinds of script in train.py, for those who must not import torch."""

ALONE = [
    "resnet50",
    "vit",
    "gpt2",
    "fp16",
    "dcgan",
    "vae",
    "lstm",
    "lbfgs",
    "compile",
    "compile-reduce",
    "growing",
    "inference",
    "lightning",
    "trainer",
]
"""These are measured alone as well, with Salus in their process and without."""
ALL = [
    *ALONE,
    "captured",
    "graphed",
    "hogwild",
    "queue",
    "whole-step",
    "two-threads",
]
ITERATIONS_A_STEP = {"captured": 1, "graphed": 1, "whole-step": 1, "two-threads": 2}
"""So many iterations must be counted for each step of these scripts."""
