"""`dpamoe tune`: measure on this GPU which kernels are faster at which batch size, and from which size Uniform-k pays."""

import torch

from dpamoe import measure, synthetic, tune
from dpamoe.cli import options

NAME = "tune"
HELP = "measure on this GPU which kernels are faster at which batch size"


def arguments(parser) -> None:
    """Flags of this command."""
    options.config_flags(parser)
    parser.add_argument("--budget", type=float, default=4.0, help="average planes per selected expert")
    parser.add_argument("--tokens", type=options.counts, default=list(tune.TOKENS), help="batch sizes, such as 1,8,64,512")
    options.device_flag(parser)


def run(args) -> dict:
    """Check that there is a GPU, then measure and store."""
    device = measure.device_of(args.device)
    if device.type != "cuda":
        found = "this machine has no CUDA device" if not torch.cuda.is_available() else f"--device is {args.device}"
        raise ValueError(f"{found}: dpamoe tune measures GPU kernels, on a CPU there is nothing to choose")
    spec = synthetic.held_spec(args.model, args.group_size, args.scale_mode)
    return tune.tune(args.model, device, spec, args.budget, args.tokens, dict(args.set))


def show(outcome: dict) -> str:
    """The table."""
    return tune.table(outcome)
