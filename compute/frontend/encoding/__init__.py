"""Requests to token ids, and the model's output back to reasoning, text and tool calls."""

from .effort import EncodingSettings, read_efforts
from .errors import RequestError
from .events import (
    ArgumentsDelta,
    CallEnded,
    CallStarted,
    Event,
    Finished,
    ReasoningDelta,
    TextDelta,
)
from .output_parser import OutputParser
from .prompt import Constraint, Prompt, Span, Start
from .request_fields import Api
from .seam import Encoding

__all__ = [
    "Api",
    "ArgumentsDelta",
    "CallEnded",
    "CallStarted",
    "Constraint",
    "Encoding",
    "EncodingSettings",
    "Event",
    "Finished",
    "OutputParser",
    "Prompt",
    "ReasoningDelta",
    "RequestError",
    "Span",
    "Start",
    "TextDelta",
    "read_efforts",
]
