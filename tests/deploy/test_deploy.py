"""What lies in deploy/ is whole: it loads, names what is there, and passes its tools' own checks.

shellcheck and systemd-analyze look at the script and the units where they are installed.
"""

from __future__ import annotations

import ipaddress
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement

from headwater.common.settings.sources import load

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
SCRIPT = DEPLOY / "install-client.sh"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
COMPOSE = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
BOARD = json.loads((DEPLOY / "grafana" / "headwater.json").read_text())
RULES = yaml.safe_load((DEPLOY / "alerts.yml").read_text())


def refused(*arguments: str) -> str:
    """Run the installer, which must refuse; return the reason's name."""
    found = subprocess.run(
        ["sh", SCRIPT, *arguments], capture_output=True, text=True, timeout=280, check=False
    )
    assert found.returncode == 1, found.stdout + found.stderr
    assert "remedy: " in found.stderr
    name = re.match(r"install-client: (\w+): ", found.stderr)
    assert name is not None, found.stderr
    return name[1]


@pytest.mark.skipif(shutil.which("shellcheck") is None, reason="no shellcheck")
def test_shellcheck_finds_nothing_in_the_installer() -> None:
    found = subprocess.run(["shellcheck", SCRIPT], capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout


def test_the_installer_names_the_reason_of_a_refusal() -> None:
    assert refused("--nonsense") == "Usage"
    assert refused("--join", "headwater-join-1.x") == "TokenInArguments"
    assert refused("--token-file") == "Usage"
    assert refused("--token-file", "/nowhere/token") == "NoToken"
    assert refused("--purge") == "Usage"
    assert refused("--data", "/nowhere") == "NoData"


@pytest.mark.skipif(os.geteuid() == 0, reason="this is root")
def test_the_installer_needs_root() -> None:
    assert refused() == "NotRoot"


@pytest.mark.skipif(os.geteuid() != 0, reason="the installer needs root")
def test_the_installer_refuses_half_a_checkout(tmp_path: Path) -> None:
    reason = refused("--source", str(tmp_path))
    assert reason in {"NoSource", "NoSuchSystem", "NoSuchMachine"}


def test_the_installer_asks_for_a_torch_that_was_tried_and_that_the_project_allows() -> None:
    """The project sets no upper bound where any torch may do; the installer takes a tried one."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    allowed = [line.split(";")[0] for line in project["dependencies"] if line.startswith("torch>")]
    tried = set(re.findall(r"'(torch>=[^']*)'", (ROOT / "Makefile").read_text()))
    assert len(tried) == len(allowed) == 2
    assert all(any(one.startswith(bounds) for bounds in allowed) for one in tried)
    assert set(re.findall(r"torch='([^']*)'", SCRIPT.read_text())) == tried
    for line in re.findall(r"^torch==.*", (DEPLOY / "torch.txt").read_text(), flags=re.M):
        pinned = Requirement(line.rstrip("\\"))
        (version,) = pinned.specifier
        bounds = "torch>=2.7,<2.10" if "aarch64" in line else "torch>=2.6,<2.14"
        assert bounds in tried
        assert Requirement(bounds).specifier.contains(version.version)


def test_arm64_gets_a_torch_for_processors_without_lse_atomics() -> None:
    """torch 2.10 is the first whose arm64 build has them, and dies on a Raspberry Pi 3 or 4."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (line,) = (line for line in project["dependencies"] if re.match(r"torch.*== 'aarch64'", line))
    assert not Requirement(line).specifier.contains("2.10.0")
    assert Requirement(line).specifier.contains("2.9.1")


def self_test(room: Path, python: str, **settings: str) -> str:
    """Run the installer's test of a release whose Python is this script; return what it says."""
    (room / "venv" / "bin").mkdir(parents=True)
    (room / "venv" / "bin" / "python").write_text(f"#!/bin/sh\n{python}\n")
    (room / "venv" / "bin" / "python").chmod(0o755)
    given = "\n".join(f"{name}={value}" for name, value in {"release": room, **settings}.items())
    script = SCRIPT.read_text().replace('\nmain "$@"', f"\n{given}\ncheck_release")
    found = subprocess.run(
        ["sh", "-c", script], capture_output=True, text=True, timeout=280, check=False
    )
    assert found.returncode == 1, found.stdout + found.stderr
    return found.stderr


def call(room: Path, function: str, **settings: str) -> str:
    """Call a function of the installer, its places and tools in a folder; return what it says."""
    for name, body in {
        "runuser": 'while [ "$1" != -- ]; do shift; done; shift; exec "$@"',
        "chgrp": "exit 0",
    }.items():
        (room / "tools").mkdir(exist_ok=True)
        (room / "tools" / name).write_text(f"#!/bin/sh\n{body}\n")
        (room / "tools" / name).chmod(0o755)
    places = {name: str(room / name.lower()) for name in ("PREFIX", "SETTINGS", "STATE", "UNITS")}
    for place in places.values():
        Path(place).mkdir(exist_ok=True)
    (room / "prefix" / "venv" / "bin").mkdir(parents=True)
    python = room / "prefix" / "venv" / "bin" / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    (room / "prefix" / "venv" / "bin" / "headwater-client").symlink_to(room / "joined")
    (room / "settings" / "client.toml").write_text((DEPLOY / "client.toml").read_text())
    chosen = {**places, "source": str(ROOT), "data": "", **settings}
    given = "\n".join(f"{name}='{value}'" for name, value in chosen.items())
    script = SCRIPT.read_text().replace('\nmain "$@"', f"\n{given}\n{function}")
    found = subprocess.run(
        ["sh", "-c", script],
        env={"PATH": f"{room}/tools:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout + found.stderr


def test_the_installer_s_data_is_what_the_device_trains_on(tmp_path: Path) -> None:
    """Without it a bundled example would train on its own table."""
    data = tmp_path / "pictures"
    data.mkdir()
    spoken = call(tmp_path, "install_unit", data=str(data))
    assert load(tmp_path / "settings" / "client.toml", {}).client.data == data
    assert load(tmp_path / "settings" / "client.toml", {}).secure.min_members == 10
    drop_in = tmp_path / "units" / "headwater-client.service.d" / "data.conf"
    assert f"BindReadOnlyPaths={data}" in drop_in.read_text()
    assert "cannot read" not in spoken


def test_the_installer_shows_no_way_to_start_a_client_by_hand(tmp_path: Path) -> None:
    """After it joined, the service is started, which has other settings."""
    (tmp_path / "joined").write_text(
        "#!/bin/sh\necho pi has joined\necho 'Start it with this:'\necho '  headwater-client'\n"
    )
    (tmp_path / "joined").chmod(0o755)
    told = tmp_path / "state" / "enrolment"
    told.mkdir(parents=True)
    (told / "client.toml").write_text('[client]\nname = "pi"\nserver = "river:8500"\n')
    (tmp_path / "token").write_text("token")
    spoken = call(tmp_path, "join", token_file=str(tmp_path / "token"))
    assert spoken == "pi has joined\n"
    assert load(tmp_path / "settings" / "client.toml", {}).client.name == "pi"


def test_each_command_that_the_installer_prints_names_the_user_that_may_run_it() -> None:
    text = SCRIPT.read_text().replace("\\\n", " ")
    printed = "\n".join(re.findall(r"(?:say|fail \w+) .*", text))
    for command in re.findall(r"(?:sudo )?(?:systemctl|journalctl) \S+", printed):
        assert command.startswith("sudo "), command
    assert "sudo -u $DEVICE_USER $PREFIX/venv/bin/headwater-client doctor --config" in printed


ILL = '[ "$2" = -m ] || kill -ILL $$'  # pip check passes


def test_an_illegal_instruction_in_the_installer_s_test_is_named_with_its_remedy(
    tmp_path: Path,
) -> None:
    own = self_test(tmp_path / "own", ILL, wants_any_torch="no")
    assert "BadProcessor: this processor lacks an instruction" in own
    assert "lscpu" in own
    other = self_test(tmp_path / "other", ILL, wants_any_torch="yes")
    assert "remedy: leave --any-torch out" in other


def test_a_killed_test_of_the_installer_is_named_as_want_of_memory(tmp_path: Path) -> None:
    assert "NoMemory: " in self_test(tmp_path, '[ "$2" = -m ] || kill -KILL $$')


def test_the_installer_s_test_trains_with_two_threads(tmp_path: Path) -> None:
    """Some builds of torch have instructions that only their threaded matrix product uses."""
    spoken = self_test(tmp_path, '[ "$2" = -m ] || { cat >&2; exit 3; }')
    assert "torch.set_num_threads(2)\n" in spoken
    assert ".backward()\n" in spoken
    assert "BadRelease" in spoken


HASHED = ("requirements.txt", "requirements-examples.txt", "torch.txt")


@pytest.mark.parametrize("name", HASHED)
def test_each_package_that_is_installed_is_pinned_with_its_hash(name: str) -> None:
    text = (DEPLOY / name).read_text().replace("\\\n", "")
    rows = [line for line in text.splitlines() if line and not line.startswith("#")]
    assert len(rows) > (1 if name == "torch.txt" else 50)
    for row in rows:
        assert re.match(r"[a-z0-9-]+==[\w.+]+ (; [^\\]+)?(\s*--hash=sha256:[0-9a-f]{64})+$", row), (
            row
        )


@pytest.mark.parametrize("name", HASHED[:2])
def test_the_hashed_versions_are_those_that_the_tests_run_with(name: str) -> None:
    kept = set((ROOT / "constraints.txt").read_text().splitlines())
    tried = {line.partition(" ;")[0] for line in kept}
    rows = re.findall(r"^[a-z0-9-]+==[\w.+]+", (DEPLOY / name).read_text(), flags=re.M)
    of_torch = {"torch", "mpmath", "networkx", "sympy", "setuptools", "filelock", "fsspec"}
    assert {row for row in rows if row.partition("==")[0] not in of_torch} <= tried


def test_nothing_is_installed_without_its_hash() -> None:
    """Where pip may download, it holds each wheel against its hash, or it may not download."""
    script = SCRIPT.read_text().replace("\\\n", " ")
    docker = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    commands = re.findall(r"pip (?:--\S+ )*(?:download|install|wheel) .*", script + docker)
    assert len(commands) >= 7
    for command in commands:
        is_hashed = "--require-hashes" in command or '"$@"' in command  # download_torch
        assert is_hashed or "--no-index" in command, command


def test_the_installer_copies_what_the_units_and_the_package_need() -> None:
    script, dockerfile = SCRIPT.read_text(), (DEPLOY / "Dockerfile").read_text()
    for package in ("headwater", *(link.name for link in (ROOT / "headwater").glob("[!_.p]*"))):
        assert f" {package} " in script
        assert f"COPY {package} " in dockerfile


def test_the_settings_that_the_installer_lays_down_load() -> None:
    assert load(DEPLOY / "client.toml", {}).client.stay


def test_the_installer_s_minimum_of_members_is_higher_than_the_default() -> None:
    assert load(DEPLOY / "client.toml", {}).secure.min_members == 10
    assert load(None, {}).secure.min_members == 3


def test_the_installer_s_minimum_stands_where_the_masks_are_explained() -> None:
    page = (ROOT / "docs" / "secure-aggregation.md").read_text()
    assert "`deploy/install-client.sh` writes 10 into a device's settings" in page


def test_the_settings_that_the_installer_comments_out_are_settings(tmp_path: Path) -> None:
    text = re.sub(r"^# (\w+ = )", r"\1", (DEPLOY / "client.toml").read_text(), flags=re.M)
    (tmp_path / "all.toml").write_text(text)
    assert load(tmp_path / "all.toml", {}).client.name == "laptop"


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_finds_no_fault_in_a_unit(unit: Path, tmp_path: Path) -> None:
    text = re.sub(r"^ExecStart=\S+", "ExecStart=/bin/true", unit.read_text(), flags=re.M)
    (tmp_path / unit.name).write_text(text)  # nothing is installed here
    found = subprocess.run(
        ["systemd-analyze", "verify", tmp_path / unit.name],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze")
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_systemd_rates_a_unit_s_exposure_at_two_or_better(unit: Path) -> None:
    found = subprocess.run(
        ["systemd-analyze", "security", "--offline=yes", "--threshold=20", unit],
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stdout[-200:]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_leaves_sensors_readable_and_kernels_of_torch_writable(unit: Path) -> None:
    text = unit.read_text()
    assert not re.search(r"^ProcSubset=pid|^InaccessiblePaths=", text, flags=re.M)
    assert "\nMemoryDenyWriteExecute=no\n" in text


def flags_of(service: dict[str, Any]) -> dict[str, str]:
    pairs = (word.removeprefix("--").partition("=") for word in service["command"])
    return {name: value for name, _, value in pairs}


def networks_of(service: dict[str, Any]) -> set[str]:
    return set(service.get("networks", []))


def test_metrics_are_shown_only_in_a_network_that_prometheus_alone_shares() -> None:
    services = COMPOSE["services"]
    shown = {name: one for name, one in services.items() if "--public-metrics" in words_of(one)}
    assert set(shown) == {"server", "one", "two", "three"}
    for name, service in shown.items():
        own = f"metrics-{name}"
        assert networks_of(service) == {"fleet", own}
        (host, _, _) = flags_of(service)["metrics"].rpartition(":")
        assert service["networks"][own]["ipv4_address"] == host, "not at all of its addresses"
        assert {other for other, one in services.items() if own in networks_of(one)} == {
            name,
            "prometheus",
        }
        (subnet,) = COMPOSE["networks"][own]["ipam"]["config"]
        assert ipaddress.ip_address(host) in ipaddress.ip_network(subnet["subnet"])
    assert "fleet" not in networks_of(services["prometheus"]) | networks_of(services["grafana"])


def test_a_device_s_health_check_asks_where_its_metrics_are() -> None:
    for service in COMPOSE["services"].values():
        if "test" in service.get("healthcheck", {}):
            assert flags_of(service)["metrics"] in service["healthcheck"]["test"][-1]


def test_grafana_has_no_default_password() -> None:
    chosen = COMPOSE["services"]["grafana"]["environment"]
    assert chosen["GF_SECURITY_DISABLE_INITIAL_ADMIN_CREATION"] == "true"  # no admin:admin
    assert chosen["GF_AUTH_BASIC_ENABLED"] == "false"
    assert chosen["GF_AUTH_ANONYMOUS_ORG_ROLE"] == "Viewer"
    assert not any("PASSWORD" in name for name in chosen)


def test_compose_allows_plain_text_for_metrics_alone() -> None:
    assert not any("--plain-text" in words_of(one) for one in COMPOSE["services"].values())


def words_of(service: dict[str, Any]) -> list[str]:
    words: list[str] = service.get("command", [])
    return words


def test_compose_starts_a_server_and_three_devices_with_parts_of_their_own() -> None:
    services = COMPOSE["services"]
    devices = {name: one for name, one in services.items() if "NAME" in one.get("environment", {})}
    assert all(device["environment"]["NAME"] == name for name, device in devices.items())
    assert {flags_of(device)["part"] for device in devices.values()} == {"0", "1", "2"}
    assert {flags_of(device)["num-parts"] for device in devices.values()} == {str(len(devices))}
    assert flags_of(services["server"])["min-clients"] == str(len(devices)) == "3"
    assert set(services["tokens"]["command"]) == set(devices)


def test_compose_runs_our_images_read_only_without_capabilities_from_targets_that_exist() -> None:
    targets = set(re.findall(r"^FROM \S+ AS (\w+)", (DEPLOY / "Dockerfile").read_text(), re.M))
    for name, service in COMPOSE["services"].items():
        if "build" in service:
            assert service["read_only"], name
            assert service["cap_drop"] == ["ALL"], name
            assert service["build"]["target"] in targets
            context = (DEPLOY / service["build"]["context"]).resolve()
            assert (context / service["build"]["dockerfile"]).is_file()


def test_compose_names_volumes_networks_and_files_that_are_there() -> None:
    for name, service in COMPOSE["services"].items():
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            known = (DEPLOY / source).exists() if source[0] == "." else source in COMPOSE["volumes"]
            assert known, f"{name}: {volume}"
        assert networks_of(service) <= set(COMPOSE["networks"])


def test_compose_publishes_on_loopback_alone() -> None:
    for service in COMPOSE["services"].values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))


def test_prometheus_asks_every_service_that_shows_metrics() -> None:
    asked = yaml.safe_load((DEPLOY / "prometheus.yml").read_text())["scrape_configs"]
    targets = {to for job in asked for one in job["static_configs"] for to in one["targets"]}
    shown = {
        f"{name}:{flags_of(service)['metrics'].rpartition(':')[2]}"
        for name, service in COMPOSE["services"].items()
        if "metrics" in flags_of({"command": service.get("command", [])})
    }
    assert targets == shown


def test_grafana_s_board_asks_the_source_that_is_provisioned() -> None:
    folder = DEPLOY / "grafana" / "provisioning"
    (source,) = yaml.safe_load((folder / "datasources/prometheus.yaml").read_text())["datasources"]
    (provider,) = yaml.safe_load((folder / "dashboards/headwater.yaml").read_text())["providers"]
    panels = [panel for panel in BOARD["panels"] if panel["type"] != "row"]
    assert {panel["datasource"]["uid"] for panel in panels} == {source["uid"]}
    assert any(
        volume.split(":")[1].startswith(provider["options"]["path"])
        for volume in COMPOSE["services"]["grafana"]["volumes"]
    )
    assert len({panel["id"] for panel in BOARD["panels"]}) == len(BOARD["panels"])
    for panel in panels:
        for target in panel["targets"]:
            assert re.search(r"\bheadwater_(server|client)_[a-z_]+", target["expr"]), panel["title"]


def test_the_board_and_the_rules_ask_for_metrics_that_are_shown() -> None:
    shown = {
        side: (ROOT / side / "operations" / "prometheus.py").read_text()
        for side in ("server", "client")
    }
    targets = [target for panel in BOARD["panels"] for target in panel.get("targets", [])]
    rules = [rule for group in RULES["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) > 4
    asked = {
        (side, re.sub("_(total|bucket|sum|count)$", "", name))
        for one in [*targets, *rules]
        for side, name in re.findall(r"headwater_(server|client)_([a-z_]+)", one["expr"])
    }
    assert len(asked) > 25
    for side, name in asked:
        ends = (name, name.removeprefix("device_"))
        assert any(f'"{end}"' in shown[side] or f'}}{end}"' in shown[side] for end in ends), name
