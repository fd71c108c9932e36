"""The compute service: requests of frontends, run one at a time by the thread that owns the model.

The main thread owns the model and the sequences (worker.py); a thread of its own owns the sockets
(server.py), so that a cancel is heard while the model computes. Between them stand the queue of
requests one way and the outbox the other; neither thread waits for a frontend.
"""
