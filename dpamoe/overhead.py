"""What separate scales for every precision would cost beside one set for all prefixes (DPA-MoE, appendix A)."""

from dpamoe.kernels.layout import groups_of, scale_sets
from dpamoe.sites import Site
from dpamoe.spec import EncodeSpec

UNIT_BYTES = 4  # tied: one fp32 number beside the codes of a weight


def storage_overhead(site: Site, spec: EncodeSpec, scale_bits: int = 16) -> dict:
    """Bytes of one expert with one shared set of scales for all prefixes, and with a set of its own for each precision.

    A set is one scale per group. "shared" scales: k_max sets serve all prefixes, while separate ones take k sets for each k
    from k_min on: 8 against 35. "tied" scales: one set serves all planes of a prefix, so 1 against one per precision. Planes
    are stored once either way. scale_bits: 16, or 32 where fp16 cannot hold a model's scales; tied codes have 8 always.

    scale_ratio: separate scale bytes over shared. increase: fraction by which an expert grows, offsets not counted (the paper:
    0.375 for k from 2 to 8 in groups of 128). bytes_separate and increase_with_offsets count an offset for each precision
    too; bytes_shared is what an encoded expert holds. bits_per_weight_*: of all of these bytes.
    """
    tied = spec.scale_mode == "tied"
    shapes = ((site.up_rows, site.hidden), (site.out, site.inner))  # rows and inputs
    groups = sum(rows * groups_of(width, spec.group_size) for rows, width in shapes)
    planes = spec.k_max * sum(rows * -(-width // 8) for rows, width in shapes)
    offset = groups if tied else groups * scale_bits // 8
    scale = groups + UNIT_BYTES * len(shapes) if tied else offset
    precisions = spec.k_max - spec.k_min + 1
    sets = (1, precisions) if tied else (scale_sets(spec.k_min, spec.k_max), scale_sets(spec.k_min, spec.k_max, shared=False))
    shared, separate = (planes + count * scale for count in sets)
    with_offset, with_offsets = shared + offset, separate + precisions * offset
    weights = sum(rows * width for rows, width in shapes)
    return {
        "path": site.path,
        "scale_mode": spec.scale_mode,
        "sets_shared": sets[0],
        "sets_separate": sets[1],
        "plane_bytes": planes,
        "scale_bytes_shared": sets[0] * scale,
        "scale_bytes_separate": sets[1] * scale,
        "scale_ratio": sets[1] / sets[0],
        "increase": separate / shared - 1,
        "bytes_shared": with_offset,
        "bytes_separate": with_offsets,
        "increase_with_offsets": with_offsets / with_offset - 1,
        "bits_per_weight_shared": 8 * with_offset / weights,
        "bits_per_weight_separate": 8 * with_offsets / weights,
    }
