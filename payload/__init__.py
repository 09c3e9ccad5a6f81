"""Big per-token side arrays by handle.

An inference server writes `routed_experts`, `sampling_mask` and the like into one file on a shared
file system (`Writer`) and answers with a short list of segments (`Segment`). Everything between the
two nodes moves only these. The trainer slices them into numpy arrays without a copy (`Resolver`).
"""

from .errors import (
    CoverageError,
    InlineError,
    PathError,
    PayloadCorruptError,
    PayloadError,
    PayloadMissingError,
    PayloadTruncatedError,
    PayloadWriteError,
    ResolverClosedError,
    SegmentError,
)
from .fields import FIELDS, Field
from .inline import (
    decode_array,
    decode_routed_experts,
    decode_sampling_mask,
    decode_sampling_mask_logprobs,
    spill,
)
from .packing import MicroBatch, Sample, cp_window, pack
from .ragged import Ragged
from .resolver import Resolver, Stats
from .retention import Report, sweep
from .segment import Segment, clip, decode_segments, encode_segments, gaps, shift
from .writer import Writer, expert_dtype

__all__ = [
    "FIELDS",
    "CoverageError",
    "Field",
    "InlineError",
    "MicroBatch",
    "PathError",
    "PayloadCorruptError",
    "PayloadError",
    "PayloadMissingError",
    "PayloadTruncatedError",
    "PayloadWriteError",
    "Ragged",
    "Report",
    "Resolver",
    "ResolverClosedError",
    "Sample",
    "Segment",
    "SegmentError",
    "Stats",
    "Writer",
    "clip",
    "cp_window",
    "decode_array",
    "decode_routed_experts",
    "decode_sampling_mask",
    "decode_sampling_mask_logprobs",
    "decode_segments",
    "encode_segments",
    "expert_dtype",
    "gaps",
    "pack",
    "shift",
    "spill",
    "sweep",
]
__version__ = "0.1.0"
