"""A real etcd of one member or several, on free ports, whose members can be killed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import threading
import urllib.request
from base64 import b64encode
from pathlib import Path
from types import TracebackType
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
PROGRAM: Final = shutil.which(
    "etcd", path=f"{ROOT / '.venv' / 'bin'}{os.pathsep}{os.environ.get('PATH', '')}"
)
START_S_MAX: Final = 60.0
# An etcd of one member need not wait for others. Its leases last at least a second.
ONE_MEMBER: Final = ("--heartbeat-interval", "20", "--election-timeout", "100")
MANY_MEMBERS: Final = ("--heartbeat-interval", "50", "--election-timeout", "500")
READY: Final = "serving client traffic"


class Member:
    """One process of an etcd. `options` are those that it has besides its addresses."""

    def __init__(
        self,
        directory: Path,
        name: str,
        scheme: str,
        ports: tuple[int, int],
        host: str = "127.0.0.1",
        prefix: tuple[str, ...] = (),
    ) -> None:
        self.name = name
        self._prefix = prefix
        self.data = directory / name
        self.log = directory / f"{name}.log"
        self.port = ports[0]
        self.endpoint = f"{scheme}://{host}:{ports[0]}"
        self.peer = f"http://{host}:{ports[1]}"
        self.options: list[str] = []
        self._process: subprocess.Popen[str] | None = None
        self._ready = threading.Event()

    def spawn(self) -> None:
        """Start the process, on the data that are there."""
        assert PROGRAM is not None
        command = [*self._prefix, PROGRAM, "--name", self.name, "--data-dir", str(self.data)]
        command += ["--listen-client-urls", self.endpoint, "--advertise-client-urls", self.endpoint]
        command += ["--listen-peer-urls", self.peer, "--initial-advertise-peer-urls", self.peer]
        command += ["--logger", "zap", "--log-outputs", "stderr", *self.options]
        # Kills spare what the kernel has, and a disk with other work holds etcd up for seconds.
        command += ["--bcrypt-cost", "4", "--unsafe-no-fsync"]
        self._ready.clear()
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        threading.Thread(target=self._read_log, args=[self._process], daemon=True).start()

    def wait_until_ready(self) -> None:
        assert self._ready.wait(START_S_MAX), self.log.read_text()[-2000:]
        assert self._process is not None
        assert self._process.poll() is None, self.log.read_text()[-2000:]

    def start(self) -> None:
        self.spawn()
        self.wait_until_ready()

    def kill(self) -> None:
        """End the process as a power cut does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def send(self, number: signal.Signals) -> None:
        """Send a signal; return from SIGSTOP when all threads stand still."""
        assert self._process is not None
        self._process.send_signal(number)
        if number == signal.SIGSTOP:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def wipe(self) -> None:
        """Forget all data of a member that was killed."""
        shutil.rmtree(self.data)

    def _read_log(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with self.log.open("a") as log, process.stderr:
            for line in process.stderr:
                log.write(line)
                log.flush()
                if READY in line:
                    self._ready.set()
        self._ready.set()  # It has ended: nobody need wait.


class RealEtcd:
    """An etcd, as a context manager. With `tls`, clients must speak TLS.

    Args:
        directory: Where data and logs are.
        members: The number of members.
        tls: The certificates, as `ca`, `cert` and `key`.
        client_certificates: Whether clients must show a certificate of the `ca`.
        host: The address of all members.
        prefix: The command of each member comes behind this.
    """

    def __init__(
        self,
        directory: Path,
        members: int = 1,
        tls: dict[str, Path] | None = None,
        client_certificates: bool = False,
        host: str = "127.0.0.1",
        prefix: tuple[str, ...] = (),
    ) -> None:
        ports = _free_ports(2 * members)
        self._tls = tls
        self.members = [
            Member(
                directory,
                f"m{at}",
                "https" if tls else "http",
                ports[2 * at : 2 * at + 2],
                host,
                prefix,
            )
            for at in range(members)
        ]
        peers = ",".join(f"{member.name}={member.peer}" for member in self.members)
        options = ["--initial-cluster", peers]
        options += ONE_MEMBER if members == 1 else MANY_MEMBERS
        if tls:
            options += ["--cert-file", str(tls["cert"]), "--key-file", str(tls["key"])]
            options += ["--trusted-ca-file", str(tls["ca"])]
            options += ["--client-cert-auth"] if client_certificates else []
        for member in self.members:
            member.options = options

    @property
    def endpoints(self) -> list[str]:
        return [member.endpoint for member in self.members]

    @property
    def only(self) -> Member:
        (member,) = self.members
        return member

    def __enter__(self) -> RealEtcd:
        try:
            for member in self.members:
                member.spawn()
            for member in self.members:
                member.wait_until_ready()
        except BaseException:
            self.kill()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.kill()

    def kill(self) -> None:
        for member in self.members:
            member.kill()

    def ask(self, path: str, token: str = "", **body: Any) -> dict[str, Any]:
        """POST a request of the JSON gateway to the first member; bytes become base64."""
        data = json.dumps(body, default=lambda value: b64encode(value).decode()).encode()
        context = None
        if self._tls:
            context = ssl.create_default_context(cafile=str(self._tls["ca"]))
        url = f"{self.members[0].endpoint}/v3/{path}"
        headers = {"Authorization": token} if token else {}
        request = urllib.request.Request(url, data, headers)
        with urllib.request.urlopen(request, timeout=10, context=context) as answer:
            found: dict[str, Any] = json.load(answer)
        return found

    def compact(self, revision: int) -> None:
        self.ask("kv/compaction", revision=revision, physical=True)

    def change_password(self, user: str, old_of_root: str, new: str) -> None:
        """Give a user another password, where there are users."""
        token = self.ask("auth/authenticate", name="root", password=old_of_root)["token"]
        self.ask("auth/user/changepw", token, name=user, password=new)

    def enable_users(self, user: str, password: str, prefix: str) -> None:
        """Let in a user, who may read and write below a prefix, and nobody without a password."""
        for name, role in (("root", "root"), (user, "own")):
            self.ask("auth/user/add", name=name, password=password)
            self.ask("auth/role/add", name=role)
            self.ask("auth/user/grant", user=name, role=role)
        key = prefix.encode()
        end = key[:-1] + bytes([key[-1] + 1])
        permission = {"permType": "READWRITE", "key": key, "range_end": end}
        self.ask("auth/role/grant", name="own", perm=permission)
        self.ask("auth/enable")


def _free_ports(count: int) -> Any:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = tuple(sock.getsockname()[1] for sock in sockets)
    for sock in sockets:
        sock.close()
    return ports
