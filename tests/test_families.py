"""Every block of routed experts in the installed transformers: found, verified, replaced and equal to itself; the README table.

The list is made by walking the package, so that a new release is covered by itself: what it brings is right or refused with
a reason, and a refusal of what the table does not name yet is an expected failure. Run as a script, this file writes the
table anew.
"""

import ast
import copy
import functools
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

import dpamoe
from dpamoe.kernels.grouped import decode
from dpamoe.modules import encoded_experts
from dpamoe.program import by_expert
from dpamoe.sites import ExpertWeights, Site, scatter

README = Path(__file__).resolve().parents[1] / "README.md"
MARKS = ("<!-- table: families -->", "<!-- end: families -->")
AT_LEAST = 76
# model type: part of the reason why its block is refused today
REFUSED = {
    "doge": "hidden [T, H], index [T, A] and weights [T, A]",
    "nllb_moe": "do not reproduce its output",
}
EXPERTS, ACTIVE, HIDDEN, INNER, LATENT = 8, 2, 32, 24, 16
SMALL = {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), EXPERTS),
    **dict.fromkeys(
        ("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_top_k", "moe_topk", "top_k", "top_k_experts"), ACTIVE
    ),
    **dict.fromkeys(("hidden_size", "d_model"), HIDDEN),
    **dict.fromkeys(
        (
            "intermediate_size", "moe_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size", "d_ff", "ffn_dim",
            "encoder_ffn_dim", "decoder_ffn_dim", "intermediate_size_mlp", "shared_expert_intermediate_size",
            "shared_intermediate_size", "moe_shared_expert_intermediate_size",
        ),
        INNER,
    ),
    **dict.fromkeys(("moe_hidden_size", "moe_latent_size", "router_hidden_size", "moe_router_hidden_size"), LATENT),
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 64,
    "n_group": 2, "topk_group": 1, "n_shared_experts": 1, "num_shared_experts": 1, "moe_num_shared_experts": 1,
    "zero_expert_num": 2, "expert_capacity": 64, "sparse_step": 1, "kv_channels": 8, "pad_token_id": 0,
}  # fmt: skip
EMPTY = (1, 0)
SIZES = [EMPTY, (1, 1), (1, 7), (1, 64), (3, 5)]  # batch and length; transformed with (2, 24)
NAMES = {
    "graph": "other, kept as a graph",
    "silu_mul": "silu(gate) · up",
    "gelu_tanh_mul": "gelu(gate) · up",
    "swigluoai": "clamped swiglu",
    "relu2": "relu²",
}
# Settings that a config leaves at None unless its model is a mixture.
UNSET = {
    "n_group", "topk_group", "moe_intermediate_size", "num_experts_per_tok", "n_routed_experts", "num_local_experts",
    "num_experts", "top_k_experts", "shared_expert_intermediate_size", "n_shared_experts",
}  # fmt: skip


@dataclass(frozen=True)
class Block:
    """A class that holds routed experts: its model type, its name, and the class of the experts, itself if there is none."""

    family: str
    name: str
    experts: str

    def __str__(self) -> str:
        return f"{self.family}-{self.name}"


@functools.cache
def blocks() -> tuple[Block, ...]:
    """Every class of the installed transformers that makes a module `…Experts`, or is a mixture with experts of its own."""
    import transformers

    found = []
    for path in sorted((Path(transformers.__file__).parent / "models").glob("*/modeling_*.py")):
        text = path.read_text(encoding="utf-8")
        if "xpert" in text:
            classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
            names = {node.name for node in classes if node.name.endswith("Experts")}
            found += [Block(path.parent.name, node.name, made) for node in classes if (made := _made(node, names))]
    return tuple(found)


def _made(node: ast.ClassDef, experts: set[str]) -> str | None:
    """Which class of experts the constructor of a class makes; its own name for a mixture that routes by itself."""
    methods = {item.name: item for item in node.body if isinstance(item, ast.FunctionDef)}
    if "__init__" not in methods or "forward" not in methods or isinstance(methods["forward"].body[-1], ast.Raise):
        return None  # mixtures of attention heads cannot be called at all
    if experts:
        called = {c.func.id for c in ast.walk(methods["__init__"]) if isinstance(c, ast.Call) and isinstance(c.func, ast.Name)}
        return min(called & experts, default=None)
    routes = re.search("Mo[eE]$", node.name) and any(getattr(c, "attr", "") == "topk" for c in ast.walk(methods["forward"]))
    return node.name if routes else None


class Parent(nn.Module):
    """Holds a block, so that it can be replaced, and returns its first output."""

    def __init__(self, block: nn.Module):
        super().__init__()
        self.block = block

    def forward(self, hidden):
        result = self.block(hidden)
        return result[0] if isinstance(result, tuple) else result


class Layer(nn.Module):
    """Router and experts of models whose decoder layer holds both."""

    def __init__(self, router: nn.Module, experts: nn.Module):
        super().__init__()
        self.router, self.experts = router, experts

    def forward(self, hidden):
        rows = hidden.flatten(0, -2)
        _, weights, index = self.router(rows)
        return self.experts(rows, index, weights).view_as(hidden)


def shrink(config) -> None:
    """Make a config and all configs in it small, in place."""
    for key, size in SMALL.items():
        try:
            held = getattr(config, key)
            if isinstance(held, bool) or callable(held) or (held is None and key not in UNSET):
                continue
            setattr(config, key, [size] * len(held) if isinstance(held, list | tuple) else size)
        except Exception:  # absent, read-only, or different for each layer
            if key in UNSET:
                config.__dict__[key] = size
    if hasattr(config, "enable_moe_block"):
        config.enable_moe_block = True
    if getattr(config, "mlp_layer_types", None):
        config.mlp_layer_types = config.mlp_layer_types[-1:] * SMALL["num_hidden_layers"]  # the last layer is a mixture
    config._experts_implementation = "eager"
    for inner in inner_configs(config):
        shrink(inner)


def inner_configs(config) -> list:
    return [held for held in vars(config).values() if hasattr(held, "to_dict") and hasattr(held, "model_type")]


def configs(block: Block, module, target: type):
    """Small configs to try, the one that the class itself names first."""
    from transformers import PreTrainedConfig

    source = importlib.import_module(module.__name__.replace("modeling_", "configuration_"))
    known = [c for c in vars(source).values() if inspect.isclass(c) and issubclass(c, PreTrainedConfig)]
    known = [c for c in known if c.__module__ == source.__name__]
    known.sort(key=lambda c: ("Text" not in c.__name__, "Vision" in c.__name__))
    parameter = inspect.signature(target.__init__).parameters.get("config")
    named = parameter.annotation if parameter is not None else None
    named = getattr(module, named, None) if isinstance(named, str) else named
    first = [c for c in known if "Vision" in c.__name__] if "Vision" in block.name else []
    for kind in [*([named] if inspect.isclass(named) and issubclass(named, PreTrainedConfig) else []), *first, *known]:
        config = kind()
        shrink(config)
        yield config
        waiting = inner_configs(config)
        while waiting:
            yield (config := waiting.pop(0))
            waiting += inner_configs(config)


def build(block: Block, dtype: torch.dtype) -> Parent:
    """A tiny block of random weights and small buffers; what it makes in fp32 whatever the dtype stays so."""
    module = importlib.import_module(f"transformers.models.{block.family}.modeling_{block.family}")
    in_layer = block.name.endswith("Layer")
    target = getattr(module, block.experts if in_layer else block.name)
    errors = []
    for config in configs(block, module, target):
        torch.set_default_dtype(dtype)
        try:
            made = _layer(module, target, config) if in_layer else target(**_arguments(target, config))
        except Exception as error:  # a config of another part of the model
            errors.append(f"{type(config).__name__}: {type(error).__name__}: {error}")
            continue
        finally:
            torch.set_default_dtype(torch.float32)
        random = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=random) * 0.3)
            for buffer in made.buffers():
                if buffer.is_floating_point():
                    buffer.copy_(torch.rand(buffer.shape, generator=random) * 0.1)
        return Parent(made).eval()
    raise RuntimeError(f"no config builds {block}: " + " | ".join(errors))


def _layer(module, experts: type, config) -> Layer:
    (router,) = (c for name, c in vars(module).items() if name.endswith("Router") and c.__module__ == module.__name__)
    return Layer(router(config), experts(config))


def _arguments(target: type, config) -> dict:
    numbers = {
        "layer_idx": 1, "layer_id": 1, "ffn_dim": INNER, "num_experts": EXPERTS, "top_k": ACTIVE, "intermediate_size": INNER,
    }  # fmt: skip
    taken = inspect.signature(target.__init__).parameters
    first = "config" if "config" in taken else next(name for name in taken if name != "self")
    wanted = {name for name, p in taken.items() if p.default is inspect.Parameter.empty or name == "layer_idx"}
    return {first: config, **{name: value for name, value in numbers.items() if name in wanted and name != first}}


def hidden(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, HIDDEN, generator=torch.Generator().manual_seed(sum(shape)))


@functools.cache
def walked(block: Block, dtype: torch.dtype) -> tuple[Parent, Parent, str]:
    """A block, its twin transformed at k = 8, and why it was refused, empty where it was not. To be read only."""
    original = build(block, dtype)
    model, inputs = copy.deepcopy(original), (hidden(2, 24).to(dtype),)
    try:
        dpamoe.transform(model, 8, example_inputs=inputs, calibration=[inputs], spec=dpamoe.EncodeSpec(group_size=8))
    except ValueError as error:
        return original, model, str(error)
    return original, model, "; ".join(dpamoe.report(model).refused.values())


def write_back(original: nn.Module, model: nn.Module) -> nn.Module:
    """A copy of `original` with the weights that `model` decodes from all its planes."""
    twin = copy.deepcopy(original)
    for encoded in encoded_experts(model).values():
        up, down = (decode(part.weight, len(part.weight.planes)) for part in (encoded.gate_up_proj, encoded.down_proj))
        scatter(
            ExpertWeights(up, down, encoded.up_bias, encoded.down_bias),
            twin.get_submodule(encoded.site.path),
            encoded.site.layout,
        )
    return twin


def check_equal(block: Block, dtype: torch.dtype, tolerance: dict, shapes: list[tuple[int, int]] = SIZES) -> None:
    """Equal to the original with decoded weights at every size, relative to the largest output; or refused as announced."""
    original, model, reason = walked(block, dtype)
    if block.family in REFUSED:
        assert not encoded_experts(model) and REFUSED[block.family] in reason
        return
    if not encoded_experts(model) and block.family not in split_readme()[1]:
        pytest.xfail(f"new in this release of transformers, and refused: {reason}")
    assert reason == "" and len(encoded_experts(model)) == 1
    reference = write_back(original, model)
    for shape in shapes:
        inputs = hidden(*shape).to(dtype)
        with torch.no_grad():
            try:
                expected = reference(inputs)
            except RuntimeError:
                assert shape == EMPTY  # some blocks cannot run on nothing
                continue
            found = model(inputs)
        assert found.dtype == expected.dtype and found.shape == expected.shape
        size = expected.abs().max().clamp_min(1e-6) if expected.numel() else 1.0
        torch.testing.assert_close(found / size, expected / size, **tolerance)
    with torch.no_grad():
        assert not torch.equal(found, original(inputs))  # the weights that were written back are not the original ones


@pytest.mark.parametrize("block", blocks(), ids=str)
def test_every_block_equals_itself_with_decoded_weights(block, tolerance):
    check_equal(block, torch.float32, tolerance(torch.float32))


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks(), ids=str)
def test_every_block_in_bf16(block, tolerance):
    check_equal(block, torch.bfloat16, tolerance(torch.bfloat16))


@pytest.mark.slow
@pytest.mark.parametrize("block", blocks(), ids=str)
def test_every_block_on_many_tokens(block, tolerance):
    check_equal(block, torch.float32, tolerance(torch.float32), [(1, 513)])


def test_nearly_all_blocks_are_supported():
    """What is refused is named with its reason in `REFUSED`; the tests above hold both sides."""
    walk = blocks()
    supported = [block for block in walk if encoded_experts(walked(block, torch.float32)[1])]
    assert len(supported) >= AT_LEAST
    refused = {block.family for block in walk} - {block.family for block in supported}
    assert {family for family in refused if family in split_readme()[1]} == set(REFUSED)


def stored(site: Site) -> str:
    """How a site stores its experts and what is special about it, in words."""
    layout = site.layout
    words = ["a module each" if len(layout.down.names) > 1 else "stacked"]
    words += ["[I, O]"] if layout.down.transposed else []
    words += ["gate and up apart"] if len(layout.ups) > 1 else []
    words += [layout.order] if layout.order != "rows" else []
    words += ["biases"] if layout.up_biases or layout.down_bias else []
    words += ["index as a mask"] if site.masked else []
    words += ["identity experts"] if site.identity else []
    words += ["gate on the input"] if site.weigh_input else []
    words += ["no module of their own"] if site.block else []
    words += ["norm behind the experts" if not by_expert(site.post) else "a norm behind each expert"] if site.post else []
    return ", ".join(words)


def table() -> str:
    """The support table of README.md: one line for each activation and layout."""
    import transformers

    groups: dict[tuple[str, str], list[str]] = {}
    for block in blocks():
        _, model, _ = walked(block, torch.float32)
        sites = [encoded.site for encoded in encoded_experts(model).values()]
        key = ("", "") if not sites else (NAMES.get(sites[0].activation, sites[0].activation), stored(sites[0]))
        groups.setdefault(key, []).append(block.family)
    refused = groups.pop(("", ""), [])
    count = sum(map(len, groups.values()))
    lines = [f"{count} of {count + len(refused)} blocks of transformers {transformers.__version__}:", ""]
    lines += ["| activation | experts | model types |", "|---|---|---|"]
    lines += [
        f"| {activation} | {layout} | {', '.join(dict.fromkeys(families))} |"
        for (activation, layout), families in sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
    ]
    return "\n".join([*lines, f"| refused, with a reason | | {', '.join(dict.fromkeys(refused))} |"])


def split_readme() -> tuple[str, str, str]:
    """What stands before the table in README.md, the table, and what follows."""
    before, rest = README.read_text(encoding="utf-8").split(MARKS[0])
    between, after = rest.split(MARKS[1])
    return before, between.strip("\n"), after


def test_readme_shows_what_the_walk_finds():
    import transformers

    _, shown, _ = split_readme()
    if f"transformers {transformers.__version__}:" not in shown:
        pytest.skip("the table in README.md is of another release of transformers")
    assert shown == table(), "run `python tests/test_families.py`, which writes it"


def write_readme() -> None:
    """Put the table into README.md."""
    before, _, after = split_readme()
    README.write_text(f"{before}{MARKS[0]}\n{table()}\n{MARKS[1]}{after}", encoding="utf-8")


if __name__ == "__main__":
    write_readme()
