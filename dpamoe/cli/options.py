"""Flags that several commands share, and the checks that argparse makes with them."""

import argparse

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


def positive(text: str) -> int:
    """A whole number above 0."""
    if not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
