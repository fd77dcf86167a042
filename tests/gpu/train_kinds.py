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
]
