"""The models of the paper's experiments, on made-up data. Those that torchvision has come from there.

`build(name, batch, device)` gives a model and a function that computes its loss on one batch, which stays the same: the
experiments are about the GPU, not about reading data. Nothing here knows of Salus.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

Loss = Callable[[], torch.Tensor]
Built = tuple[nn.Module, Loss]


def build(name: str, batch: int, device: str) -> Built:
    if name in _OWN:
        return _OWN[name](batch, device)
    if name in _VISION:
        return _classifier(_from_torchvision(*_VISION[name]), batch, device, 299 if name == "inception3" else 224)
    raise ValueError(f"there is no model {name!r}; there are: {', '.join(sorted((*_OWN, *_VISION)))}")


_VISION: dict[str, tuple[str, dict[str, Any]]] = {
    "alexnet": ("alexnet", {}),
    "googlenet": ("googlenet", {"aux_logits": False, "init_weights": False}),
    "inception3": ("inception_v3", {"aux_logits": False, "init_weights": False}),
    **{name: (name, {}) for name in ("vgg11", "vgg16", "vgg19", "resnet18", "resnet50", "resnet101", "resnet152")},
}


def _from_torchvision(name: str, options: dict[str, Any]) -> nn.Module:
    try:
        import torchvision  # type: ignore[import-not-found,import-untyped,unused-ignore]
    except ImportError:
        raise SystemExit(f"the model {name} comes from torchvision: pip install torchvision") from None
    model: nn.Module = getattr(torchvision.models, name)(**options)
    return model


def _classifier(model: nn.Module, batch: int, device: str, size: int, classes: int = 1000) -> Built:
    model.to(device)
    x = torch.randn(batch, 3, size, size, device=device)
    y = torch.randint(classes, (batch,), device=device)
    return model, lambda: F.cross_entropy(model(x), y)


def _dense(width: int, layers: int) -> Callable[[int, str], Built]:
    def built(batch: int, device: str) -> Built:
        parts = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
        model = nn.Sequential(*parts, nn.Linear(width, 10)).to(device)
        x, y = torch.randn(batch, width, device=device), torch.randint(10, (batch,), device=device)
        return model, lambda: F.cross_entropy(model(x), y)

    return built


def _large(batch: int, device: str) -> Built:
    """With a batch of 512, 4.1 GiB that stay: the model, its momentum, and its data, kept on the GPU.

    A step takes little beside that: two of these fit in 16 GiB, with the contexts of eight.
    """
    width, batches = 6144, 256
    # Made where they are to be: the processor would take seconds for it.
    with torch.device(device):
        model = nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))
        data = torch.randn(batches * batch, width)
    parts = itertools.cycle(data.chunk(batches))

    def loss() -> torch.Tensor:
        x = next(parts)
        return F.mse_loss(model(x), x)

    return model, loss


def _overfeat(batch: int, device: str) -> Built:
    features = nn.Sequential(
        nn.Conv2d(3, 96, 11, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(96, 256, 5), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(256, 512, 3, padding=1), nn.ReLU(), nn.Conv2d(512, 1024, 3, padding=1), nn.ReLU(),
        nn.Conv2d(1024, 1024, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(6),
    )  # fmt: skip
    head = (nn.Linear(36864, 3072), nn.ReLU(), nn.Linear(3072, 4096), nn.ReLU(), nn.Linear(4096, 1000))
    return _classifier(nn.Sequential(features, nn.Flatten(), *head), batch, device, 231)


class _Inception(nn.Module):
    """A block of Inception-4: ways of several widths, side by side."""

    def __init__(self, channels: int, *ways: tuple[tuple[int, Any], ...]) -> None:
        super().__init__()
        self.ways = nn.ModuleList(_ways(channels, way) for way in ways)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([way(x) for way in self.ways], 1)


def _ways(channels: int, way: tuple[tuple[int, Any], ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for width, kernel in way:
        padding = tuple(k // 2 for k in kernel) if isinstance(kernel, tuple) else kernel // 2
        layers += [nn.Conv2d(channels, width, kernel, padding=padding, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers)


def _inception4(batch: int, device: str) -> Built:
    def small(channels: int) -> _Inception:
        return _Inception(
            channels, ((96, 1),), ((96, 1),), ((64, 1), (96, 3)), ((64, 1), (96, 3), (96, 3))
        )  # fmt: skip

    def middle(channels: int) -> _Inception:
        long = ((192, 1), (192, (1, 7)), (224, (7, 1)), (224, (1, 7)), (256, (7, 1)))
        return _Inception(channels, ((128, 1),), ((384, 1),), ((192, 1), (224, (1, 7)), (256, (7, 1))), long)

    def wide(channels: int) -> _Inception:
        return _Inception(channels, ((256, 1),), ((256, 1),), ((384, 1), (512, (1, 3))), ((384, 1), (512, (3, 1))))

    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(3, 2),
        nn.Conv2d(64, 192, 3), nn.ReLU(), nn.MaxPool2d(3, 2), small(192), *(small(384) for _ in range(3)),
        nn.MaxPool2d(3, 2), middle(384), *(middle(1024) for _ in range(6)), nn.MaxPool2d(3, 2), wide(1024),
        *(wide(1536) for _ in range(2)), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1536, 1000),
    )  # fmt: skip
    return _classifier(model, batch, device, 299)


class _Speech(nn.Module):
    """Convolutions over a spectrogram, recurrent layers over time, letters."""

    def __init__(self) -> None:
        super().__init__()
        self.front = nn.Sequential(nn.Conv2d(1, 32, (41, 11), 2), nn.ReLU(), nn.Conv2d(32, 32, (21, 11), (2, 1)))
        self.cells = nn.LSTM(32 * 21, 512, num_layers=3, bidirectional=True, batch_first=True)
        self.head = nn.Linear(1024, 29)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.front(x)
        return torch.as_tensor(self.head(self.cells(x.flatten(1, 2).transpose(1, 2))[0]))


def _speech(batch: int, device: str) -> Built:
    model = _Speech().to(device)
    x = torch.randn(batch, 1, 161, 200, device=device)
    y = torch.randint(29, (batch, model(x[:1]).shape[1]), device=device)
    return model, lambda: F.cross_entropy(model(x).flatten(0, 1), y.flatten())


class _Vae(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(784, 400), nn.ReLU(), nn.Linear(400, 40))
        self.decoder = nn.Sequential(nn.Linear(20, 400), nn.ReLU(), nn.Linear(400, 784))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, log = self.encoder(x).chunk(2, 1)
        out = self.decoder(mean + torch.randn_like(mean) * (log / 2).exp())
        spread = torch.as_tensor(1 + log - mean**2 - log.exp()).mean() / 2
        return F.binary_cross_entropy_with_logits(out, x) - spread


def _vae(batch: int, device: str) -> Built:
    model = _Vae().to(device)
    x = torch.rand(batch, 784, device=device)
    return model, lambda: torch.as_tensor(model(x))


def _superres(batch: int, device: str) -> Built:
    """32x32 to 128x128."""
    body = [part for _ in range(8) for part in (nn.Conv2d(64, 64, 3, padding=1), nn.ReLU())]
    model = nn.Sequential(
        nn.Conv2d(3, 64, 9, padding=4), nn.ReLU(), *body, nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2),
        nn.Conv2d(64, 256, 3, padding=1), nn.PixelShuffle(2), nn.Conv2d(64, 3, 9, padding=4),
    ).to(device)  # fmt: skip
    x, y = torch.rand(batch, 3, 32, 32, device=device), torch.rand(batch, 3, 128, 128, device=device)
    return model, lambda: F.mse_loss(model(x), y)


class _Seq2seq(nn.Module):
    def __init__(self, width: int, words: int = 10000) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.encoder = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.decoder = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, words)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        _, state = self.encoder(self.words(source))
        return torch.as_tensor(self.head(self.decoder(self.words(target), state)[0]))


def _seq2seq(width: int, device: str) -> Built:
    model = _Seq2seq(width).to(device)
    source, target = (torch.randint(10000, (20, 30), device=device) for _ in range(2))
    return model, lambda: F.cross_entropy(model(source, target[:, :-1]).flatten(0, 1), target[:, 1:].flatten())


_OWN: dict[str, Callable[[int, str], Built]] = {
    "tiny": _dense(64, 2),
    "small": _dense(512, 4),
    "large": _large,
    "overfeat": _overfeat,
    "inception4": _inception4,
    "speech": _speech,
    "vae": _vae,
    "superres": _superres,
    "seq2seq": _seq2seq,
}
