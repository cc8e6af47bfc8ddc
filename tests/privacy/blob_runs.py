"""Small images and runs on them, for tests of attacks."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn

import gpfl
from gpfl.core.net import Net
from gpfl.models.custom import net_from_module
from gpfl.privacy.attack_runner import AttackRunner
from gpfl.privacy.reconstruction import AttackConfig
from gpfl.privacy.uploads import choose_batches, state_at

SIDE = 8


def smooth_module() -> nn.Module:
    """Return a small module with smooth activations."""
    base = nn.Sequential(
        nn.Conv2d(1, 8, 5, padding=2), nn.Tanh(), nn.Conv2d(8, 8, 5, stride=2, padding=2), nn.Tanh(), nn.Flatten()
    )
    return nn.Sequential(base, nn.Linear(8 * (SIDE // 2) ** 2, 4))


def smooth_net() -> Net:
    """Return the net of that module."""
    return net_from_module(smooth_module, torch.zeros(2, 1, SIDE, SIDE), 4, head="1")


def blob_images(samples: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Return images of one blurred spot, and as label the quarter it is in."""
    rng = np.random.default_rng(0)
    y = np.arange(samples) % 4
    centres = np.stack([2 + 4 * (y // 2), 2 + 4 * (y % 2)], 1) + rng.uniform(-1, 1, (samples, 2))
    grid = np.stack(np.meshgrid(np.arange(SIDE), np.arange(SIDE), indexing="ij"), -1)
    x = np.exp(-((grid[None] - centres[:, None, None]) ** 2).sum(-1) / rng.uniform(3, 8, (samples, 1, 1)))
    return (255 * x).astype(np.uint8)[:, None], y


def train_on_blobs(method: str, out: Path | None = None, rounds: int = 1, **settings: object) -> gpfl.Result:
    """Train on blobs of four clients with two classes each."""
    x, y = blob_images()
    federation = gpfl.federate(
        gpfl.Table(x, y, name="blobs"), partition="pathological", clients=4, classes_per_client=2, balanced=True
    )
    return gpfl.fit(method, federation, net=smooth_module, head="1", rounds=rounds, lr=0.1, device="cpu", out=out, **settings)


def make_runner(result: gpfl.Result, images: int = 2, batch: int = 1, config: AttackConfig | None = None) -> AttackRunner:
    """Return a runner that attacks the untrained model of a run."""
    batches = choose_batches(result.federation, [0, 1], images, [batch], 3)
    config = config or AttackConfig(iterations=3, restarts=1)
    return AttackRunner(result.engine, {"0": state_at(result, "0")}, batches, config)
