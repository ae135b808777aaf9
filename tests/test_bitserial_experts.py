"""Which calls the bit-serial kernels take, and how their launches are sized, for cards that need not be here."""

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from dpamoe.kernels import bitserial_experts as bits
from dpamoe.kernels.layout import EncodedWeight

CUDA = torch.device("cuda", 0)
KIB = 1024
SHARED = {(8, 0): 164, (8, 6): 100, (8, 9): 100, (9, 0): 228}  # KiB of a multiprocessor; a program takes one less


def weight(rows=128, inputs=256, experts=4, planes=8, group=128, dtype=torch.float16):
    """Zeros, of which `usable` looks at sizes and addresses only."""
    shape = (experts, rows, inputs // group if group > 0 else 1)
    signs = [torch.zeros(*shape[:2], -(-inputs // 8), dtype=torch.uint8) for _ in range(planes)]
    scales = [torch.zeros(shape, dtype=dtype) for _ in range(planes)]
    return EncodedWeight(signs, scales, torch.zeros(shape, dtype=dtype), None, inputs, group)


def tied(group, inputs=256):
    """The same with tied scales."""
    own = weight(inputs=inputs, group=group)
    codes = torch.zeros(own.offset.shape, dtype=torch.uint8)
    return replace(own, scales=[codes], offset=codes.to(torch.int8), unit=torch.zeros(4))


@pytest.fixture
def card(monkeypatch):
    """Function that stands a card of a compute capability in for the one that may be here."""

    def choose(capability):
        room = SHARED[capability] * KIB
        facts = SimpleNamespace(
            shared_memory_per_multiprocessor=room, shared_memory_per_block_optin=room - KIB, multi_processor_count=132
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: facts)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)

    return choose


def test_what_is_usable():
    assert bits.usable(8, 8, weight(), weight())
    assert bits.usable(1, 1, weight(64, 128, 1, 2), weight(64, 128, 1, 2))
    assert bits.usable(bits.BIT_PAIRS, bits.MOST_SLOTS, weight(), weight())
    assert bits.usable(8, 8, weight(inputs=128, group=-1), weight())  # whole rows that are one group
    assert all(bits.usable(8, 8, tied(group), tied(group)) for group in (32, 64, 128))
    assert bits.usable(8, 8, tied(-1, inputs=128), tied(32))


REFUSED = {
    "a group of 64": weight(group=64),
    "whole rows of 256": weight(group=-1),
    "fp32 scales": weight(dtype=torch.float32),
    "bf16 scales": weight(dtype=torch.bfloat16),
    "a short group at the end": replace(weight(), in_features=320),
    "rows that are no whole tiles": weight(rows=96),
    "tied scales in groups of 16": tied(16),
    "tied scales of whole rows of 256": tied(-1),
    "tied scales and a short group at the end": replace(tied(32), in_features=320),
}


@pytest.mark.parametrize("refused", REFUSED.values(), ids=REFUSED)
def test_weights_that_are_not_usable(refused):
    assert not bits.usable(8, 8, refused, weight()) and not bits.usable(8, 8, weight(), refused)


@pytest.mark.parametrize("name", ["plane.0", "plane.7", "scale.3", "offset"])
@pytest.mark.parametrize("moved", ["by an element", "apart"])
def test_tensors_must_stand_as_they_are_copied(name, moved):
    given = weight()
    tensor = given.tensors()[name]
    flat = torch.zeros(2 * tensor.numel() + 1, dtype=tensor.dtype)
    if moved == "by an element":
        strange = flat[1 : tensor.numel() + 1].view(tensor.shape)
    else:
        strange = flat[:-1].view(*tensor.shape[:-1], -1)[..., : tensor.shape[-1]]
    kind, _, index = name.partition(".")
    if kind == "offset":
        changed = replace(given, offset=strange)
    else:
        field = f"{kind}s"
        changed = replace(given, **{field: [strange if c == int(index) else t for c, t in enumerate(getattr(given, field))]})
    assert bits.usable(8, 8, weight(), given) and not bits.usable(8, 8, weight(), changed)


def test_calls_that_are_not_usable():
    assert not bits.usable(bits.BIT_PAIRS + 1, 8, weight(), weight())
    assert not bits.usable(17, 17, weight(), weight())


@pytest.mark.parametrize(
    "active, inputs, inner, taken",
    [
        (1, 16384, 128, True),  # eight warps of eight pieces
        (1, 16384 + 128, 128, False),
        (1, 128, 2048, True),  # a warp takes a whole row of the second product where pairs share planes
        (1, 128, 2048 + 128, False),
        (16, 128, 1024, True),  # 16 slots of 4 pieces for 8 warps
        (16, 128, 1024 + 128, False),
        (8, 4096, 2048, True),
    ],
)
def test_widths_that_are_written_out(active, inputs, inner, taken):
    assert bits.usable(active, active, weight(64, inputs, 1), weight(64, inner, 1)) == taken


def test_planes_beyond_what_32_bits_address():
    """Whole weights of more words than int32 counts; nothing of that size is held."""

    class Huge(torch.Tensor):
        def numel(self):
            return 1 << 33

    given = weight()
    huge = replace(given, planes=[given.planes[0].as_subclass(Huge), *given.planes[1:]])
    assert not bits.usable(8, 8, huge, given)


@pytest.mark.parametrize(
    "inputs, warps, pieces", [(128, 1, 1), (256, 1, 1), (384, 1, 2), (2048, 8, 1), (2176, 8, 2), (768, 4, 1), (0, 8, 0)]
)
def test_pieces(inputs, warps, pieces):
    assert bits.pieces_of(inputs, warps) == pieces


# of 228 KiB three programs have 77824 bytes each, which hold 9 planes of 8192; of 100 KiB 34133, which hold 3
@pytest.mark.parametrize(
    "capability, pieces, programs, planes",
    [((9, 0), 16, 3, 8), ((9, 0), 32, 3, 4), ((9, 0), 24, 1, 8), ((8, 0), 16, 3, 6), ((8, 6), 16, 3, 3), ((8, 9), 16, 3, 3),
     ((8, 6), 64, 1, 3), ((8, 6), 128, 3, 1), ((9, 0), 1, 3, 8)],
)  # fmt: skip
def test_planes_that_shared_memory_holds(card, capability, pieces, programs, planes):
    card(capability)
    assert bits.planes_held(pieces, programs, CUDA) == planes


@pytest.mark.parametrize("capability", SHARED)
def test_every_program_that_can_be_launched_has_room(card, capability):
    """Beside the planes what a multiprocessor keeps of each program, and what warps exchange: sums, or rows of 16 groups."""
    card(capability)
    for programs, beside in itertools.product((1, 3, 4), (KIB, 8 * KIB)):
        for pieces in range(1, 2 * bits.WARPS * bits.MOST_PIECES + 1):
            planes = bits.planes_held(pieces, programs, CUDA, beside)
            own = 512 * pieces * planes + KIB + beside
            assert 1 <= planes <= 8 and own <= (SHARED[capability] - 1) * KIB
            assert own * programs <= SHARED[capability] * KIB or planes == 1


def test_only_hopper_launches_early(card):
    for capability in SHARED:
        card(capability)
        options = bits._launch(CUDA, 8, 80)
        assert options["PDL"] == options.get("launch_pdl", False) == (capability == (9, 0))
        assert (options["num_warps"], options["maxnreg"]) == (8, 80)


def test_programs_run_at_once_where_the_next_kernel_begins_early_and_there_is_room(card):
    for capability in SHARED:
        card(capability)
        early = capability == (9, 0)
        assert [bits.at_once(programs, 3, CUDA) for programs in (1, 3 * 132, 3 * 132 + 1)] == [early, early, False]


def test_nothing_is_launched_early_without_cuda(card, monkeypatch):
    """Cards of others call themselves 9.4; what waits is PTX."""
    card((9, 0))
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert bits._launch(CUDA, 8, 80)["PDL"] is False
