"""How a router chooses, read off the recording."""

import pytest
import torch
from torch import nn

from dpamoe.passes.find import find_sites


@pytest.mark.parametrize(
    "family, kind",
    [
        ("qwen3_moe", "softmax, topk"), ("olmoe", "softmax, topk"), ("mixtral", "softmax, topk"),
        ("deepseek_v3", "sigmoid, topk"), ("gpt_oss", "softmax, topk"), ("granitemoe", "softmax, topk"),
    ],
)  # fmt: skip
def test_families(random_model, random_ids, family, kind):
    sites = find_sites(random_model(family), (), {"input_ids": random_ids(1, 8)}).sites
    assert {site.router for site in sites} == {kind}


class ByToken(nn.Module):
    """Hash routing: a table says which experts a token meets."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.register_buffer("table", torch.arange(32).view(16, 2) % 4)
        self.experts = LoopedExperts()

    def forward(self, ids):
        index = self.table[ids]
        return self.experts(self.embed(ids), index, torch.full(index.shape, 0.5))


class LoopedExperts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(4, 6, 8)), nn.Parameter(torch.randn(4, 8, 6))

    def forward(self, hidden, index, weights):
        out = torch.zeros_like(hidden)
        for expert in range(4):
            token, slot = torch.where(index == expert)
            rows = torch.relu(hidden[token] @ self.up[expert].T) @ self.down[expert].T
            out.index_add_(0, token, rows * weights[token, slot, None])
        return out


def test_experts_looked_up_by_token():
    (site,) = find_sites(ByToken(), (torch.arange(9),)).sites
    assert site.router == "table"
