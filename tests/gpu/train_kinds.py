"""The kinds of script in train.py, for those who must not import torch."""

ALL = [
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
