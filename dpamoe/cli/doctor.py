"""`dpamoe doctor`: versions, devices, and whether the ops give the right numbers on this machine."""

import importlib.metadata
import importlib.util
import platform

import torch

import dpamoe.kernels.ops  # noqa: F401  registers torch.ops.dpamoe
from dpamoe.encode import encode
from dpamoe.kernels import reference
from dpamoe.spec import EncodeSpec

NAME = "doctor"
HELP = "say what this machine has and whether dpamoe computes correctly on it"
PACKAGES = ("dpamoe", "torch", "transformers", "triton", "safetensors", "accelerate", "numpy", "matplotlib", "lm_eval")
TOLERANCE = 1e-4  # fp32 sums of 64 products in another order


def arguments(parser) -> None:
    """This command has no flags of its own."""


def run(args) -> dict:
    """Collect versions and devices, and run the self-test on each device."""
    versions = {name: _version(name) for name in PACKAGES}
    devices = {"cpu": {"name": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}}
    for number in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(number)
        capability = f"{properties.major}.{properties.minor}"
        devices[f"cuda:{number}"] = {"name": properties.name, "bytes": properties.total_memory, "capability": capability}
    checks = {device: self_test(device) for device in devices}
    return {"python": platform.python_version(), "versions": versions, "devices": devices, "ops": checks,
            "failed": not all(check == "ok" for check in checks.values())}  # fmt: skip


def _version(name: str) -> str | None:
    if importlib.util.find_spec(name) is None:
        return None
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def self_test(device: str) -> str:
    """Encode random experts and compare the whole routed op with the reference; "ok", or what went wrong."""
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    spec = EncodeSpec(group_size=32)
    up, down = encode(random(4, 96, 64), spec), encode(random(4, 64, 48), spec)
    ids, gates = torch.tensor([[0, 1], [3, 4], [2, 2]]), random(3, 2).softmax(-1)
    table = 4.0 ** -torch.arange(9).float().expand(4, -1).contiguous()
    weights = [(w.planes, w.scales, w.offset, w.unit, None) for w in (up, down)]
    x, budget, k_max = random(3, 64), torch.tensor(3.5), torch.tensor(8)
    chunks = reference.allocate(gates, ids, table, budget, k_max, 2)
    expected = reference.expert_ffn(x, ids, gates, chunks, *weights, "silu_mul", 32)
    try:
        moved = [[_to(part, device) for part in weight] for weight in weights]
        inputs = [_to(part, device) for part in (x, ids, gates, table, budget, k_max)]
        found = torch.ops.dpamoe.routed_ffn(*inputs, *moved[0], *moved[1], "silu_mul", 32, 2)[0].cpu()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    worst = float((found - expected).abs().max() / expected.abs().max())
    return "ok" if worst <= TOLERANCE else f"results are off by {worst:.1e} relative"


def _to(part, device: str):
    if isinstance(part, list):
        return [tensor.to(device) for tensor in part]
    return None if part is None else part.to(device)


def show(outcome: dict) -> str:
    """Versions, devices, verdict."""
    lines = [f"python {outcome['python']}"]
    lines += [f"{name} {version or 'not installed'}" for name, version in outcome["versions"].items()]
    for device, facts in outcome["devices"].items():
        described = ", ".join(f"{key} {value}" for key, value in facts.items())
        lines.append(f"{device}: {described}; ops: {outcome['ops'][device]}")
    if len(outcome["devices"]) == 1:
        lines.append("no CUDA device: everything runs on the CPU")
    return "\n".join(lines)
