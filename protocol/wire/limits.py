"""Numbers that both sides of a socket keep to: sizes, counts, deadlines, socket options."""

from __future__ import annotations

MAX_FRAME_BYTES = 1 << 20  # the codec refuses more, with an answer
MAX_MESSAGE_BYTES = 16 << 20  # ZMQ_MAXMSGSIZE: beyond it the connection drops and nobody is told
SEND_HIGH_WATER = 64  # frames
RECEIVE_HIGH_WATER = 1024  # frames
HANDSHAKE_MS = 2_000  # ZMQ_HANDSHAKE_IVL: who says nothing for so long is hung up on
MOST_WAITING_BYTES = 1 << 20  # for one client whose pipe is full; with more it is dropped
DEAF_MS = 2_000  # a client that takes none of them for so long is, too
MAX_PATH_BYTES = 100  # of a socket's path

MAX_LIST = 1 << 18  # entries of any list
MOST_ROWS = 1 << 15  # Engram rows of one request
# Of a session, for each table of the model, that are not done: twice what a chunk of a prompt and
# the one behind it have at once.
MOST_ROW_REQUESTS = 4
MOST_KEYS_NAMED = 4096  # of a Fetch over the quota, each with its error; of more it is refused
MAX_TEXT = 8192  # characters of any text
MAX_NAME = 128  # characters of a name in a dictionary
MAX_VALUES = 4096  # entries of a dictionary
MAX_EXTRA_FIELDS = 16  # trailing fields of a newer minor version that are passed over

HELLO_MS = 5_000
HELLO_AGAIN_MS = 2_000  # a Hello unanswered for so long is said again on a new socket
MISS_MS = 30_000
ROWS_MS = 5_000
CANCEL_MS = 5_000
GIVE_UP_MS = 100  # how often a waiting engine asks whether its request is still wanted
STATS_MS = 1_000
RESIZE_MS = 600_000  # memory is populated at some GiB a second
ATTACH_MS = 2_000  # from Welcome to the descriptor being handed over
ACK_IDLE_MS = 50  # an idle engine acks Changes within this time
BYE_MS = 200  # how long a closing client waits for the daemon to hang up
STUCK_MS = 10_000  # a Ping unanswered for so long shows the peer as stuck
