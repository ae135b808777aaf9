"""Find routed experts in blocks that hold no module for them, and rewrite such a block as prefix, experts, suffix.

A block counts as a site only if the rewritten block, with the original float experts, equals the block itself at sizes that
were not recorded.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_leaves

from dpamoe.modes import evaluating
from dpamoe.passes.cut import Cut, Refused, carry, find_cut
from dpamoe.passes.emit import emit, free_name, only_in_mode
from dpamoe.passes.experts import Candidate, find_candidates
from dpamoe.passes.function import Function, OriginalExperts, recover
from dpamoe.passes.record import Call, Recording, record
from dpamoe.passes.tapes import SIZES, BlockInputs, Plan, align, inputs_of, make_plan
from dpamoe.passes.verify import owner
from dpamoe.sites import Refusal, Site, gather

# Relative to the largest entry: the original experts are added in another order, and rounded to the block's type once.
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}  # by the type that the block is given
CHECKED = ((1, 1), (1, 7), (1, 513), (4, 16), (1, 0))  # batch and tokens; none of them is recorded
ALIKE = 600  # identical tokens, all routed to the same experts, so that capacities overflow


@dataclass(frozen=True)
class Block:
    """A verified block: its site, and the graph that takes its place, with the original experts as the module `site.block`."""

    site: Site
    graph: fx.GraphModule


def find_block(model: nn.Module, recording: Recording, candidate: Candidate, reason: str) -> Block | Refusal:
    """Rewrite the deepest module that holds a candidate's matmuls and its routing; the model is not changed.

    reason: why there is no simpler site. Returns a Refusal with what stood in the way.
    """
    refusal = Refusal(owner(candidate), reason)
    for call in _around(recording, candidate):
        block = model.get_submodule(call.path)
        try:
            inputs = _followed(inputs_of, block, call)
            found = _followed(_search, block, call.path, inputs, candidate)
        except Refused as error:
            refusal = refusal if refusal.reason != reason else Refusal(owner(candidate), f"{reason}, and as a block: {error}")
            continue
        try:
            return _followed(_rewritten, block, call.path, inputs, found)
        except Refused as error:
            return Refusal(owner(candidate), f"{reason}, and it cannot be rewritten: {error}")
    return refusal


def _followed(step: Callable, *args) -> Any:
    """The result of a step. Raises Refused for whatever foreign code in the block makes it raise."""
    try:
        return step(*args)
    except Refused:
        raise
    except Exception as error:
        raise Refused(f"it could not be followed: {type(error).__name__}: {error}") from error


def _around(recording: Recording, candidate: Candidate) -> list[Call]:
    """Calls of modules that run all of a candidate's matmuls, the deepest first."""
    places = [node.meta["at"] for node in candidate.nodes]
    first, last = min(places), max(places)
    around = [call for call in recording.calls if call.start <= first and last < call.stop]
    return sorted(around, key=lambda call: call.stop - call.start)


@dataclass(frozen=True)
class _Found:
    """A cut in an fp32 recording of a block, and what is between."""

    recording: Recording
    cut: Cut
    function: Function
    candidate: Candidate
    widths: tuple[int, int, int, int]


def _search(block: nn.Module, path: str, inputs: BlockInputs, candidate: Candidate) -> _Found:
    """Record the block alone, in fp32 on a copy, and find the cut of a candidate by value. Raises Refused if there is none."""
    if any(parameter.is_meta for parameter in block.parameters()):
        raise Refused("its weights are on the meta device: load them before transforming")
    judge = _float_copy(block)
    recording = _record(judge, inputs.at(SIZES[0], torch.float32), snapshots=True)
    prefix = path + "." if path else ""
    wanted = tuple(name.removeprefix(prefix) for name in candidate.down.names)
    for own in find_candidates(recording, judge):
        if own.down.names != wanted:
            continue
        try:
            function = recover(recording, own, "")
        except ValueError as error:
            raise Refused(str(error)) from error
        parameters = dict(judge.named_parameters())
        with torch.no_grad():
            weights = gather(judge, function.layout, own.down.experts)
            cut = find_cut(recording, own, weights, function.act(parameters), function.behind(parameters))
        if cut is not None:
            widths = (weights.up.shape[2], weights.down.shape[2], weights.down.shape[1], weights.up.shape[1])
            return _Found(recording, cut, function, own, widths)
    raise Refused("nothing in it equals a weighted sum of its recovered experts over some of its integers as choices")


def _rewritten(block: nn.Module, path: str, inputs: BlockInputs, found: _Found) -> Block:
    """The block as a graph, checked against itself. Raises Refused with the reason if it cannot be one."""
    if not path:
        raise Refused("it is the whole model, which has no place to put another: wrap it, as in nn.Sequential(model)")
    if block._forward_hooks or block._forward_pre_hooks:
        raise Refused("it has forward hooks of its own, which a graph would lose: remove them before transforming")
    twin = _shared_copy(block)
    _record(twin, inputs.at(SIZES[0]))  # some blocks change a type or fill a buffer when they first run
    tapes = [_record(twin, inputs.at(size)) for size in SIZES]
    families = (*found.candidate.ups, found.candidate.down)
    plan = make_plan(tapes, carry(found.cut, found.recording, tapes[0]), {n for family in families for n in family.names})
    name, count = free_name(block), found.candidate.down.experts
    experts = OriginalExperts(block, found.function, count, found.cut.weigh_input)
    graph = emit(plan, block, inputs, experts, name)
    if not _same_in_training(block, plan, inputs):
        graph.register_forward_pre_hook(functools.partial(only_in_mode, recorded=False))
    _check(twin, _shared_copy(graph), inputs)
    return Block(_site(block, path, name, found), graph)


def _site(block: nn.Module, path: str, name: str, found: _Found) -> Site:
    function, layout = found.function, found.function.layout
    stacks = [*layout.ups, layout.down, *layout.up_biases, *([layout.down_bias] if layout.down_bias else [])]
    count = sum(block.get_parameter(name).numel() for stack in stacks for name in stack.names)
    dtype = str(block.get_parameter(layout.down.names[0]).dtype).removeprefix("torch.")
    return Site(
        path, found.candidate.down.experts, found.cut.active, *found.widths, function.activation, layout, count, dtype,
        program=function.program, post=function.post, weigh_input=found.cut.weigh_input, block=name,
    )  # fmt: skip


def _shared_copy(module: nn.Module) -> nn.Module:
    """A copy that shares parameters and has its own buffers, so that running it changes nothing. Refused if it cannot be."""
    try:
        return copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    except Exception as error:  # whatever a foreign module may raise is the reason it is refused
        raise Refused(f"it cannot be copied: {type(error).__name__}: {error}") from error


def _float_copy(module: nn.Module) -> nn.Module:
    """A copy in fp32; parameters are shared if they are in fp32 already."""
    if all(parameter.dtype == torch.float32 for parameter in module.parameters()):
        return _shared_copy(module).float()
    return copy.deepcopy(module).float()


def _record(module: nn.Module, given: tuple[tuple, dict], training: bool = False, snapshots: bool = False) -> Recording:
    try:
        return record(module, *given, training=training, snapshots=snapshots)
    except Exception as error:
        raise Refused(f"it fails when run alone at another size: {type(error).__name__}: {error}") from error


def _same_in_training(block: nn.Module, plan: Plan, inputs: BlockInputs) -> bool:
    """Whether the code that is kept inline, outside of kept modules, is the same in train mode."""
    try:
        tape = _record(_shared_copy(block), inputs.at(SIZES[0]), training=True)
        align(replace(plan, tapes=[plan.tapes[0], tape]))
    except Refused:
        return False
    return True


def _check(block: nn.Module, graph: nn.Module, inputs: BlockInputs) -> None:
    """Compare a block with its graph at other sizes and on identical tokens. Raises Refused at the first difference.

    A size at which the block itself fails is passed over.
    """
    probes = [(f"[{batch}, {tokens}]", inputs.at((batch, tokens))) for batch, tokens in CHECKED]
    probes.append((f"{ALIKE} identical tokens", inputs.alike(ALIKE)))
    with evaluating(block), evaluating(graph), torch.no_grad():
        for label, (args, kwargs) in probes:
            try:
                expected = block(*args, **kwargs)
            except Exception:  # there is no answer to compare with
                continue
            try:
                found = graph(*args, **kwargs)
            except Exception as error:
                raise Refused(f"rewritten, it fails at {label}: {type(error).__name__}: {error}") from error
            if not _equal(found, expected, TOLERANCE.get(inputs.tensor.dtype, TOLERANCE[torch.float32])):
                raise Refused(f"rewritten, it differs from itself at {label}, so something depends on the number of tokens")


def _equal(found, expected, tolerance: float) -> bool:
    ours, theirs = tree_leaves(found), tree_leaves(expected)
    return len(ours) == len(theirs) and all(_same(a, b, tolerance) for a, b in zip(ours, theirs, strict=True))


def _same(found, expected, tolerance: float) -> bool:
    if not isinstance(expected, Tensor):
        return found == expected
    if not isinstance(found, Tensor) or found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    if not expected.is_floating_point() or not expected.numel():
        return torch.equal(found, expected)
    within = tolerance * float(expected.nan_to_num(0.0, 0.0, 0.0).abs().max())
    return torch.allclose(found.float(), expected.float(), rtol=0.0, atol=within, equal_nan=True)
