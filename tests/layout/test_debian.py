"""The scripts of the Debian package enable, start and stop the right units.

The commands that they call are stubs: systemctl keeps the enabled and the running units in files.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

SCRIPTS: Final = Path(__file__).parents[2] / "deploy" / "debian"
BROKER: Final = "shardmq.service"
SOCKETS: Final = ["shardmq-amqp.socket", "shardmq-amqps.socket", "shardmq-http.socket"]
SYSTEMCTL: Final = """#!/bin/sh
command=
units=
for word; do
    case $word in
    --*) ;;
    *) if [ -z "$command" ]; then command=$word; else units="$units $word"; fi ;;
    esac
done
echo "$command" >>"$DPKG_ROOT/called"
for unit in $units; do
    case $command in
    enable) touch "$DPKG_ROOT/enabled/$unit" ;;
    disable) rm -f "$DPKG_ROOT/enabled/$unit" ;;
    is-enabled) [ -e "$DPKG_ROOT/enabled/$unit" ] || exit 1 ;;
    start) touch "$DPKG_ROOT/running/$unit" ;;
    stop) rm -f "$DPKG_ROOT/running/$unit" ;;
    esac
done
"""


class Host:
    """A host on which dpkg calls the scripts."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for folder in ("bin", "enabled", "running", "run/systemd/system"):
            (root / folder).mkdir(parents=True)
        for name in ("systemctl", "systemd-sysusers", "systemd-tmpfiles", "chgrp"):
            stub = root / "bin" / name
            stub.write_text(SYSTEMCTL if name == "systemctl" else "#!/bin/sh\n")
            stub.chmod(0o755)

    def calls(self, script: str, *arguments: str) -> None:
        path = f"{self.root / 'bin'}:{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "DPKG_ROOT": str(self.root)}
        subprocess.run([SCRIPTS / script, *arguments], env=environment, check=True)

    def units(self, folder: str) -> list[str]:
        return sorted(os.listdir(self.root / folder))

    def set_enabled(self, units: list[str]) -> None:
        for unit in self.units("enabled"):
            (self.root / "enabled" / unit).unlink()
        for unit in units:
            (self.root / "enabled" / unit).touch()


@pytest.fixture
def host(tmp_path: Path) -> Host:
    found = Host(tmp_path)
    found.calls("postinst", "configure", "")
    assert found.units("enabled") == found.units("running") == [BROKER]
    return found


@pytest.mark.parametrize("enabled", [[BROKER], [SOCKETS[0], BROKER], [SOCKETS[2]], []], ids=str)
def test_removed_and_installed_again_it_is_enabled_and_runs_as_before(
    host: Host, enabled: list[str]
) -> None:
    host.set_enabled(enabled)
    for _ in range(2):
        host.calls("prerm", "remove")
        host.calls("postrm", "remove")
        assert host.units("enabled") == host.units("running") == []
        host.calls("postinst", "configure", "1.0")  # dpkg still gives the version
        assert host.units("enabled") == host.units("running") == enabled


def test_an_upgrade_restarts_it_and_enables_nothing(host: Host) -> None:
    host.set_enabled([])
    host.calls("prerm", "upgrade", "1.1")
    host.calls("postrm", "upgrade", "1.1")
    host.calls("postinst", "configure", "1.0")
    assert host.units("enabled") == []
    assert (host.root / "called").read_text().split()[-1] == "try-restart"


def test_what_was_purged_is_installed_as_for_the_first_time(host: Host) -> None:
    host.set_enabled([])
    host.calls("prerm", "remove")
    host.calls("postrm", "remove")
    host.calls("postrm", "purge")
    host.calls("postinst", "configure", "")
    assert host.units("enabled") == [BROKER]


def test_the_links_of_the_pages_in_the_package_resolve(tmp_path: Path) -> None:
    assert '"$here/documents" "$root/usr/share/doc/shardmq"' in (SCRIPTS / "build").read_text()
    subprocess.run([sys.executable, SCRIPTS / "documents", tmp_path], check=True)
    pages = {path.name for path in (tmp_path / "deploy").glob("*.md")}
    assert pages == {path.name for path in SCRIPTS.parent.glob("*.md")}
    links = re.compile(r"\]\(([^)#:\s]+)(?:#[^)\s]*)?\)")
    lost = [
        f"{page.relative_to(tmp_path)}: {link}"
        for page in tmp_path.rglob("*.md")
        for link in links.findall(page.read_text())
        if not (page.parent / link).exists()
    ]
    assert lost == []
    for name in ("deploy/prometheus.yml", "deploy/alerts-test.yaml", "examples/go/orders.go"):
        assert (tmp_path / name).is_file()
