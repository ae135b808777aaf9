"""Flags that several commands share, and the checks that argparse makes with them."""

import argparse
import json
import re
from dataclasses import replace

import torch

from dpamoe.kernels.layout import SCALE_MODES
from dpamoe.presets import DEFAULT, PRESETS
from dpamoe.spec import ALLOCATORS, EncodeSpec, SpendSpec


def preset_flag(parser: argparse.ArgumentParser) -> None:
    """--preset; its name is None if it is not given."""
    parser.add_argument(
        "--preset", choices=tuple(PRESETS), help=f"settings that go together, which other flags change; default: {DEFAULT}"
    )


def encode_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `EncodeSpec`; those that are not given are as in the preset."""
    parser.add_argument("--group-size", type=int, help=f"weights per scale; -1: whole rows; {_default('group_size')}")
    parser.add_argument("--k-min", type=int, help=f"fewest planes that decode; {_default('k_min')}")
    parser.add_argument("--k-max", type=int, help=f"most planes; {_default('k_max')}")
    parser.add_argument(
        "--scale-mode", choices=SCALE_MODES, help=f"one scale per plane, or one per group; {_default('scale_mode')}"
    )
    parser.add_argument("--beta", type=float, help=f"weight of high planes in the fit; {_default('beta')}")


def _default(field: str) -> str:
    """What a field of `EncodeSpec` is without its flag."""
    usual = getattr(PRESETS[DEFAULT].encode, field)
    others = {name: getattr(preset.encode, field) for name, preset in PRESETS.items()}
    return ", ".join([f"default: {usual}", *(f"preset {name}: {value}" for name, value in others.items() if value != usual)])


def encode_changes(args: argparse.Namespace) -> dict:
    """What the flags of `encode_flags` ask for, by field; empty if none was given."""
    given = {name: getattr(args, name) for name in ("group_size", "k_min", "k_max", "scale_mode", "beta")}
    return {name: value for name, value in given.items() if value is not None}


def encode_spec(args: argparse.Namespace) -> EncodeSpec:
    """The `EncodeSpec` of the preset, with what the flags change."""
    return replace(PRESETS[args.preset or DEFAULT].encode, **encode_changes(args))


def spend_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `SpendSpec` that an encoded folder remembers; those that are not given are as in the preset."""
    parser.add_argument("--budget", type=float, default=SpendSpec().budget, help="default budget, planes per expert")
    parser.add_argument(
        "--allocator", choices=ALLOCATORS, help="keep the budget for every token, or on average, with less error; default: the "
        "preset's",
    )  # fmt: skip
    parser.add_argument(
        "--skip", action=argparse.BooleanOptionalAction, help="leave out experts whose gate is tiny; default: the preset's"
    )


def spend_spec(args: argparse.Namespace) -> SpendSpec:
    """The `SpendSpec` of the preset, with what the flags change."""
    given = {"allocator": args.allocator, "skip": args.skip}
    changes = {name: value for name, value in given.items() if value is not None}
    return replace(PRESETS[args.preset or DEFAULT].spend, budget=args.budget, **changes)


def config_flags(parser: argparse.ArgumentParser) -> None:
    """A model by its config alone, changes of that config, and how its random experts are encoded."""
    parser.add_argument("model", help="a model folder, a model type of transformers such as qwen3_moe, or a name on the hub")
    parser.add_argument(
        "--set", type=setting, action="append", default=[], metavar="KEY=VALUE",
        help="change a field of the config, such as num_hidden_layers=4; may be repeated",
    )  # fmt: skip
    parser.add_argument("--group-size", type=int, help="weights per scale; -1: whole rows; default: the folder's, or 128")
    parser.add_argument("--scale-mode", choices=SCALE_MODES, help="one scale per plane, or one per group; default: shared")


def setting(text: str) -> tuple[str, object]:
    """A field and its value, which is read as JSON where it can be, else as text."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not a field and its value such as num_hidden_layers=4")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def device_flag(parser: argparse.ArgumentParser) -> None:
    """--device, by default the GPU if there is one."""
    parser.add_argument(
        "--device", type=device, default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, …"
    )


def device(text: str) -> str:
    """Name of a device that this machine has."""
    present = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    present += [f"cuda:{number}" for number in range(torch.cuda.device_count())]
    if text not in present:
        raise argparse.ArgumentTypeError(f"{text!r} is no device of this machine: use {', '.join(present)}")
    return text


def numbers(text: str) -> list[float]:
    """A comma-separated list of numbers, rising and without repeats."""
    try:
        return sorted({float(part) for part in text.split(",")})
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 2,2.5,3") from error


def counts(text: str) -> list[int]:
    """A comma-separated list of whole numbers above 0, rising and without repeats."""
    parts = text.split(",")
    if not all(part.isdecimal() and int(part) for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of whole numbers above 0 such as 1,8,64")
    return sorted({int(part) for part in parts})


def names(text: str) -> list[str]:
    """A comma-separated list of names without repeats; "none" is the empty list."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of names such as one,two")
    return [] if parts == ["none"] else list(dict.fromkeys(parts))


def lower_names(text: str) -> list[str]:
    """The same in lower case, for names such as Q4_K_M."""
    return names(text.lower())


def size(text: str) -> int:
    """Bytes: a number with B, KB, MB, GB, TB (powers of 1000) or KiB, MiB, GiB, TiB (powers of 1024) behind it."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(i?)B?", text.strip(), re.IGNORECASE)
    if match is None or float(match[1]) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size such as 24GiB")
    return int(float(match[1]) * (1024 if match[3] else 1000) ** " KMGT".index(match[2].upper() or " "))


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdecimal() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
