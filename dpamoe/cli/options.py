"""Flags that several commands share, and the checks that argparse makes with them."""

import argparse
import json
import re

import torch

from dpamoe.kernels.layout import SCALE_MODES
from dpamoe.spec import EncodeSpec


def encode_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of `EncodeSpec`."""
    default = EncodeSpec()
    parser.add_argument("--group-size", type=int, default=default.group_size, help="weights per scale; -1: whole rows")
    parser.add_argument("--k-min", type=int, default=default.k_min, help="fewest planes that decode")
    parser.add_argument("--k-max", type=int, default=default.k_max, help="most planes")
    parser.add_argument(
        "--scale-mode", choices=SCALE_MODES, default=default.scale_mode, help="one scale per plane, or one per group"
    )
    parser.add_argument("--beta", type=float, default=default.beta, help="weight of high planes in the fit")


def encode_spec(args: argparse.Namespace) -> EncodeSpec:
    """The `EncodeSpec` that the flags ask for."""
    return EncodeSpec(args.group_size, args.k_min, args.k_max, args.scale_mode, args.beta)


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
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
