"""The passes over the FX graph, in the order in which they run: a tuple for each target."""

from sitsc.passes.base import Pass
from sitsc.passes.canonicalise import Canonicalise
from sitsc.passes.even_rows import EvenRows
from sitsc.passes.fuse_activation import FuseActivation
from sitsc.passes.fuse_glu import FuseGlu
from sitsc.passes.fuse_norm import FuseNorm
from sitsc.passes.fuse_residual import FuseResidual
from sitsc.passes.lower_addmm import LowerAddmm
from sitsc.passes.lower_embedding import LowerEmbedding
from sitsc.passes.lower_linear import LowerLinear
from sitsc.passes.match_activation import MatchActivation
from sitsc.passes.match_concat import MatchConcat
from sitsc.passes.match_glu import MatchGlu
from sitsc.passes.match_layer_norm import MatchLayerNorm
from sitsc.passes.match_rms_norm import MatchRmsNorm
from sitsc.passes.match_rope import MatchRope
from sitsc.passes.match_rope_table import MatchRopeTable
from sitsc.passes.match_router import MatchRouter
from sitsc.passes.merge_linears import MergeLinears
from sitsc.passes.pack_weights import PackWeights
from sitsc.passes.page_attention import PageAttention
from sitsc.passes.quantise import QuantiseInt8
from sitsc.passes.select_rows import SelectRows
from sitsc.passes.simplify_views import SimplifyViews
from sitsc.passes.widen_residual import WidenResidual

FUSED: tuple[Pass, ...] = (
    Canonicalise(),
    MatchActivation(),
    MatchConcat(),
    MatchRmsNorm(),
    MatchRope(),
    MatchGlu(),
    MatchRouter(),
    SelectRows(),
    PageAttention(),
    LowerLinear(),
    LowerEmbedding(),
    FuseGlu(),
    MergeLinears(),
    FuseNorm(),
    FuseResidual(),
    SimplifyViews(),
)
CPU_FUSED: tuple[Pass, ...] = (  # with what the kernels of the CPU alone can take
    Canonicalise(),
    MatchActivation(),
    MatchConcat(),
    MatchRmsNorm(),
    MatchLayerNorm(),
    MatchRope(),
    MatchGlu(),
    MatchRouter(),
    SelectRows(),
    PageAttention(),
    LowerAddmm(),
    LowerLinear(),
    LowerEmbedding(),
    FuseGlu(biased=True),
    MergeLinears(),
    FuseNorm(weightless=False),
    FuseResidual(),
    FuseActivation(),
    SimplifyViews(),
)
CPU: tuple[Pass, ...] = (*CPU_FUSED, PackWeights())
MODULE: tuple[Pass, ...] = (*CPU, EvenRows())  # decoders written by hand
_OF_STEPS = (MatchRope, MatchRouter, SelectRows, PageAttention)  # what only decoders have
PLAIN: tuple[Pass, ...] = (*(p for p in CPU if not isinstance(p, _OF_STEPS)), EvenRows())
CUDA: tuple[Pass, ...] = (*FUSED, MatchRopeTable(), SimplifyViews())
CUDA_WIDE: tuple[Pass, ...] = (*CUDA, WidenResidual())
CPU_INT8: tuple[Pass, ...] = (*CPU_FUSED, QuantiseInt8(), PackWeights())
