"""What every test may use: where the shipped model and the shared data lie, and how close two results must be."""

import json
from importlib import resources
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from dpamoe.kernels.layout import EncodedWeight, groups_of, pack_signs

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


@pytest.fixture(scope="session")
def random_encoded():
    """Function that makes an encoded stacked weight of random planes and scales, about 1 / sqrt(I) in size."""
    return _random_encoded


def _random_encoded(experts, out_features, in_features, group_size, planes=8, tied=False, seed=0):
    random = torch.Generator().manual_seed(seed)
    shape = (experts, out_features, groups_of(in_features, group_size))
    signs = torch.rand(planes, experts, out_features, in_features, generator=random) < 0.5
    packed = [pack_signs(positive) for positive in signs]
    if tied:
        unit = (0.5 + torch.rand(experts, generator=random)) * in_features**-0.5
        code = torch.randint(180, 256, shape, generator=random, dtype=torch.uint8)
        offset = torch.randint(-128, 128, shape, generator=random, dtype=torch.int8)
        return EncodedWeight(packed, [code], offset, unit, in_features, group_size)
    size = [0.5**c * (0.5 + torch.rand(shape, generator=random)) * in_features**-0.5 for c in range(planes)]
    offset = torch.randn(shape, generator=random) * in_features**-0.5
    return EncodedWeight(packed, [scale.half() for scale in size], offset.half(), None, in_features, group_size)


@pytest.fixture(scope="session")
def random_pairs():
    """Function that makes a routing: expert_ids int64 [T, A], gates fp32 [T, A], chunks int32 [T, A] of 0 and 2 … 8."""
    return _random_pairs


def _random_pairs(tokens, active, experts, seed=0):
    random = torch.Generator().manual_seed(seed)
    ids = torch.rand(tokens, max(active, experts), generator=random).argsort(1)[:, :active] % experts
    gates = torch.randn(tokens, active, generator=random).softmax(-1)
    chunks = torch.randint(1, 9, (tokens, active), generator=random, dtype=torch.int32)
    return ids, gates, chunks.where(chunks > 1, 0)


@pytest.fixture(scope="session")
def convex_table():
    """Function that makes a residual table, fp32 [E, C + 1], falling and convex; `whole` numbers give ties."""
    return _convex_table


def _convex_table(experts, planes=8, seed=0, whole=False):
    random = torch.Generator().manual_seed(seed)
    if whole:
        falls = torch.randint(0, 5, (experts, planes), generator=random).float()
    else:
        falls = torch.rand(experts, planes, generator=random) * 4.0 ** -torch.arange(planes)
    falls = falls.sort(1, descending=True).values
    return torch.nn.functional.pad(falls.flip(1).cumsum(1).flip(1), (0, 1))


@pytest.fixture(scope="session")
def small_weights(shared):
    """Function that reads expert weights of the model `small`: (layer, kind, experts) to fp32 [E, O, I]."""
    folder = shared / "models" / "small"
    files = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]

    def read(layer, kind, experts):
        names = [f"model.layers.{layer}.mlp.experts.{expert}.{kind}.weight" for expert in experts]
        tensors = []
        for name in names:
            with safe_open(folder / files[name], "pt") as file:
                tensors.append(file.get_tensor(name).float())
        return torch.stack(tensors)

    return read
