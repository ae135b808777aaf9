"""Where a layout of Gluon puts the elements of a tensor, by index arithmetic."""

import torch
from triton.experimental.gluon import language as gl


def held(layout):
    """Element of each register of each lane of each warp, int64 [warps, 32, registers, dimensions]."""
    if isinstance(layout, gl.BlockedLayout):
        return _blocked(layout)
    parts = [torch.zeros(1, len(layout.shape), dtype=torch.int64)]
    for bases in (layout.warp_bases, layout.lane_bases, layout.reg_bases):
        own = torch.zeros(1, len(layout.shape), dtype=torch.int64)
        for base in bases:
            own = torch.cat([own, own + torch.tensor(base)])
        parts.append(own)
    _, warps, lanes, registers = parts
    return warps[:, None, None] + lanes[:, None] + registers


def _blocked(layout):
    """For two dimensions, the last one fastest, of a tensor as large as the layout."""
    assert len(layout.order) == 2 and list(layout.order) == [1, 0]
    sizes = [layout.warps_per_cta, layout.threads_per_warp, layout.size_per_thread]
    warps, lanes, registers = (torch.cartesian_prod(*map(torch.arange, size)) for size in sizes)
    own, lane = torch.tensor(layout.size_per_thread), torch.tensor(layout.threads_per_warp)
    return (warps * lane)[:, None, None] * own + (lanes * own)[:, None] + registers


def once(places, *shape):
    """Whether each element of a tensor of this shape stands in exactly one register."""
    places = places.reshape(-1, len(shape))
    number = sum(places[:, i] * int(torch.tensor(shape[i + 1 :]).prod()) for i in range(len(shape)))
    return torch.equal(number.sort().values, torch.arange(int(torch.tensor(shape).prod())))


def in_lanes(rows):
    """Rows, every group of 128 in the order of lanes: input 32c + 8j + g of a group in register j of lane 4g + c."""
    return rows.unflatten(-1, (-1, 4, 4, 8)).permute(0, 1, 4, 2, 3).flatten(1).contiguous()
