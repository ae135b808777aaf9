"""Predicted sizes are those that are written, and memory is more than what is certainly needed."""

import pytest

from dpamoe import EncodeSpec
from dpamoe.checkpoint import group_of
from dpamoe.forecast import check_memory, encoded_sizes, forecast
from dpamoe.layers import outline
from dpamoe.modules import encoded_experts
from dpamoe.source import open_source

from . import sources


@pytest.mark.parametrize("mode", ["shared", "tied"])
def test_sizes_of_encoded_experts(family, random_model, transformed, random_ids, tmp_path, mode):
    import dpamoe

    spec = EncodeSpec(group_size=24, iterations=0, scale_mode=mode, k_max=3)
    plan = outline(open_source(sources.per_expert(random_model(family), tmp_path / "source")))
    model = dpamoe.transform(random_model(family), 2.0, calibration=random_ids(2, 40), spec=spec)
    held = encoded_experts(model)
    assert held.keys() == {sketch.path for sketch in plan.sketches}
    for sketch in plan.sketches:
        real = {name: t.numel() * t.element_size() for name, t in held[sketch.path].state_dict().items()}
        assert encoded_sizes(plan, sketch, spec) == real
    found = forecast(plan, spec, 0)
    assert found.encoded == sum(experts.encoded_bytes() for experts in held.values())
    assert found.rooms.keys() == {group_of(name) for experts in held.values() for name in experts.state_dict()}


def test_a_limit_on_memory(random_model, tmp_path):
    plan = outline(open_source(sources.per_expert(random_model("qwen3_moe"), tmp_path / "source")))
    found = forecast(plan, EncodeSpec(group_size=32), 0)
    check_memory(plan, found, None)
    check_memory(plan, found, found.memory)
    with pytest.raises(ValueError, match="of which its largest layer, model.layers.0, takes"):
        check_memory(plan, found, found.memory - 1)
