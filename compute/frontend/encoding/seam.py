"""The one way from requests to prompts and from output to events; picks how prompts are made.

A chat template where one is named; else the vendor's recipe library, which knows tools; else, where
it cannot be imported, plain talk in the same form; else, for a model without the markers,
plain talk with names. Completions need none of these. Loads no library before it is made.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

from protocol.errors import ConfigError
from protocol.wording import to_install

from .effort import EncodingSettings
from .errors import RequestError
from .output_parser import OutputParser
from .plain_chat import MarkerEncoder, PlainEncoder
from .prompt import Prompt, Span, Start, opened, token_ids
from .request_fields import Api

if TYPE_CHECKING:
    from compute.frontend.tokenizer import Tokenizer

_RECIPE = "compute.frontend.encoding.recipe"
_TEMPLATE = "compute.frontend.encoding.template_chat"
_SERVE = to_install("serve")
_CHAT_MARKERS = ("begin", "end", "user", "assistant", "system", "think", "think_end")


class _Encoder(Protocol):
    def encode(self, api: Api, body: Any, context: int | None) -> Prompt: ...


class Encoding:
    """Prompts and output parsers of one model.

    template   a Jinja chat template to use instead of the model's own form
    missing    what this server cannot do and why, one line for the log; None: nothing

    Where a method is told the `context`, the most tokens of prompt and answer, it refuses a text
    that is surely too long before it is tokenised.

    Raises ConfigError where the template cannot be used.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        settings: EncodingSettings | None = None,
        *,
        template: Path | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.settings = settings or EncodingSettings()
        self.missing: str | None = None
        self._encoder = self._choose(template)

    def chat(self, body: Any, context: int | None = None) -> Prompt:
        """Return the prompt of a Chat Completions request. Raises RequestError."""
        return self._encode(Api.CHAT, body, context)

    def messages(self, body: Any, context: int | None = None) -> Prompt:
        """Return the prompt of an Anthropic Messages request. Raises RequestError."""
        return self._encode(Api.MESSAGES, body, context)

    def responses(self, body: Any, context: int | None = None) -> Prompt:
        """Return the prompt of a Responses request. Raises RequestError."""
        return self._encode(Api.RESPONSES, body, context)

    def completion(self, prompt: Any, context: int | None = None) -> Prompt:
        """Return the prompt of a Completions request: a text, or ids that are taken as they are.

        A text gets the begin token in front, and markers spelled in it stay text. The output is
        one text: decode it with `TextStream`. Raises RequestError.
        """
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if isinstance(prompt, str):
            spans = opened((Span(prompt),), self.tokenizer)
            ids = token_ids(spans, self.tokenizer, context)
            return Prompt(ids=ids, spans=spans, start=Start.TEXT_CONTINUED)
        n_ids = self.tokenizer.n_ids
        several = isinstance(prompt, list) and any(isinstance(part, str | list) for part in prompt)
        if not isinstance(prompt, list) or not prompt or several:
            raise RequestError("prompt: wanted one text or one list of token ids", param="prompt")
        for token_id in prompt:
            if type(token_id) is not int or not 0 <= token_id < n_ids:
                raise RequestError(
                    f"prompt: {token_id!r} is no token id from 0 to {n_ids - 1}", param="prompt"
                )
        text = self.tokenizer.decode(prompt, special=True)
        return Prompt(ids=tuple(prompt), spans=(Span(text),), start=Start.TEXT_CONTINUED)

    def parser(self, prompt: Prompt, stops: Sequence[str] = ()) -> OutputParser:
        """Return the parser of the answer to `prompt`; `stops` are the request's stop strings."""
        return OutputParser.after(prompt, self.tokenizer, stops)

    def _encode(self, api: Api, body: Any, context: int | None) -> Prompt:
        try:
            return self._encoder.encode(api, body, context)
        except RecursionError:
            raise RequestError("the request body is nested too deeply") from None

    def _choose(self, template: Path | None) -> _Encoder:
        if template is not None:
            try:
                module = importlib.import_module(_TEMPLATE)
            except ImportError as error:
                raise ConfigError(f"--chat-template needs jinja2 ({error}): {_SERVE}") from None
            return cast(_Encoder, module.TemplateEncoder(self.tokenizer, self.settings, template))
        special = self.tokenizer.special
        lacking = [name for name in _CHAT_MARKERS if getattr(special, name) is None]
        if lacking:
            self.missing = (
                "no tools and no thinking: the model's tokenizer lacks the markers "
                f"{', '.join(lacking)}; name its own form with --chat-template"
            )
            return PlainEncoder(self.tokenizer, self.settings, self.missing)
        if special.dsml is None:
            self.missing = "no tools: the model's tokenizer lacks the DSML marker"
            return MarkerEncoder(self.tokenizer, self.settings, self.missing)
        try:
            module = importlib.import_module(_RECIPE)
        except ImportError as error:
            self.missing = (
                "no tools and no response format in the prompt: the package deepseek-recipe "
                f"cannot be imported ({error}); {_SERVE}"
            )
            return MarkerEncoder(self.tokenizer, self.settings, self.missing)
        return cast(_Encoder, module.RecipeEncoder(self.tokenizer, self.settings))
