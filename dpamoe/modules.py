"""The modules that stand in a transformed model: encoded experts behind an untouched router."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor, nn

import dpamoe.kernels.ops  # noqa: F401  registers torch.ops.dpamoe
from dpamoe import program
from dpamoe.allocate import allocation_gates, allocation_table
from dpamoe.kernels import paths
from dpamoe.kernels.allocation import is_convex
from dpamoe.kernels.layout import EncodedWeight
from dpamoe.kernels.reference import ACTIVATIONS, is_gated
from dpamoe.sites import Site, chosen
from dpamoe.spec import EncodeSpec, SpendSpec
from dpamoe.threshold import ALWAYS, Layer, curve, falls, follow, level_for, thresholds


class TensorList(nn.Module):
    """Tensors under the names 0, 1, 2, … so that the checkpoint calls them plane.0, plane.1, …

    Behind those that are held there may be stand-ins: tensors of the same shape over the memory of the first one, in no
    state_dict, that are never read. A compiled graph takes the whole list, so that dropping planes recompiles nothing.
    """

    def __init__(self, tensors: list[Tensor]):
        super().__init__()
        self.held = len(tensors)
        for position, tensor in enumerate(tensors):
            self.register_buffer(str(position), tensor)

    def as_list(self) -> list[Tensor]:
        """The tensors held, in order."""
        return list(self._buffers.values())[: self.held]

    def forward(self) -> list[Tensor]:
        """The tensors held, then the stand-ins; called, not read, so that hooks of offloading bring the tensors first."""
        return list(self._buffers.values())

    def hold(self, tensors: list[Tensor], count: int) -> None:
        """Hold these tensors, and stand-ins for the rest of `count`; none while accelerate has the numbers elsewhere."""
        first, self.held = tensors[0], len(tensors)
        count = self.held if first.is_meta else count
        for position in range(count):
            stand_in = position >= self.held
            tensor = first.new_empty(0).set_(first) if stand_in else tensors[position]
            self.register_buffer(str(position), tensor, persistent=not stand_in)

    def _apply(self, fn, recurse=True):
        count, held = len(self._buffers), self.as_list()
        for position in range(self.held, count):  # each would become a copy of its own
            del self._buffers[str(position)]
        moved = super()._apply(fn, recurse)
        if count > len(held):
            self.hold(self.as_list(), count)
        return moved


class EncodedTensor(nn.Module):
    """One stacked weight as planes, scales and offsets; tensors as in `kernels.layout`."""

    def __init__(self, weight: EncodedWeight):
        super().__init__()
        self.in_features, self.group_size = weight.in_features, weight.group_size
        self.plane = TensorList(weight.planes)
        tied = weight.unit is not None
        if tied:
            self.register_buffer("scale", weight.scales[0])
        else:
            self.scale = TensorList(weight.scales)
        self.register_buffer("offset", weight.offset)
        self.register_buffer("unit", weight.unit)

    @property
    def weight(self) -> EncodedWeight:
        """The tensors held, as the kernels take them."""
        scales = self.scale.as_list() if self.unit is None else [self.scale]
        return EncodedWeight(self.plane.as_list(), scales, self.offset, self.unit, self.in_features, self.group_size)

    def forward(self) -> EncodedWeight:
        """As `weight`, with the stand-ins of dropped planes; see `TensorList`."""
        scales = self.scale() if self.unit is None else [self.scale]
        return EncodedWeight(self.plane(), scales, self.offset, self.unit, self.in_features, self.group_size)

    def hold(self, planes: list[Tensor], scales: list[Tensor], count: int) -> None:
        """Hold these planes, and stand-ins for the rest of `count`; tied scales stay as they are."""
        self.plane.hold(planes, count)
        if self.unit is None:
            self.scale.hold(scales, count)


class EncodedExperts(nn.Module):
    """Stands where an experts module stood: (hidden [T, H] or [B, S, H], index [T, A], weights [T, A]) to the shape of hidden.

    The budget (fp32 0-d) and k_max (int 0-d) are buffers, so changing them recompiles nothing. residuals fp32 [E, C + 1],
    column k the error of an expert with k planes, always whole. Encoded tensors, residuals and budget keep their dtype when
    the model is cast. parameters: those that the site's programs read. `spent` counts the pairs with each number of planes,
    padding under 0, and `skipped` those among them that hold an expert. `target` and `shift`: planes per pair that calibration
    text got here from the thresholds, and octaves by which they are raised to hold it.
    """

    def __init__(
        self, site: Site, spec: EncodeSpec, up: EncodedWeight, down: EncodedWeight,
        up_bias: Tensor | None, down_bias: Tensor | None, residuals: Tensor, parameters: dict[str, Tensor] | None = None,
    ):  # fmt: skip
        super().__init__()
        device = residuals.device
        self.site, self.spec, self.original = site, spec, []
        self.unreached: list[int] = []
        self.act = None if site.program is None else program.to_module(site.program, parameters)
        self.post = program.after(site, parameters)
        self.by_expert = program.by_expert(site.program) or program.by_expert(site.post)
        self.gate_up_proj, self.down_proj = EncodedTensor(up), EncodedTensor(down)
        self.register_buffer("up_bias", up_bias)
        self.register_buffer("down_bias", down_bias)
        self.register_buffer("residuals", residuals)
        self.register_buffer("table", residuals, persistent=False)
        self.convex = False  # until a table is chosen
        self.register_buffer("uniform_table", residuals, persistent=False)  # never None, which accelerate cannot move
        self.uniform_from: int | None = None
        self.register_buffer("budget", torch.full((), float(len(up.planes)), device=device), persistent=False)
        self.register_buffer("k_max", torch.full((), len(up.planes), dtype=torch.int32, device=device), persistent=False)
        spent = torch.zeros(residuals.shape[1], dtype=torch.long, device=device)
        self.register_buffer("spent", spent, persistent=False)
        self.register_buffer("skipped", torch.zeros((), dtype=torch.long, device=device), persistent=False)
        self.spend = SpendSpec(budget=float(len(up.planes)))
        self.register_buffer("sensitivity", None)  # until they are measured
        self.register_buffer("gate_counts", None)
        self.register_buffer("thresholds", torch.full_like(residuals[:, 1:], ALWAYS), persistent=False)
        self.register_buffer("target", torch.zeros((), device=device), persistent=False)
        self.register_buffer("shift", torch.zeros((), device=device), persistent=False)
        self.level: float | None = None

    def set_spend(self, spend: SpendSpec, level: float | None = None) -> None:
        """Choose budget, allocation, scope, …; only a change of budget recompiles nothing.

        With the fallback "uniform", calls of `uniform_from` tokens or more give every expert the same planes; see
        `uniform_start`, whose ValueError leaves everything as it was. level: of the thresholds of a whole model (see
        `threshold.level_for`); None spends the budget on this layer alone.
        """
        start = uniform_start(self.site, self.spec, self.k_max.device, spend)
        if spend.allocator == "threshold" and level is None:
            level = level_for([self.priced(spend)], spend.budget)
        self.spend, self.uniform_from, self.level = spend, start, level
        self.budget.fill_(spend.budget)
        self.shift.zero_()
        with _brought(self):
            self._set_table()
            self.uniform_table = self.table
            if start is not None:
                self.uniform_table = allocation_table(self.residuals, "uniform", self.spec.k_min, spend.skip)

    def set_importance(self, sensitivity: Tensor, gate_counts: Tensor) -> None:
        """Take what `sensitivity.measure` found, as the allocator "threshold" needs it: fp32 0-d and int32 [E, BINS]."""
        device = self.residuals.device
        self.sensitivity, self.gate_counts = sensitivity.to(device), gate_counts.to(device)

    def priced(self, spend: SpendSpec) -> Layer:
        """What planes are worth here. Raises ValueError if sensitivity and gates were not measured."""
        if self.sensitivity is None:
            raise ValueError(
                f"allocator 'threshold' needs the sensitivity of {self.site.path}, which was not measured: transform with "
                "allocator='threshold', run `dpamoe profile` on the encoded folder, or use allocator 'exact'"
            )
        with _brought(self):
            worth = falls(self.residuals, self.spec.k_min, spend.skip) * float(self.sensitivity)
            return Layer(worth, self.gate_counts.cpu(), int(self.k_max))

    def set_residuals(self, residuals: Tensor) -> None:
        """Replace the residual table, fp32 [E, C + 1]; the level of thresholds stays."""
        self.residuals = residuals
        self._set_table()

    def _set_table(self) -> None:
        self.table = allocation_table(self.residuals, self.spend.allocation, self.spec.k_min, self.spend.skip)
        self.convex = not self.table.is_meta and is_convex(self.table, self.least)
        if self.level is not None:
            layer = self.priced(self.spend)
            self.thresholds.copy_(thresholds(layer.worth, self.level))
            self.target.fill_(curve([layer])(self.level))

    @property
    def follows(self) -> bool:
        """Whether the thresholds follow what is spent."""
        return self.spend.hold and self.spend.allocator == "threshold"

    @property
    def least(self) -> int:
        """Fewest planes of a selected expert: 0 if it may be skipped."""
        return self.spend.least(self.spec.k_min)

    def allocate(self, index: Tensor, weights: Tensor) -> Tensor:
        """Planes for each selected expert, int32 [T, A]."""
        name, seen, *rest = self._rule(index, weights)
        return getattr(torch.ops.dpamoe, name)(seen, index, *rest)

    def _rule(self, index: Tensor, weights: Tensor) -> tuple:
        """The op that allocates these pairs, the gates that it sees, and its arguments behind the ids."""
        allocation, table, scope, convex = self.spend.allocation, self.table, self.spend.scope, self.convex
        if self._falls_back(index):
            allocation, table, scope, convex = "uniform", self.uniform_table, "token", not self.spend.skip
        if self.spend.allocator == "threshold" and allocation == "dpa":
            own = self.thresholds * self.shift.exp2() if self.follows else self.thresholds
            return "allocate_threshold", weights, own, self.k_max, self.least
        seen = allocation_gates(weights, allocation, self.budget)  # a number that is there: nothing is launched for it
        name = "allocate_dispatch" if scope == "dispatch" else "allocate"
        return name, seen, table, self.budget, self.k_max, self.least, convex

    def _falls_back(self, index: Tensor) -> bool:
        return self.uniform_from is not None and index.shape[0] >= self.uniform_from

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        rows = hidden_states.flatten(0, -2)
        index, weights = top_k_index, top_k_weights  # as they are: a view in between would hide casts from the fusing pass
        if self.site.masked:
            index = chosen(top_k_index)
            weights = top_k_weights.view(index.shape)
        result, chunks = self.run(rows, index, weights)
        if self.spend.skip:
            self.skipped.add_(((chunks == 0) & (index >= 0) & (index < self.site.experts)).sum())
        if self.follows and not self._falls_back(index):
            follow(self.shift, chunks, (index >= 0) & (index < self.site.experts), self.target)
        if self.site.identity:
            kept = weights.masked_fill(index < self.site.experts, 0.0).sum(-1, keepdim=True)
            result = result + (kept * rows).to(result.dtype)
        return result.view(*hidden_states.shape[:-1], result.shape[-1])

    def run(self, rows: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """`compute` at the planes that `allocate` gives, [T, O], and these, int32 [T, A], which are counted.

        Without a compiler, whose passes fuse as much, by one op where there is one: the allocator has no launch of its own.
        """
        if not self.site.fused or self.spend.scope == "dispatch" or torch.compiler.is_compiling():
            chunks = self.allocate(index, weights)
            torch.ops.dpamoe.count(chunks, self.spent)
            return self.compute(rows, index, weights, chunks), chunks
        name, seen, table, *others = self._rule(index, weights)
        given = (self.spent, rows, index, weights, table)
        if name == "allocate_threshold":
            k_max, least = others
            return torch.ops.dpamoe.threshold_ffn_counted(*given, k_max, *self._block(), least)
        budget, k_max, *more = others
        return torch.ops.dpamoe.routed_ffn_counted(*given, budget, k_max, *self._block(), *more, self._gives_one_k(index), seen)

    @property
    def activation(self) -> Callable[[Tensor], Tensor]:
        """What stands between the matmuls, from [N, U] to [N, I], for `program.run`."""
        return ACTIVATIONS[self.site.activation] if self.act is None else self.act

    def compute(self, rows: Tensor, index: Tensor, weights: Tensor, chunks: Tensor) -> Tensor:
        """The experts alone, identity experts left out: rows [T, H] at the given planes, int32 [T, A], to [T, O]."""
        return (self._fused if self.site.fused else self._in_steps)(rows, index, weights, chunks)

    def _fused(self, rows: Tensor, index: Tensor, weights: Tensor, chunks: Tensor) -> Tensor:
        return torch.ops.dpamoe.expert_ffn(rows, index, weights, chunks, *self._block(), self._gives_one_k(index))

    def _block(self) -> tuple:
        """Both weights, biases, activation and group size, as the fused ops take them."""
        up, down = self.gate_up_proj(), self.down_proj()
        return (
            up.planes, up.scales, up.offset, up.unit, self.up_bias,
            down.planes, down.scales, down.offset, down.unit, self.down_bias,
            self.site.activation, self.spec.group_size,
        )  # fmt: skip

    def _in_steps(self, rows: Tensor, index: Tensor, weights: Tensor, chunks: Tensor) -> Tensor:
        """Activations that no kernel fuses stay plain torch between the two matmuls, so that a compiler sees them."""
        left_out = (chunks == 0)[..., None]  # padding too
        gates = weights.float()[..., None].masked_fill(left_out, 0.0)
        x = rows.float()[:, None] * gates if self.site.weigh_input else rows.float()
        inner = self._matmul(x, index, chunks, self.gate_up_proj(), self.up_bias)
        ids = index.flatten() if self.by_expert else None  # unread it would still hide the ids from the fusing pass
        inner = program.run(self.activation, inner.flatten(0, 1), ids).view(*index.shape, self.site.inner)
        result = self._matmul(inner, index, chunks, self.down_proj(), self.down_bias)
        if self.post is not None:
            result = program.run(self.post, result.flatten(0, 1), ids).view(result.shape).masked_fill(left_out, 0.0)
        return (result if self.site.weigh_input else result * gates).sum(1).to(rows.dtype)

    def _matmul(self, x: Tensor, index: Tensor, chunks: Tensor, weight: EncodedWeight, bias: Tensor | None) -> Tensor:
        return torch.ops.dpamoe.expert_matmul(
            x, index, chunks, weight.planes, weight.scales, weight.offset, weight.unit, bias, self.spec.group_size
        )

    def _gives_one_k(self, index: Tensor) -> bool:
        """Whether all pairs of an expert in a call read equally many planes, or would at a whole-numbered budget.

        The budget itself is not asked, since a compiled graph outlives it.
        """
        return self._falls_back(index) or self.spend.scope == "dispatch" or self.spend.allocation == "uniform"

    @property
    def held(self) -> int:
        """Planes in memory."""
        return self.gate_up_proj.plane.held

    def hold(self, up: EncodedWeight, down: EncodedWeight) -> None:
        """Hold the planes of these weights alone, and stand-ins for the rest of what was encoded; the budget stays."""
        for encoded, weight in ((self.gate_up_proj, up), (self.down_proj, down)):
            encoded.hold(weight.planes, weight.scales, self.spec.k_max)
        self.k_max.fill_(self.held)

    def encoded_bytes(self) -> int:
        """Bytes of planes, scales and offsets held now."""
        return self.gate_up_proj.weight.nbytes() + self.down_proj.weight.nbytes()

    def bytes_per_plane(self) -> tuple[float, float]:
        """Bytes that one plane adds (with its scales), and bytes read whatever k is (offsets, tied scales)."""
        fixed = plane = 0.0
        for encoded in (self.gate_up_proj.weight, self.down_proj.weight):
            sizes = {name: t.numel() * t.element_size() for name, t in encoded.tensors().items()}
            per_plane = sum(size for name, size in sizes.items() if "." in name)
            plane += per_plane / len(encoded.planes)
            fixed += sum(sizes.values()) - per_plane
        return plane, fixed

    def _apply(self, fn, recurse=True):
        def move(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return tensor.to(moved.device) if moved.dtype != tensor.dtype else moved

        return super()._apply(move, recurse)


def _brought(experts: EncodedExperts) -> AbstractContextManager:
    """Inside the block the residual table is in memory, also if accelerate offloads it between two calls."""
    if not (experts.residuals.is_meta and hasattr(experts, "_hf_hook")):
        return nullcontext()
    from accelerate.utils import align_module_device

    return align_module_device(experts)


def layer_shape(site: Site, spec: EncodeSpec) -> paths.Shape:
    """What the cost of a site's experts depends on, once encoded."""
    gated = site.up_rows == 2 * site.inner if site.program is not None else is_gated(site.activation)
    return paths.Shape(site.experts, site.top_k, site.hidden, site.inner, spec.group_size, gated, spec.scale_mode)


def uniform_start(site: Site, spec: EncodeSpec, device: torch.device, spend: SpendSpec) -> int | None:
    """Tokens from which a site's calls are allocated uniformly; None for never.

    Raises ValueError if the fallback is asked for and `dpamoe tune` has not measured this shape on this device.
    """
    if spend.fallback is None:
        return None
    shape = layer_shape(site, spec)
    costs = paths.measured(shape, device)
    if costs is None:
        raise ValueError(
            f"fallback={spend.fallback!r} needs costs of {site.path} ({shape.key}) on {paths.device_name(device)}, and none "
            "were measured: run `dpamoe tune` on this model there, or leave fallback at None"
        )
    return costs.uniform_from


def encoded_experts(model: nn.Module) -> dict[str, EncodedExperts]:
    """All encoded experts of a model by module path, in order."""
    return {path: module for path, module in model.named_modules() if isinstance(module, EncodedExperts)}
