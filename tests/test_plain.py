"""`torch.compile(backend="dpamoe")` on models that were not transformed: experts are encoded inside the graph."""

import pytest
import torch
from safetensors.torch import save_file

import dpamoe
from dpamoe.modules import encoded_experts
from dpamoe.passes import plain
from dpamoe.passes.backend import compile_backend

from .marks import some_slow

OPTIONS = {"group_size": 32}


@pytest.fixture
def compiled():
    """Function that compiles a model with the backend, its graphs run as they are instead of by Inductor."""

    def make(model, monkeypatch, **options):
        monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", lambda gm, inputs, **settings: gm.forward)
        torch._dynamo.reset()
        return torch.compile(model, backend=lambda gm, inputs: compile_backend(gm, inputs, options={**OPTIONS, **options}))

    yield make
    torch._dynamo.reset()


@pytest.mark.parametrize("family", some_slow(["qwen3_moe", "olmoe", "deepseek_v3", "gpt_oss"], ["qwen3_moe", "gpt_oss"]))
def test_a_plain_model_equals_a_transformed_one_with_the_same_table(
    random_model, random_ids, compiled, monkeypatch, tmp_path, tolerance, family
):
    ids, spec = random_ids(1, 12), dpamoe.EncodeSpec(group_size=32)
    wanted = dpamoe.transform(random_model(family), 3.5, calibration=random_ids(4, 50), spec=spec)
    tables = {f"L['self'].{path}": experts.residuals for path, experts in encoded_experts(wanted).items()}
    save_file(tables, tmp_path / "tables.safetensors")
    found = compiled(random_model(family), monkeypatch, budget=3.5, residuals=str(tmp_path / "tables.safetensors"))
    with torch.no_grad():
        torch.testing.assert_close(
            found(ids, use_cache=False).logits, wanted(ids, use_cache=False).logits, **tolerance(torch.float32)
        )


@pytest.mark.slow
def test_without_a_table_it_says_so_and_still_follows_the_budget(random_model, random_ids, compiled, monkeypatch):
    ids = random_ids(1, 12)
    with torch.no_grad():
        exact, errors = random_model("qwen3_moe")(ids).logits, []
        for budget in (2, 4, 8):
            with pytest.warns(UserWarning, match="no residual table"):
                found = compiled(random_model("qwen3_moe"), monkeypatch, budget=budget)(ids, use_cache=False).logits
            errors.append(float((found - exact).square().mean()))
    assert errors[0] > errors[1] > errors[2]


def test_a_low_precision_model_is_verified_in_fp32(random_model, random_ids, compiled, monkeypatch):
    model, graphs = random_model("qwen3_moe").bfloat16(), []
    right = plain.encode_regions
    monkeypatch.setattr("dpamoe.passes.backend.encode_regions", lambda *args: graphs.append(right(*args)) or graphs[-1])
    with torch.no_grad(), pytest.warns(UserWarning, match="no residual table"):
        assert compiled(model, monkeypatch)(random_ids(1, 12), use_cache=False).logits.dtype == torch.bfloat16
    assert graphs and graphs[0]


def test_a_budget_out_of_range_is_an_error(random_model, random_ids, compiled, monkeypatch):
    with pytest.raises(Exception, match="budget is 9 planes per expert"):
        compiled(random_model("qwen3_moe"), monkeypatch, budget=9)(random_ids(1, 4), use_cache=False)


class Batched(torch.nn.Module):
    """Experts as one batched product; what stands before or behind them differs from what the fused op computes."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        named = 8 if kind == "identity" else 6
        self.up = torch.nn.Parameter(torch.randn(named, 16, 32) / 6)
        self.down = torch.nn.Parameter(torch.randn(6, 32, 16) / 4)

    def forward(self, hidden, index, weights):
        flat, scale = index.flatten(), weights.flatten()[:, None]
        rows = hidden.repeat_interleave(index.shape[1], 0)
        inner = torch.nn.functional.silu(torch.bmm(self.up[flat], (rows * scale if self.kind == "input" else rows)[..., None]))
        out = torch.bmm(self.down[flat.clamp(max=5)], inner).squeeze(-1)
        if self.kind == "identity":
            out = torch.where(flat[:, None] < 6, out, rows)
        return (out if self.kind == "input" else out * scale).view(*index.shape, -1).sum(1)


class Routed(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.router, self.experts = torch.nn.Linear(32, 8 if kind == "identity" else 6), Batched(kind)

    def forward(self, hidden):
        weights, index = self.router(hidden).softmax(-1).topk(2)
        return self.experts(hidden, index, weights)


@pytest.mark.parametrize("kind", ["input", "identity"])
def test_what_one_op_does_not_compute_is_left_alone(compiled, monkeypatch, kind):
    """Gates on the input and experts without weights: encoded as plain experts they would be silently wrong."""
    torch.manual_seed(0)
    with torch.no_grad(), pytest.raises(Exception, match="could not be recognised as experts"):
        compiled(Routed(kind), monkeypatch)(torch.randn(12, 32))
    with torch.no_grad(), pytest.warns(UserWarning, match="no residual table"):
        model, hidden = Routed("plain"), torch.randn(12, 32)
        found, expected = compiled(model, monkeypatch, budget=8, group_size=16)(hidden), model(hidden)
    assert float((found - expected).square().mean() / expected.square().mean()) < 1e-3
