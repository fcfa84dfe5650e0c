"""The files for containers name settings, files, ports and metrics that are there."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from shardmq.supervisor.sources import LOGINS, OTHERS, from_environment, is_setting, read

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
MANIFESTS = {
    (found["kind"], found["metadata"]["name"]): found
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    for found in yaml.safe_load_all(path.read_text())
    if found["kind"] != "Kustomization"
}
STATEFUL_SET = MANIFESTS["StatefulSet", "shardmq"]["spec"]
POD = STATEFUL_SET["template"]["spec"]
(CONTAINER,) = POD["containers"]
BROKER = COMPOSE["services"]["shardmq"]
NODES = [COMPOSE["services"][f"node-{number}"] for number in (1, 2, 3)]
PORTS = {"amqp": 5672, "http": 15672, "metrics": 15692}
VARIABLE = re.compile(r"\bSHARDMQ_[A-Z0-9_]+")


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.*")), ids=lambda path: path.name)
def test_each_variable_that_a_file_names_is_one_of_ours(path: Path) -> None:
    # One is misspelt on purpose, as the page of settings shows what is said then.
    not_variables = {"SHARDMQ_PROCESS", "SHARDMQ_SECTION_KEY", "SHARDMQ_LISTEN_AMQP_PROT"}
    from_services = {"SHARDMQ_PORT", "SHARDMQ_SERVICE_HOST", "SHARDMQ_PORT_5672_TCP"}
    names = set(VARIABLE.findall(path.read_text(errors="ignore")))
    names -= OTHERS | not_variables | from_services
    assert [name for name in sorted(names) if not is_setting(name)] == []


def test_the_image_runs_as_a_user_of_its_own_with_a_volume_and_a_health_check() -> None:
    last = DOCKERFILE.rpartition("\nFROM ")[2]
    assert re.search(r"^USER shardmq$", last, re.MULTILINE)
    assert re.search(r"--uid 5672 --gid 5672 .*shardmq", last)
    assert re.search(r"^VOLUME /var/lib/shardmq$", last, re.MULTILINE)
    assert re.search(r"^ENV .*SHARDMQ_DATA_DIR=/var/lib/shardmq", last, re.MULTILINE)
    assert re.search(r"^HEALTHCHECK .*check_running", last, re.MULTILINE)
    (exposed,) = re.findall(r"^EXPOSE (.*)$", last, re.MULTILINE)
    assert {int(port) for port in exposed.split()} >= set(PORTS.values())
    (entry,) = re.findall(r"^ENTRYPOINT (.*)$", last, re.MULTILINE)
    (command,) = re.findall(r"^CMD (.*)$", last, re.MULTILINE)
    assert [*json.loads(entry), *json.loads(command)][:2] == ["shardctl", "start"]


def test_grafana_and_prometheus_are_reached_from_the_host_only() -> None:
    for name in ("grafana", "prometheus"):
        assert all(port.startswith("127.0.0.1:") for port in COMPOSE["services"][name]["ports"])


def test_files_that_the_image_and_compose_take_are_there() -> None:
    for source in re.findall(r"^COPY (deploy/\S+)", DOCKERFILE, re.MULTILINE):
        assert (DEPLOY.parent / source).is_file()
    for service in COMPOSE["services"].values():
        for volume in service["volumes"]:
            source = volume.split(":")[0]
            found = (
                (DEPLOY / source).is_file() if source[0] == "." else source in COMPOSE["volumes"]
            )
            assert found, volume
        assert set(service.get("secrets", ())) <= set(COMPOSE["secrets"])
    build = BROKER["build"]
    assert (DEPLOY / build["context"] / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"


def broken_secrets(compose: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the services that are read-only, each with a secret that Docker must write into it."""
    return [
        (name, secret)
        for name, service in compose["services"].items()
        for secret in service.get("secrets", ())
        if service.get("read_only") and "file" not in compose["secrets"][secret]
    ]


def test_no_read_only_service_has_a_secret_that_must_be_written_into_it() -> None:
    assert broken_secrets(COMPOSE) == []
    written = {**COMPOSE["secrets"], "broker_password": {"environment": "BROKER_PASSWORD"}}
    assert broken_secrets({**COMPOSE, "secrets": written}) == [
        (name, "broker_password") for name in ("shardmq", "node-1", "node-2", "node-3")
    ]


def test_a_password_beside_the_files_is_neither_committed_nor_sent_to_the_build() -> None:
    for secret in COMPOSE["secrets"].values():
        path = (DEPLOY / secret["file"]).resolve().relative_to(DEPLOY.parent)
        assert f"/{path}" in (DEPLOY.parent / ".gitignore").read_text().splitlines()
        assert str(path) in (DEPLOY.parent / ".dockerignore").read_text().splitlines()


@pytest.mark.parametrize(
    "environment",
    [
        BROKER["environment"],
        NODES[0]["environment"],
        {one["name"]: one["value"] for one in CONTAINER["env"]},
    ],
    ids=["compose", "node", "kubernetes"],
)
def test_the_broker_takes_the_variables_and_lets_the_first_user_in(
    environment: dict[str, str], tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("s3cret")
    given = {
        name: str(secret) if name.endswith("_FILE") else value
        for name, value in environment.items()
    }
    text = MANIFESTS["ConfigMap", "shardmq"]["data"]["broker.toml"]
    is_pod = "SHARDMQ_SHARDS_COUNT" in environment
    (tmp_path / "broker.toml").write_text(text if is_pod else "")
    settings = read(tmp_path / "broker.toml", from_environment(given)).settings
    assert settings.users.default_user != "guest"  # who may log in from the container alone
    assert settings.users.default_pass == "s3cret"
    assert settings.users.http_without_tls  # else the page takes no password from outside


def test_three_nodes_and_an_etcd_start_where_they_are_named_and_share_what_nodes_share(
    tmp_path: Path,
) -> None:
    etcd = COMPOSE["services"]["etcd"]
    assert all(service["profiles"] == ["cluster"] for service in (etcd, *NODES))
    assert "profiles" not in BROKER
    for node in NODES:
        assert node["depends_on"] == ["etcd"]
        assert node["environment"] == NODES[0]["environment"]
        assert Path(node["environment"]["SHARDMQ_CLUSTER_SECRET_FILE"]).name in node["secrets"]
    # What each has for itself. The name of a node is that of its host.
    for one in ("hostname", "volumes", "ports"):
        assert len({str(node[one]) for node in NODES}) == len(NODES)
    ports = [port.split(":") for node in NODES for port in node["ports"]]
    assert {int(inside) for _, inside in ports} == {PORTS["amqp"], PORTS["http"]}
    assert len({outside for outside, _ in ports}) == len(ports)
    given = NODES[0]["environment"].items()
    (tmp_path / "secret").write_text("long")
    files = {name: str(tmp_path / "secret") for name, _ in given if name.endswith("_FILE")}
    settings = read(None, from_environment(dict(given) | files)).settings
    assert f"--advertise-client-urls={settings.cluster.endpoints[0]}" in etcd["command"]
    assert (settings.cluster.name, settings.cluster.secret) == ("orders", "long")


def test_a_stop_has_the_time_of_a_drain() -> None:
    stages_s = (
        3 * tomllib.loads((DEPLOY / "broker.toml").read_text())["supervision"]["drain_timeout_s"]
    )
    assert BROKER["stop_grace_period"] == "2m" and stages_s < 120
    hook = CONTAINER["lifecycle"]["preStop"]["exec"]["command"][-1]
    found = re.fullmatch(r"sleep (\d+); exec shardctl stop --timeout (\d+)", hook)
    assert found is not None
    assert stages_s < int(found[2])
    assert int(found[1]) + int(found[2]) < POD["terminationGracePeriodSeconds"]


def test_services_lead_to_the_ports_of_the_pod() -> None:
    assert {one["name"]: one["containerPort"] for one in CONTAINER["ports"]} == PORTS
    labels = STATEFUL_SET["template"]["metadata"]["labels"]
    assert STATEFUL_SET["selector"]["matchLabels"].items() <= labels.items()
    for name in ("shardmq", "shardmq-headless"):
        service = MANIFESTS["Service", name]["spec"]
        assert service["selector"].items() <= labels.items()
        for port in service["ports"]:
            assert PORTS[port["targetPort"]] == port["port"]
    assert ("Service", STATEFUL_SET["serviceName"]) in MANIFESTS


def test_the_pod_is_confined_and_its_directories_can_be_written() -> None:
    assert STATEFUL_SET["replicas"] == 1
    own = POD["securityContext"]
    assert (own["runAsUser"], own["runAsNonRoot"], own["fsGroup"]) == (5672, True, 5672)
    assert CONTAINER["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    mounts = {one["name"]: one["mountPath"] for one in CONTAINER["volumeMounts"]}
    volumes = [*POD["volumes"], *(one["metadata"] for one in STATEFUL_SET["volumeClaimTemplates"])]
    assert mounts.keys() == {one["name"] for one in volumes}
    assert {"/var/lib/shardmq", "/run/shardmq", "/tmp"} <= set(mounts.values())
    assert "enableServiceLinks" in POD and not POD["enableServiceLinks"]


def test_probes_are_health_checks_of_shardctl() -> None:
    for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
        command = CONTAINER[kind]["exec"]["command"]
        command = command[command.index("shardctl") :]
        help_of = [*command[: command.index("--quiet")], "--help"]
        assert invoked(help_of[1:]) == 0, command


def test_probes_are_not_confused_by_the_variables_of_shardctl() -> None:
    (health,) = re.findall(r"^HEALTHCHECK .* CMD (\[.*\])$", DOCKERFILE, re.MULTILINE)
    kinds = ("startupProbe", "readinessProbe", "livenessProbe")
    probes = [json.loads(health), *(CONTAINER[kind]["exec"]["command"] for kind in kinds)]
    given = dict.fromkeys(("SHARDMQ_URL", *LOGINS), "x")
    for probe in probes:
        prefix = probe[: probe.index("shardctl")]
        assert prefix[0] == "env"
        done = subprocess.run(
            [*prefix, "env"],
            env={**os.environ, **given},
            capture_output=True,
            text=True,
            check=True,
        )
        left = {line.partition("=")[0] for line in done.stdout.splitlines()}
        assert left & given.keys() == set(), probe
    for service in COMPOSE["services"].values():
        assert "healthcheck" not in service  # the one of the image


def invoked(arguments: list[str]) -> Any:
    from typer.testing import CliRunner

    from shardmq.supervisor.cli.app import app

    return CliRunner().invoke(app, arguments).exit_code


def test_grafana_gets_its_data_source_and_the_dashboard() -> None:
    grafana, prometheus = COMPOSE["services"]["grafana"], COMPOSE["services"]["prometheus"]
    mounted = dict(volume.split(":")[:2] for volume in grafana["volumes"])
    folder = yaml.safe_load((DEPLOY / "grafana" / "dashboards.yaml").read_text())["providers"][0]
    assert str(Path(mounted["./grafana-dashboard.json"]).parent) == folder["options"]["path"]
    (source,) = yaml.safe_load((DEPLOY / "grafana" / "datasource.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["isDefault"]
    scraped = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())
    (job,) = scraped["scrape_configs"]
    assert job["static_configs"][0]["targets"] == [f"shardmq:{PORTS['metrics']}"]
    assert job["job_name"] == "shardmq"  # the alert for a broker that is down asks for this name
    mounted = dict(volume.split(":")[:2] for volume in prometheus["volumes"])
    assert {str(Path(mounted[f"./{name}"]).name) for name in scraped["rule_files"]} == {
        "alerts.yaml"
    }


def rules() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((DEPLOY / "alerts.yaml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def test_each_alert_is_tested_and_described() -> None:
    tested = (DEPLOY / "alerts-test.yaml").read_text()
    described = (DEPLOY / "ALARMS.md").read_text()
    named = [rule["alert"] for rule in rules()]
    assert re.findall(r"^### (Shardmq\w+)$", described, re.MULTILINE) == named
    for rule in rules():
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"].keys() == {"summary", "description", "runbook_url"}
        assert rule["annotations"]["runbook_url"] == f"deploy/ALARMS.md#{rule['alert'].lower()}"
        assert f'alertname="{rule["alert"]}"' in tested
        severity = rule["labels"]["severity"].capitalize()
        assert f"### {rule['alert']}\n\n*{severity}.* " in described


needs_promtool = pytest.mark.skipif(not shutil.which("promtool"), reason="no promtool")


def expected_of(rule: dict[str, Any]) -> dict[str, Any]:
    """Return the file that tests the rules, with what it expects of one of them alone."""
    text = (DEPLOY / "alerts-test.yaml").read_text()
    found: dict[str, Any] = yaml.safe_load(text)
    # Each `0x240` is 240 zeros, and no number to base 16.
    plain = yaml.load(text, yaml.BaseLoader)
    for one, as_text in zip(found["tests"], plain["tests"], strict=True):
        one["input_series"] = as_text["input_series"]
        one["alert_rule_test"] = [
            each
            for each in one.get("alert_rule_test", [])
            if each["alertname"] == rule["alert"] and each["exp_alerts"]
        ]
        for each in one.get("promql_expr_test", []):
            each["exp_samples"] = [
                sample
                for sample in each["exp_samples"]
                if f'alertname="{rule["alert"]}"' in sample["labels"]
            ]
    found["tests"] = [
        one
        for one in found["tests"]
        if one["alert_rule_test"]
        or any(each["exp_samples"] for each in one.get("promql_expr_test", []))
    ]
    return found


def promtool(folder: Path) -> subprocess.CompletedProcess[str]:
    command = ["promtool", "test", "rules", "alerts-test.yaml"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@needs_promtool
def test_the_alerts_are_raised_when_they_should_be() -> None:
    done = promtool(DEPLOY)
    assert done.returncode == 0, done.stdout + done.stderr


@needs_promtool
@pytest.mark.parametrize("rule", rules(), ids=lambda rule: rule["alert"])
def test_a_rule_that_is_never_true_is_caught(tmp_path: Path, rule: dict[str, Any]) -> None:
    """The rule is alone, so that each call takes a moment only."""
    (tmp_path / "alerts-test.yaml").write_text(yaml.safe_dump(expected_of(rule)))
    for expression, status in (
        (rule["expr"], 0),
        (f"({rule['expr']}) and vector(1) < 0", 1),
    ):
        alone = {"groups": [{"name": "shardmq", "rules": [{**rule, "expr": expression}]}]}
        (tmp_path / "alerts.yaml").write_text(yaml.safe_dump(alone))
        done = promtool(tmp_path)
        assert done.returncode == status, done.stdout + done.stderr
