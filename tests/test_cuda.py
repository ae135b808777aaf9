"""The product on a CUDA device gives what it gives on the CPU (run with -m gpu)."""

import copy

import pytest
import torch
from torch import fx
from transformers import AutoModelForCausalLM

import dpamoe
from dpamoe.encode import encode
from dpamoe.kernels.grouped import decode
from dpamoe.modules import encoded_experts
from dpamoe.passes.plain import encode_regions

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("scale_mode, group_size", [("shared", 128), ("tied", 32), ("shared", 96)])
def test_encoder_is_as_good_on_cuda(scale_mode, group_size):
    weight = torch.randn(3, 40, 256, generator=torch.Generator().manual_seed(0))
    spec = dpamoe.EncodeSpec(group_size=group_size, scale_mode=scale_mode)
    here, there = encode(weight, spec), encode(weight.cuda(), spec)
    for k in (2, 4, 8):
        errors = [float((decode(w, k).cpu() - weight).square().sum()) for w in (here, there)]
        assert errors[1] <= errors[0] * 1.005  # least squares in another order: the same fit, not the same bits


def test_transformed_model_agrees_with_cpu(tiny_dir, tolerance):
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    ids = torch.arange(5, 69).view(1, -1)
    dpamoe.transform(model, 3.5, calibration=torch.arange(5, 2000))
    with torch.no_grad():
        expected = model(ids).logits
        dpamoe.stats(model, reset=True)
        found = model.cuda()(ids.cuda()).logits.cpu()
    assert dpamoe.stats(model)["mean_planes"] == 3.5
    torch.testing.assert_close(found, expected, **tolerance(torch.float32))


def test_chunks_are_equal_on_both_devices(tiny_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32)
    dpamoe.transform(model, calibration=torch.arange(5, 2000))
    experts = next(iter(encoded_experts(model).values()))
    generator = torch.Generator().manual_seed(1)
    gates = torch.rand(64, 4, generator=generator)
    index = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(64)])
    for budget in (2.0, 2.75, 4.0, 6.5, 8.0):
        for scope in ("token", "dispatch"):
            dpamoe.set_spend(model, budget=budget, scope=scope)
            here = experts.cpu().allocate(index, gates)
            there = experts.cuda().allocate(index.cuda(), gates.cuda())
            assert torch.equal(here, there.cpu())


def test_a_held_budget_is_followed_without_a_synchronisation(tiny_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_dir)
    dpamoe.transform(model, 3.0, calibration=torch.arange(5, 2000), allocator="threshold")
    dpamoe.set_spend(model, hold=True)
    experts = next(iter(encoded_experts(model).values()))
    generator = torch.Generator().manual_seed(1)
    index = torch.stack([torch.randperm(16, generator=generator)[:4] for _ in range(64)])
    call = torch.randn(64, experts.site.hidden, generator=generator).bfloat16(), index, torch.rand(64, 4, generator=generator)
    there = copy.deepcopy(experts).cuda()
    moved = [t.cuda() for t in call]
    there(*moved)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        there(*moved)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    for _ in range(2):
        experts(*call)
    assert float(there.shift) == pytest.approx(float(experts.shift), rel=1e-5) and float(experts.shift) != 0
    assert torch.equal(there.spent.cpu(), experts.spent)


def test_transform_on_cuda_in_bf16_generates(tiny_dir):
    model = AutoModelForCausalLM.from_pretrained(tiny_dir).cuda()
    dpamoe.transform(model, 4.0)
    written = model.generate(torch.tensor([[1, 20, 30]], device="cuda"), max_new_tokens=4, do_sample=False)
    assert written.shape == (1, 7)


def test_an_untransformed_model_is_compiled_on_cuda(tiny_dir):
    model, ids = AutoModelForCausalLM.from_pretrained(tiny_dir, dtype=torch.float32).cuda(), torch.arange(5, 69).view(1, -1)
    graphs = []

    def backend(gm, inputs):
        own = fx.GraphModule(gm, copy.deepcopy(gm.graph))  # Dynamo still reads its own
        extras = encode_regions(own, inputs, dpamoe.EncodeSpec(), 8.0, {})
        graphs.append(extras)
        return lambda *args: own(*args, *extras)

    with torch.no_grad():
        expected = model(ids.cuda(), use_cache=False).logits
        found = torch.compile(model, backend=backend)(ids.cuda(), use_cache=False).logits
    assert graphs and graphs[0]
    assert float((found - expected).square().mean() / expected.square().mean()) < 1e-3  # 8 planes, relative squared error
