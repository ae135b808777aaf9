"""Speed of the encoder on a GPU, and its error beside the torch encoder's on the CPU.

python tests/benchmarks/bench_encode.py [--experts 128]
"""

import argparse
import time
from datetime import date

import torch
import triton

import dpamoe
from dpamoe.encode import encode
from dpamoe.kernels.grouped import decode

OUT, IN = 1536, 2048  # gate and up rows of a Qwen3-30B-A3B expert
SAMPLE = 64  # rows of two experts that the CPU encodes too
PLANES = (2, 4, 8)


def seconds(weight, spec) -> float:
    """Time of one encoding, after one of two experts that compiles."""
    encode(weight[:2], spec)
    torch.cuda.synchronize()
    start = time.perf_counter()
    encode(weight, spec)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def ratios(weight, spec) -> list[float]:
    """Squared error on the GPU over that on the CPU, for the same rows, at each of PLANES."""
    part = weight[:2, :SAMPLE].contiguous()
    there, here = encode(part, spec), encode(part.cpu(), spec)
    original = part.float().cpu()
    errors = [[float((decode(w, k).cpu() - original).square().sum()) for k in PLANES] for w in (there, here)]
    return [gpu / cpu for gpu, cpu in zip(*errors, strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--experts", type=int, default=128)
    weight = (torch.randn(parser.parse_args().experts, OUT, IN, device="cuda") * 0.02).bfloat16()
    print(f"{date.today()}; {torch.cuda.get_device_name()}; torch {torch.__version__}, triton {triton.__version__}")
    for mode, group in (("shared", 128), ("tied", 32)):
        spec = dpamoe.EncodeSpec(scale_mode=mode, group_size=group)
        speed = weight.numel() / seconds(weight, spec) / 1e9
        shown = ", ".join(f"k={k} {ratio:.4f}" for k, ratio in zip(PLANES, ratios(weight, spec), strict=True))
        print(f"{mode}, group {group}: {speed:.1f} G weights/s; squared error over the CPU encoder's: {shown}")


if __name__ == "__main__":
    main()
