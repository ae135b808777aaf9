"""Random weights at the shape of a real model: a config by name, its routed experts encoded or in bf16, made on the device.

Nothing is trained and nothing is encoded: planes are random bits and scales are plausible, so a layer of billions of weights
is there in a moment and costs what a real one costs.
"""

import copy
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from dpamoe import calibration, checkpoint
from dpamoe.kernels.layout import EncodedWeight, groups_of
from dpamoe.kernels.reference import ACTIVATIONS, is_gated
from dpamoe.modules import EncodedExperts
from dpamoe.passes import weightless
from dpamoe.sites import Site
from dpamoe.spec import EncodeSpec
from dpamoe.threshold import count_gates

DTYPE = torch.bfloat16  # of everything that is not encoded
STD = 0.02
CALIBRATION = 4096  # tokens whose gates thresholds are found on
LOOKED_AT = 4  # layers that are searched for experts; most models repeat one or two kinds


def read_config(source: str, changes: dict | None = None):
    """Config of a model folder, of a model type of transformers such as qwen3_moe (its defaults), or of a name on the hub.

    changes: fields to set, "text_config.num_hidden_layers" for one inside another config; lists with an entry per layer
    follow the number of layers. Raises ValueError for an unknown source or field, or values that the config refuses.
    """
    from huggingface_hub.errors import StrictDataclassError

    config = _config(source)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    if not changes:
        return config
    try:
        for name, value in changes.items():
            _set(config, name, value)
        return type(config).from_dict({k: v for k, v in config.to_dict().items() if k != "transformers_version"})
    except (StrictDataclassError, TypeError, ValueError) as error:
        given = ", ".join(f"{name}={value!r}" for name, value in changes.items())
        raise ValueError(f"the config of {source} does not take {given}: {error}") from error


def _config(source: str):
    from transformers import CONFIG_MAPPING, AutoConfig

    if Path(source).is_dir():
        checkpoint.read_config(source)
        return AutoConfig.from_pretrained(source)
    if source in CONFIG_MAPPING:
        return AutoConfig.for_model(source)
    unknown = f"{source} is no folder with a config.json and no model type of transformers such as qwen3_moe"
    if source.count("/") != 1:
        raise ValueError(f"{unknown}, nor a name on the hub such as owner/model")
    try:
        return AutoConfig.from_pretrained(source)
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"{unknown}, and the hub gave no config of that name ({reason})") from error


def _set(config, name: str, value) -> None:
    *parents, field = name.split(".")
    for parent in parents:
        config = getattr(config, parent, None)
    if not hasattr(config, field):
        raise ValueError(f"it has no field {name}")
    if field == "num_hidden_layers" and isinstance(value, int):
        for key, held in vars(config).items():
            if isinstance(held, list) and len(held) == config.num_hidden_layers != value:
                setattr(config, key, (held * -(-value // len(held)))[:value] if held else held)
    setattr(config, field, value)


def held_spec(source: str, group_size: int | None, scale_mode: str | None) -> EncodeSpec:
    """How a source is encoded, where it is an encoded folder, else by default; arguments that are not None replace it."""
    known = {}
    if Path(source).is_dir() and checkpoint.is_encoded(source):
        settings = checkpoint.read_config(source)["quantization_config"]
        known = {name: settings[name] for name in EncodeSpec.__dataclass_fields__ if name in settings}
    wanted = {"group_size": group_size, "scale_mode": scale_mode}
    return EncodeSpec(**known | {name: value for name, value in wanted.items() if value is not None})


def skeleton(config) -> nn.Module:
    """The language model of a config, parameters in bf16 on the meta device, buffers in memory.

    Raises ValueError if there is none, or where its sizes and names make no model.
    """
    from accelerate import init_empty_weights
    from transformers import AutoModelForCausalLM

    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(
            f"{type(config).__name__} belongs to no language model of transformers: use the config of its text model"
        )
    config = copy.deepcopy(config)
    try:
        with init_empty_weights(include_buffers=False):
            model = AutoModelForCausalLM.from_config(config, dtype=DTYPE)
    except (ArithmeticError, AssertionError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ValueError(
            f"transformers makes no {config.model_type} model of this config ({type(error).__name__}: {error}): "
            "use sizes and names that it takes"
        ) from error
    model.tie_weights()
    return model.eval()


def with_sites(config, spec: EncodeSpec) -> tuple[nn.Module, list[Site]]:
    """The skeleton of a config and its routed experts, in order.

    They are looked for in the first few layers; modules of the same class and shapes in further layers are the same experts.
    Raises ValueError if there are none, the group size does not fit, or an activation is not fused.
    """
    model = skeleton(config)
    text = config.get_text_config()
    if getattr(text, "num_hidden_layers", 0) > LOOKED_AT:
        few = copy.deepcopy(config)
        _set(few.get_text_config(), "num_hidden_layers", LOOKED_AT)
        short = skeleton(few)
        kinds = {_kind(short.get_submodule(sketch.path)): sketch for sketch in _sketches(short) if not sketch.reason}
        classes = {kind[0] for kind in kinds}
        alike = {path: _kind(module) for path, module in model.named_modules() if type(module) in classes}
        if kinds and kinds.keys() >= set(alike.values()):
            return model, [_site(replace(kinds[kind], path=path), spec) for path, kind in alike.items()]
    sketches = _sketches(model)
    found = [_site(sketch, spec) for sketch in sketches if not sketch.reason]
    if not found:
        looked_at = {sketch.reason: sketch.path for sketch in reversed(sketches)}  # the first of every reason
        reasons = "; ".join(f"{path}: {reason}" for reason, path in looked_at.items()) or "it looks dense"
        raise ValueError(f"no routed experts with a module of their own were found in {type(model).__name__} ({reasons})")
    return model, found


def _kind(module: nn.Module) -> tuple:
    return type(module), tuple((name, tuple(parameter.shape)) for name, parameter in module.named_parameters())


def _sketches(model: nn.Module) -> list[weightless.Sketch]:
    try:
        return weightless.sketch_sites(model, *calibration.example_batch(model, None))
    except (NotImplementedError, RuntimeError) as error:
        raise ValueError(
            f"{type(model).__name__} does not run without its weights ({error}): use another model, or sizes that go together"
        ) from error


def _site(sketch: weightless.Sketch, spec: EncodeSpec) -> Site:
    if sketch.activation not in ACTIVATIONS:
        raise ValueError(
            f"the activation of {sketch.path} is not fused, so random experts cannot stand for it: "
            f"use a model with {', '.join(ACTIVATIONS)}"
        )
    if not 1 <= sketch.top_k <= sketch.experts:
        raise ValueError(
            f"{sketch.path} chooses {sketch.top_k} of {sketch.experts} experts for a token: use 1 to {sketch.experts}"
        )
    narrowest = min(sketch.hidden, sketch.inner)
    if spec.group_size > narrowest:
        raise ValueError(
            f"group_size {spec.group_size} exceeds the {narrowest} inputs of {sketch.path}: use at most {narrowest}, "
            "or -1 for whole rows"
        )
    up_rows = sketch.inner * (2 if is_gated(sketch.activation) else 1)
    return Site(
        sketch.path, sketch.experts, sketch.top_k, sketch.hidden, sketch.inner, sketch.out, up_rows, sketch.activation,
        sketch.layout, sketch.parameters, sketch.dtype, router=sketch.router,
    )  # fmt: skip


def distinct(sites: list[Site]) -> list[Site]:
    """The first site of every shape."""
    seen: dict[tuple, Site] = {}
    for site in sites:
        biased = (bool(site.layout.up_biases), site.layout.down_bias is not None)
        shape = (site.experts, site.top_k, site.hidden, site.inner, site.out, site.activation, biased)
        seen.setdefault(shape, site)
    return list(seen.values())


def encoded_weight(
    experts: int, out_features: int, in_features: int, spec: EncodeSpec, generator: torch.Generator
) -> EncodedWeight:
    """A stacked weight [E, O, I] of random planes, its decoded values about 1 / sqrt(I)."""
    device, size = generator.device, in_features**-0.5
    lead, groups = (experts, out_features), groups_of(in_features, spec.group_size)

    def integers(low: int, high: int, last: int, dtype: torch.dtype) -> Tensor:
        return torch.randint(low, high, (*lead, last), dtype=dtype, device=device, generator=generator)

    def floats(scale: float) -> Tensor:
        return (scale * (0.5 + torch.rand(*lead, groups, device=device, generator=generator))).half()

    planes = [integers(0, 256, -(-in_features // 8), torch.uint8) for _ in range(spec.k_max)]
    if in_features % 8:
        for plane in planes:
            plane[..., -1] &= (1 << in_features % 8) - 1  # spare bits are 0
    if spec.scale_mode == "tied":
        unit = size * (0.5 + torch.rand(experts, device=device, generator=generator))
        scales, offset = [integers(180, 256, groups, torch.uint8)], integers(-20, 21, groups, torch.int8)
        return EncodedWeight(planes, scales, offset, unit, in_features, spec.group_size)
    offset = floats(0.1 * size)
    return EncodedWeight(planes, [floats(size * 0.5**c) for c in range(spec.k_max)], offset, None, in_features, spec.group_size)


def encoded_layer(site: Site, spec: EncodeSpec, device: torch.device, seed: int = 0) -> EncodedExperts:
    """The experts of a site at random, encoded: residuals fall by 4 with each plane, experts differ by a factor of about 3."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=generator)

    up = encoded_weight(site.experts, site.up_rows, site.hidden, spec, generator)
    down = encoded_weight(site.experts, site.out, site.inner, spec, generator)
    up_bias = normal(site.experts, site.up_rows).mul_(STD).to(DTYPE) if site.layout.up_biases else None
    down_bias = normal(site.experts, site.out).mul_(STD).to(DTYPE) if site.layout.down_bias else None
    falls = 0.25 ** torch.arange(spec.k_max + 1, device=device)
    residuals = (normal(site.experts, 1) / 2).exp() * falls
    return EncodedExperts(site, spec, up, down, up_bias, down_bias, residuals).eval()


def weigh(experts: EncodedExperts, device: torch.device, seed: int = 0) -> None:
    """Let thresholds be found on the gates of CALIBRATION tokens of `routing`, with sensitivity 1."""
    _, index, weights = routing(experts.site, CALIBRATION, device, seed)
    experts.set_importance(torch.ones((), device=device), count_gates(weights, index, experts.site.experts).int())


def plain_layer(model: nn.Module, site: Site, device: torch.device, implementation: str, seed: int = 0) -> nn.Module:
    """The experts of a site at random, in bf16, as transformers computes them with one of its implementations.

    Raises ValueError if transformers computes these experts in one way only.
    """
    module = copy.deepcopy(model.get_submodule(site.path))
    if not hasattr(module, "_apply_gate") or not hasattr(module, "config"):
        raise ValueError(
            f"transformers computes the experts of {type(model).__name__} in one way only: leave {implementation} out of "
            "the baselines"
        )
    module.config._experts_implementation = implementation
    return fill(module, device, seed)


def fill(module: nn.Module, device: torch.device, seed: int = 0) -> nn.Module:
    """Random numbers for all parameters on the meta device, and everything else moved; in place, returned.

    Matrices are normal with deviation 0.02, vectors (norms, mostly) are 1, biases 0. Parameters that were one stay one.
    """
    generator = torch.Generator(device).manual_seed(seed)
    made: dict[int, nn.Parameter] = {}
    for owner in module.modules():
        for name, parameter in owner._parameters.items():
            if parameter is None or not parameter.is_meta:
                continue
            if id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                if name.endswith("bias"):
                    empty.zero_()
                elif empty.dim() < 2:
                    empty.fill_(1.0)
                else:
                    empty.normal_(std=STD, generator=generator)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=False)
            owner._parameters[name] = made[id(parameter)]
    return module.to(device).eval()


def encoded_model(config, sites: list[Site], spec: EncodeSpec, device: torch.device) -> nn.Module:
    """A whole model at random with encoded experts at its sites, made on the device, never in full precision."""
    model = skeleton(config)
    for number, site in enumerate(sites):
        parent, _, name = site.path.rpartition(".")
        setattr(model.get_submodule(parent), name, encoded_layer(site, spec, device, number))
    return fill(model, device)


def plain_model(config, device: torch.device, implementation: str) -> nn.Module:
    """The same model in bf16, its experts computed by one of transformers' implementations."""
    model = skeleton(config)
    model.set_experts_implementation(implementation)
    return fill(model, device)


def routing(site: Site, tokens: int, device: torch.device, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """hidden [T, H] and weights [T, A] in bf16, index int64 [T, A]: the largest of random softmax scores, made to sum to 1."""
    generator = torch.Generator(device).manual_seed(seed)
    hidden = torch.randn(tokens, site.hidden, device=device, generator=generator).to(DTYPE)
    scores = torch.randn(tokens, site.experts, device=device, generator=generator).softmax(-1)
    weights, index = scores.topk(site.top_k, dim=-1)
    return hidden, index, (weights / weights.sum(-1, keepdim=True)).to(DTYPE)
