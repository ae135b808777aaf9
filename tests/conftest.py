"""What every test may use: where the shipped model and the shared data lie, and how close two results must be."""

from importlib import resources
from pathlib import Path

import pytest
import torch

SHARED = Path(__file__).resolve().parents[2] / "shared"

TOLERANCES = {
    torch.float32: 1e-4,  # sums of up to a few hundred products, added in another order
    torch.bfloat16: 2e-2,  # 8 bits of mantissa
    torch.float16: 2e-3,  # 11 bits of mantissa
}


@pytest.fixture(scope="session")
def shared():
    """Folder of larger models and tasks beside the repository; tests that need it are skipped without it."""
    if not SHARED.is_dir():
        pytest.skip("needs the folder `shared` beside the repository")
    return SHARED


@pytest.fixture(scope="session")
def tiny_dir():
    """Folder of the small trained model that ships with the package."""
    return Path(str(resources.files("dpamoe.assets"))) / "tiny"


@pytest.fixture(scope="session")
def tolerance():
    """Function from a dtype to the `rtol` and `atol` of `torch.testing.assert_close`."""
    return lambda dtype: {"rtol": TOLERANCES[dtype], "atol": TOLERANCES[dtype]}
