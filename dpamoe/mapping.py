"""Which file tensors make up which parameters, by transformers' own conversion mapping, and parameters made one part at a time.

On disk experts are often one tensor each, in memory one stacked parameter: it is allocated once and filled expert by expert.
"""

import functools
import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dpamoe.source import Source

AT_A_TIME = 4  # experts that are converted together
REMEDY = "the checkpoint does not belong to its config, or is incomplete: download it again"


@dataclass(frozen=True)
class Recipe:
    """One conversion: file tensors by the pattern that they match, what turns them into parameters, and their names.

    numbers: which expert each file tensor is, by pattern, where the pattern has a place for it.
    """

    sources: dict[str, list[str]]
    converter: object | None
    first: str
    names: tuple[str, ...]
    numbers: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True)
class Mapping:
    """How the tensors of a source become those of a model.

    recipes: by parameter or buffer; wanted: shape and dtype of each, tied ones once; aliases: other names of tied ones;
    extra: file tensors that the model does not have; ignored: those that its class says to pass over.
    """

    recipes: dict[str, Recipe]
    wanted: dict[str, tuple[tuple[int, ...], torch.dtype]]
    aliases: dict[str, tuple[str, ...]]
    extra: list[str] = field(default_factory=list)
    ignored: list[str] = field(default_factory=list)

    def below(self, path: str) -> list[str]:
        """Names of all tensors of a module, in order."""
        return [name for name in self.wanted if name.startswith(path + ".")]


def make_mapping(model: nn.Module, source: Source) -> Mapping:
    """Match every file tensor with the model, on meta; ValueError if a parameter or persistent buffer has no tensor."""
    wanted, aliases = _wanted(model, source)
    recipes, extra = _recipes(model, source, {other: name for name, others in aliases.items() for other in others})
    missing = [name for name in wanted if name not in recipes]
    if missing:
        raise ValueError(f"{source.folder} lacks {len(missing)} tensors of the model, such as {missing[0]}: {REMEDY}")
    for name in wanted:
        _check_experts(recipes[name], wanted[name][0], source)
        _check_recipe(recipes[name], model, source, wanted)
    patterns = getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()
    ignored = [name for name in extra if any(re.search(pattern, name) for pattern in patterns)]
    return Mapping(recipes, wanted, aliases, [name for name in extra if name not in ignored], ignored)


def _wanted(model: nn.Module, source: Source) -> tuple[dict, dict[str, tuple[str, ...]]]:
    from transformers.core_model_loading import build_glob_alternation

    plan = model._get_dtype_plan(source.dtype())
    search, groups, _ = build_glob_alternation(list(plan)) if plan else (None, None, None)
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(id(parameter), []).append(name)
    aliases = {names[0]: tuple(names[1:]) for names in owners.values() if len(names) > 1}
    tied = {other for others in aliases.values() for other in others}
    wanted = {}
    for name, tensor in model.state_dict().items():
        if name in tied or not isinstance(tensor, Tensor):
            continue
        match = search.search(name) if search is not None else None
        dtype = tensor.dtype if match is None or not tensor.is_floating_point() else plan[groups[match.lastgroup]]
        wanted[name] = (tuple(tensor.shape), dtype)
    return wanted, aliases


def _recipes(model: nn.Module, source: Source, primary: dict[str, str]) -> tuple[dict[str, Recipe], list[str]]:
    """Recipes by name of what they make, and file tensors that nothing wants. primary: tied name to the one that counts."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

    entries = get_model_conversion_mapping(model)
    renamings = [entry for entry in entries if isinstance(entry, WeightRenaming)]
    converters = [entry for entry in entries if isinstance(entry, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    state, prefix = model.state_dict(), model.base_model_prefix
    found: dict[str, Recipe] = {}
    extra: list[str] = []
    for key in sorted(source.tensors, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if name not in state and key in state:
            name, pattern = rename_source_key(key, [], [], prefix, state)
        if name not in state:
            extra.append(key)
            continue
        converter = None if pattern is None else by_pattern[pattern]
        if name not in found:
            targets = [name] if converter is None else [
                name.replace(converter.target_patterns[0], other) for other in converter.target_patterns
            ]  # fmt: skip
            found[name] = Recipe({}, converter, name, tuple(targets))
        found[name].sources.setdefault(key if pattern is None else pattern, []).append(key)
        if pattern is not None and "*." in pattern:
            renamed, _ = rename_source_key(key, renamings, [])
            found[name].numbers.setdefault(pattern, []).append(_number(pattern, renamed))
    recipes = {name: recipe for recipe in found.values() for name in recipe.names}
    for other, name in primary.items():
        _settle_tied(recipes, other, name, source)
    return recipes, extra


def _settle_tied(recipes: dict[str, Recipe], other: str, name: str, source: Source) -> None:
    """Let the tensor of a tied name stand for the other; ValueError if the file holds both and they differ."""
    double = recipes.pop(other, None)
    if double is None:
        return
    if name not in recipes:
        recipes[name] = Recipe(double.sources, double.converter, double.first, (name,))
        return
    pair = [[key for keys in recipe.sources.values() for key in keys] for recipe in (recipes[name], double)]
    if all(len(keys) == 1 for keys in pair) and not torch.equal(source.read(pair[0][0]), source.read(pair[1][0])):
        raise ValueError(
            f"{source.folder} holds {pair[0][0]} and {pair[1][0]} with different values, and its config ties them: set "
            "tie_word_embeddings to false in config.json, or remove one of them"
        )


def _check_experts(recipe: Recipe, shape: tuple[int, ...], source: Source) -> None:
    """ValueError unless a stacked parameter has exactly one tensor for each of its experts and patterns."""
    if recipe.converter is None or not expert_wise(recipe.converter):
        return
    patterns = recipe.converter.source_patterns
    if not any("*." in pattern for pattern in patterns):
        return
    for pattern in patterns:
        keys = recipe.sources.get(pattern, [])
        numbers = recipe.numbers.get(pattern, [])
        lacking = sorted(set(range(shape[0])) - set(numbers))
        if lacking:
            raise ValueError(
                f"{source.folder} lacks the tensor {pattern.replace('*', str(lacking[0]))} of {recipe.first}, which has "
                f"{shape[0]} experts ({len(lacking)} are missing): {REMEDY}"
            )
        if len(keys) != shape[0]:
            more = next(key for key, number in zip(keys, numbers, strict=True) if number not in range(shape[0]))
            raise ValueError(f"{source.folder} holds {more}, and {recipe.first} has {shape[0]} experts: {REMEDY}")


def _number(pattern: str, key: str) -> int:
    """The expert that a file tensor belongs to, which stands where the pattern has a star; -1 if there is none."""
    match = re.search(pattern.replace("*.", r"(\d+)\.", 1), key)
    return int(match[1]) if match else -1


def _check_recipe(recipe: Recipe, model: nn.Module, source: Source, wanted: dict) -> None:
    """ValueError if the file tensors, by their headers alone, do not become what the config says."""

    def shape_only(key: str) -> Tensor:
        return torch.empty(source.tensors[key].shape, dtype=wanted[recipe.first][1], device="meta")

    if recipe.converter is None:
        (key,) = (key for keys in recipe.sources.values() for key in keys)
        _check_shape(recipe.names[0], source.tensors[key].shape, wanted[recipe.names[0]][0], source)
    elif expert_wise(recipe.converter):
        for name, tensor in _convert(recipe, recipe.sources, model, shape_only).items():
            _check_shape(name, tuple(tensor.shape), wanted[name][0], source)


def expert_wise(converter) -> bool:
    """Whether a conversion stacks its tensors along the first dimension and otherwise leaves that dimension alone."""
    from transformers import core_model_loading as theirs

    swaps = theirs.Transpose
    along = [getattr(theirs, name) for name in ("Concatenate", "Interleave") if hasattr(theirs, name)]  # 5.13 has one of them
    first, *others = converter.operations
    if type(first) is not theirs.MergeModulelist or first.dim != 0 or len(converter.target_patterns) != 1:
        return False
    dims = [
        (operation.dim0, operation.dim1) if type(operation) is swaps else (operation.dim,)
        for operation in others
        if type(operation) in (swaps, *along)
    ]
    return len(dims) == len(others) and all(dim >= 1 for pair in dims for dim in pair)


def make_tensors(mapping: Mapping, model: nn.Module, source: Source, names: Iterable[str]) -> dict[str, Tensor]:
    """Read and convert the named parameters and buffers, each in the dtype the model wants.

    ValueError for a tensor of another shape than the config says.
    """
    made: dict[str, Tensor] = {}
    for name in names:
        if name not in made:
            made |= _make(mapping, model, source, mapping.recipes[name])
    return {name: made[name] for name in names}


def _make(mapping: Mapping, model: nn.Module, source: Source, recipe: Recipe) -> dict[str, Tensor]:
    keys = [key for group in recipe.sources.values() for key in group]
    if recipe.converter is None:
        return {recipe.names[0]: source.read(keys[0], mapping.wanted[recipe.names[0]][1])}
    dtype = mapping.wanted[recipe.first][1]
    if expert_wise(recipe.converter):
        return {recipe.first: _fill(mapping, model, source, recipe)}
    made = _convert(recipe, recipe.sources, model, lambda key: source.read(key, dtype))
    for name, tensor in made.items():
        _check_shape(name, tuple(tensor.shape), mapping.wanted[name][0], source)
    return {name: tensor.to(mapping.wanted[name][1]) for name, tensor in made.items()}


def _fill(mapping: Mapping, model: nn.Module, source: Source, recipe: Recipe) -> Tensor:
    """A stacked parameter, a few experts at a time."""
    shape, dtype = mapping.wanted[recipe.first]
    result = torch.empty(shape, dtype=dtype)
    for start in range(0, shape[0], AT_A_TIME):
        part = {pattern: keys[start : start + AT_A_TIME] for pattern, keys in recipe.sources.items()}
        (tensor,) = _convert(recipe, part, model, lambda key: source.read(key, dtype)).values()
        result[start : start + AT_A_TIME] = tensor
    return result


def _convert(recipe: Recipe, keys: dict[str, list[str]], model: nn.Module, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
    """Run transformers' conversion on some file tensors; ValueError if it fails."""
    converter = deepcopy(recipe.converter)
    for pattern, group in keys.items():
        for key in group:
            converter.add_tensor(recipe.first, key, pattern, functools.partial(read, key))
    try:
        made = converter.convert(recipe.first, model=model, config=model.config)
    except (RuntimeError, ValueError, KeyError, IndexError) as error:
        first = next(key for group in keys.values() for key in group)
        raise ValueError(f"{recipe.first} could not be made of {first} and others: {error}: {REMEDY}") from error
    return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...], source: Source) -> None:
    if tuple(found) != tuple(wanted):
        raise ValueError(f"{name} is {list(found)} in {source.folder}, its config says {list(wanted)}: {REMEDY}")


def load_part(mapping: Mapping, model: nn.Module, source: Source, names: Iterable[str], device: str = "cpu") -> None:
    """Put the named parameters and buffers into the model, at all their places."""
    for name, tensor in make_tensors(mapping, model, source, list(names)).items():
        _put(model, (name, *mapping.aliases.get(name, ())), tensor.to(device))


def drop_part(mapping: Mapping, model: nn.Module, names: Iterable[str]) -> None:
    """Put them back on the meta device."""
    for name in names:
        shape, dtype = mapping.wanted[name]
        _put(model, (name, *mapping.aliases.get(name, ())), torch.empty(shape, dtype=dtype, device="meta"))


def _put(model: nn.Module, names: tuple[str, ...], tensor: Tensor) -> None:
    parameter = nn.Parameter(tensor, requires_grad=False)
    for name in names:
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if leaf in module._parameters:
            module._parameters[leaf] = parameter
        else:
            module._buffers[leaf] = tensor
