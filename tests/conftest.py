"""Shared by all tests. Most need no weights: tiny random models prove laws better than large ones. Those that need the real
model ask for the fixture `real` and are skipped where its file is not in the user's cache (python smollm2.py fetches it)."""
import pytest
import torch

import smollm2

torch.set_num_threads(1)  # tiny tensors: a second thread costs more than it brings


@pytest.fixture(scope="session")
def real():
    """(target in fp32, encoding) of SmolLM2-135M-Instruct."""
    if not (smollm2.cache_dir() / smollm2.FILE).is_file():
        pytest.skip("the real model's weights are not in the cache")
    torch.set_num_threads(2)
    yield smollm2.load()
    torch.set_num_threads(1)
