"""The choice of the images that are attacked."""

from __future__ import annotations

import pytest
from privacy.blob_runs import train_on_blobs
from privacy.uneven_clients import uneven_federation

import gpfl
from gpfl.privacy.uploads import choose_batches


def test_all_batch_sizes_have_the_same_images() -> None:
    federation = train_on_blobs("fedavg").federation
    chosen = choose_batches(federation, [0, 2], 8, [1, 4], 3)
    samples = {size: [sample for batch in batches for sample in batch.samples] for size, batches in chosen.items()}
    assert samples[1] == samples[4]
    assert len(set(samples[1])) == 8
    for batch in chosen[4]:
        assert set(batch.samples) <= set(federation.shards[batch.client].train.tolist())
    with pytest.raises(gpfl.GpflError, match="must be a multiple of 4"):
        choose_batches(federation, [0], 6, [1, 4], 3)


def test_only_attacked_clients_need_enough_samples() -> None:
    federation = uneven_federation(40, 4)  # 30 and 3 for training
    assert {batch.client for batch in choose_batches(federation, [0, 1], 4, [4], 0)[4]} == {0}
    with pytest.raises(gpfl.GpflError, match=r"client 1 has 3 training samples; .* 4: lower --batch or choose other clients"):
        choose_batches(federation, [0, 1], 8, [4], 0)
    assert len(choose_batches(federation, [0], 8, [4], 0)[4]) == 2
    assert len(choose_batches(federation, [0, 1], 6, [1], 0)[1]) == 6
    with pytest.raises(gpfl.GpflError, match=r"client 1 has 3 training samples; .* 4: lower --images or name more clients"):
        choose_batches(federation, [0, 1], 8, [1], 0)
    assert len(choose_batches(federation, [0, 1], 7, [1], 0)[1]) == 7
