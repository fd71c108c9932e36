"""What a client's request can be told about itself."""

from __future__ import annotations

from protocol.errors import HeadraceError


class RequestError(HeadraceError):
    """A request asks for what cannot be done: its sender mends it.

    status   HTTP status that says so
    param    the field at fault, where one is known
    code     OpenAI's short word, where it has one
    """

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        status: int = 400,
    ) -> None:
        super().__init__(message)
        self.param = param
        self.code = code
        self.status = status
