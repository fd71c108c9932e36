"""The HTTP server of a frontend and its link to compute, from start to drained end.

SIGTERM and SIGINT drain: no new connection is taken, what runs may end within `drain_s`; a second
one ends at once. What runs then gets an error in its API's shape, and seconds to take it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import signal
import socket
from collections.abc import Mapping

import uvicorn
import uvloop

from protocol.sd_notify import notify
from protocol.watchdog import Watchdog
from protocol.wire.sockets import RuntimePaths

from .app import build_app
from .config import FrontendConfig
from .http.connection import TimedConnection
from .listener import listen
from .service import Frontend

_LOG = logging.getLogger("headrace.frontend")
MAX_HEAD_BYTES = 64 << 10  # of a request's head that has not come whole
JOINED = "X_HEADRACE_JOINED"  # notified once compute is there
_KEEP_ALIVE_S = 75
_LOOP = "the event loop"
_LIFE_S = 1  # between two beats of it
_LAST_WORDS_S = 2  # that errors may take to reach their clients, after `drain_s`
_SPARE_CONNECTIONS = 64  # beyond max_connections, to be told why not


def run(config: FrontendConfig, environment: Mapping[str, str]) -> None:
    """Serve until a signal. Raises ConfigError where it cannot begin."""
    paths = RuntimePaths.of_compute(config.find_runtime_dir(environment))
    frontend = Frontend(config, paths)
    with contextlib.closing(listen(config)) as listener:
        uvloop.run(_until_signal(HttpServer(frontend, listener)))


class HttpServer(uvicorn.Server):
    """The server of one frontend; `serve_all` runs it with the link to compute.

    Signals are the caller's business.
    """

    def __init__(self, frontend: Frontend, listener: socket.socket) -> None:
        config = frontend.config
        self._guard = build_app(frontend)
        settings = uvicorn.Config(
            self._guard,
            http=TimedConnection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            limit_concurrency=config.max_connections + _SPARE_CONNECTIONS,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=math.ceil(config.drain_s) + _LAST_WORDS_S,
            h11_max_incomplete_event_size=MAX_HEAD_BYTES,
            callback_notify=self._show_life,
            timeout_notify=_LIFE_S,
        )
        super().__init__(settings)
        self._frontend = frontend
        self._listener = listener
        self._watchdog = Watchdog(_LOOP)
        host, port = listener.getsockname()[:2]
        self.url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"

    def capture_signals(self) -> contextlib.AbstractContextManager[None]:  # type: ignore[override]
        """Leave the signals alone."""
        return contextlib.nullcontext()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen, and say so."""
        await super().startup(sockets)
        notify(f"READY=1\nSTATUS={self.url}")

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Let what runs end for a while, and end then what still does."""
        drain_s, n_active = self._frontend.config.drain_s, self._guard.n_active
        if n_active and drain_s and not self.force_exit:
            requests = "request" if n_active == 1 else "requests"
            _LOG.info(
                "waiting up to %g s for %d %s; Ctrl-C again to stop now",
                drain_s,
                n_active,
                requests,
            )
        loop = asyncio.get_running_loop()
        deadline = loop.call_later(drain_s, self._frontend.end_requests)
        await super().shutdown(sockets)
        deadline.cancel()
        if self.server_state.tasks:
            await self._end_tasks()

    async def _end_tasks(self) -> None:
        """End the requests that were not waited for: with their error, else by cancelling them."""
        self._frontend.end_requests()
        _, late = await asyncio.wait(self.server_state.tasks, timeout=_LAST_WORDS_S / 4)
        for task in late:
            task.cancel()
        if late:
            await asyncio.wait(late, timeout=_LAST_WORDS_S / 4)

    def stop(self) -> None:
        """Drain and end; a second time, end at once."""
        if self.should_exit:
            self.force_exit = True
        self._frontend.is_draining = True
        self.should_exit = True

    async def serve_all(self) -> None:
        """Serve until `stop`, everything closed at the end."""
        frontend = self._frontend
        link = asyncio.create_task(frontend.link.run())
        link.add_done_callback(lambda _task: self.stop())
        telling = asyncio.create_task(self._tell_joined())
        _LOG.info("%s at %s", frontend.name, self.url)
        if frontend.encoding.missing is not None:
            _LOG.warning("%s", frontend.encoding.missing)
        try:
            await self.serve(sockets=[self._listener])
        finally:
            notify("STOPPING=1")
            telling.cancel()
            link.cancel()
            frontend.close()
            await asyncio.gather(link, telling, return_exceptions=True)

    async def _show_life(self) -> None:
        self._watchdog.beat(_LOOP)

    async def _tell_joined(self) -> None:
        """Whoever started us may wait until requests are answered, not only taken."""
        await self._frontend.link.first_joined.wait()
        notify(f"{JOINED}=1")


async def _until_signal(server: HttpServer) -> None:
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, server.stop)
    await server.serve_all()
