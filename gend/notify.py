"""What systemd is told about the daemon (sd_notify, Type=notify); nothing where no systemd asks for it.

The protocol is one datagram of KEY=VALUE lines to the unix socket in $NOTIFY_SOCKET. A watchdog that is fed from a
thread of its own would be fed while the supervisor hangs: hence one call from its loop, and no timer in here.
"""

import os
import socket
import time
from collections.abc import MutableMapping

EXTENSION_SECONDS = 30
"""While draining, each message asks for this long from now, however short TimeoutStopSec is: the settings may allow
more than the unit file knows of. A supervisor that hangs while it drains is ended this long after its last message."""

_EXTEND_EVERY_SECONDS = 5.0


class Notifier:
    """Keeps systemd informed, from the loop of the process that systemd watches."""

    def __init__(self, environment: MutableMapping[str, str] = os.environ) -> None:
        """Takes the variables out of `environment`, so that no child believes it is the one that systemd watches."""
        address = environment.pop("NOTIFY_SOCKET", "")
        microseconds = environment.pop("WATCHDOG_USEC", "")
        watched = environment.pop("WATCHDOG_PID", "") in ("", str(os.getpid())) and microseconds
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) if address else None
        self._feed_every_seconds = int(microseconds) / 2e6 if watched else float("inf")
        self._ready = self._stopping = False
        self._status = ""
        self._fed_at = self._extended_at = float("-inf")

    def tell(self, status: str, draining: bool) -> None:
        """Say what is due; to be called on every tick. The first call says that the daemon is up.

        `status` is one line, shown by `systemctl status`.
        """
        if self._socket is None:
            return
        now = time.monotonic()
        feed = now - self._fed_at >= self._feed_every_seconds
        extend = draining and now - self._extended_at >= _EXTEND_EVERY_SECONDS
        lines = ["READY=1"] if not self._ready else []
        lines += [f"STATUS={status}"] if status != self._status else []
        lines += ["WATCHDOG=1"] if feed else []
        lines += ["STOPPING=1"] if draining and not self._stopping else []
        lines += [f"EXTEND_TIMEOUT_USEC={EXTENSION_SECONDS * 1_000_000}"] if extend else []
        if not lines:
            return
        try:
            self._socket.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return  # its queue is full, or it is being restarted: the same lines are due again on the next tick
        self._ready, self._stopping, self._status = True, draining, status
        self._fed_at = now if feed else self._fed_at
        self._extended_at = now if extend else self._extended_at
