"""Sampling of tokens, detokenization, and request outputs."""

from kvmosaic.sampling.answer import Answer, Decoder, Detokenizer, decode_all, decoded_logprobs
from kvmosaic.sampling.grammar import Grammar, GrammarCompiler, Matcher
from kvmosaic.sampling.output import (
    CompletionOutput,
    FinishReason,
    Logprob,
    Period,
    RequestMetrics,
    RequestOutput,
    ScoreOutput,
)
from kvmosaic.sampling.params import (
    DEFAULT_SINK_TOKENS,
    MAX_TOKENS,
    MAX_WINDOW_TOKENS,
    SamplingParams,
    default_sampling,
)
from kvmosaic.sampling.reuse import RepairUse, ReuseReport, SegmentAction, SegmentReuse
from kvmosaic.sampling.sampler import (
    Array,
    SampledToken,
    SamplingState,
    log_softmax,
    namespace,
    sample,
    with_likelihood,
)
from kvmosaic.sampling.stop_conditions import Finish, StopRules, StopStrings
from kvmosaic.sampling.structured import CallGrammar, StructuredOutputs
from kvmosaic.sampling.tool_calling import AnswerReader, ToolCalling
