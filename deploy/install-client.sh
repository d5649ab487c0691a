#!/bin/sh
# Put the Headwater client on a device: Raspberry Pi OS, Debian 12 or Ubuntu 24.04 and newer, on
# arm64 or amd64.
#
#   sudo sh deploy/install-client.sh [--token-file FILE] [--data DIR] [--no-start]
#   sudo sh deploy/install-client.sh --upgrade
#   sudo sh deploy/install-client.sh --uninstall [--purge]
#
# Each release is a folder of its own below /opt/headwater/releases, made ready beside the one that
# runs; a link, `current`, is changed as the last thing. So an upgrade that fails leaves what was
# there, and an installation that fails leaves nothing but Debian's packages. docs/install.md says
# what lies where.
set -eu

PREFIX=/opt/headwater
SETTINGS=/etc/headwater
STATE=/var/lib/headwater
UNITS=/etc/systemd/system
UNIT=headwater-client.service
DEVICE_USER=headwater

# Of a device behind a metered link. PyTorch for arm64 is a third of it; CUDA would be ten times it.
MAX_DOWNLOAD_MB=300
# The wheels, and what they unpack to.
NEEDED_MB=1800
TORCH_INDEX=${TORCH_INDEX:-https://download.pytorch.org/whl/cpu}

USAGE="usage: install-client.sh [--token-file FILE] [--data DIR] [--upgrade] [--no-start]
                         [--any-torch] [--source DIR]
       install-client.sh --uninstall [--purge]

  --token-file FILE
                 enrol the device with the token that \`headwater-server enroll NAME\` printed;
                 - reads it from the standard input. It cannot be an argument: every user of this
                 machine could read it
  --data DIR     train on this folder: sets client.data, and lets the service read the folder, also
                 in a home, which is hidden from it otherwise
  --upgrade      put this checkout's version in the place of the one that is installed
  --any-torch    take a torch whose SHA-256 is not in deploy/torch.txt
  --no-start     install the unit and do not start it
  --source DIR   the checkout to install. [default: the one that this script lies in]
  --uninstall    stop and remove the client; settings, certificates and its place in the data stay
  --purge        with --uninstall: remove those too, and the user"

say() { printf 'install-client: %s\n' "$*"; }

# fail NAME WHAT REMEDY: the name is for scripts, the rest for people.
fail() {
    printf 'install-client: %s: %s\n  remedy: %s\n' "$1" "$2" "$3" >&2
    exit 1
}

main() {
    read_arguments "$@"
    leave_caller
    [ "$(id -u)" -eq 0 ] || fail NotRoot "this needs root" "put sudo before the command"
    exec 9>/run/headwater-install.lock
    flock -n 9 || fail AlreadyRunning "another install-client.sh is at work" "wait for it"
    if [ "$wants_removal" = yes ]; then
        uninstall
    else
        install_client
    fi
}

read_arguments() {
    token_file='' data='' wants_upgrade=no wants_any_torch=no wants_start=yes wants_removal=no wants_purge=no
    source=$(cd "$(dirname "$0")/.." && pwd)
    while [ $# -gt 0 ]; do
        case $1 in
            --join)
                fail TokenInArguments "a token among the arguments can be read by every user" \
                    "use --token-file FILE, or - for the standard input, with a new token"
                ;;
            --token-file | --data | --source)
                [ $# -ge 2 ] || fail Usage "$1 needs a value" "see --help"
                case $1 in
                    --token-file) token_file=$2 ;;
                    --data) data=$2 ;;
                    --source) source=$2 ;;
                esac
                shift
                ;;
            --upgrade) wants_upgrade=yes ;;
            --any-torch) wants_any_torch=yes ;;
            --no-start) wants_start=no ;;
            --uninstall) wants_removal=yes ;;
            --purge) wants_purge=yes ;;
            -h | --help)
                printf '%s\n' "$USAGE"
                exit 0
                ;;
            *) fail Usage "$1 is no option of this script" "see --help" ;;
        esac
        shift
    done
    [ "$wants_purge" = no ] || [ "$wants_removal" = yes ] ||
        fail Usage "--purge goes with --uninstall" "see --help"
    [ -z "$data" ] || [ -d "$data" ] || fail NoData "there is no folder $data" "make it first"
    [ -d "$source" ] || fail NoSource "there is no folder $source" "name a checkout"
    case $token_file in
        '' | - | /*) ;;
        *) token_file=$(pwd)/$token_file ;;
    esac
    [ -z "$token_file" ] || [ "$token_file" = - ] || [ -r "$token_file" ] ||
        fail NoToken "$token_file cannot be read" "save the token that enroll printed in a file"
    [ -z "$data" ] || data=$(cd "$data" && pwd)
    source=$(cd "$source" && pwd)
    case $data in
        *[[:space:]:%\"\\]*)
            fail Usage "$data: a unit cannot name a folder with such a character" "rename it"
            ;;
    esac
}

# What the caller's folder or environment brings must not run as root: Python would import a
# venv.py of the folder, or of PYTHONPATH, in the place of its own.
leave_caller() {
    cd /
    for name in $(env | sed -n 's/^\(PYTHON[A-Z0-9_]*\)=.*/\1/p'); do
        unset "$name"
    done
}

# Python without the folder, the environment's paths and the user's own packages.
system_python() { python3 -I "$@"; }
release_python() { "$release/venv/bin/python" -I "$@"; }
pip() { release_python -m pip --quiet --no-input "$@"; }

# Installing and upgrading.

install_client() {
    check_machine
    fingerprint=$(fingerprint_of "$source")
    installed=$(cat "$PREFIX/current/fingerprint" 2>/dev/null || true)
    if [ "$installed" = "$fingerprint" ]; then
        say "this version is installed already"
    elif [ -n "$installed" ] && [ "$wants_upgrade" = no ]; then
        fail OtherVersion "another version is installed" "add --upgrade to put this one in its place"
    else
        [ -n "$installed" ] || [ "$wants_upgrade" = no ] ||
            fail NotInstalled "there is no version to upgrade" "leave --upgrade out"
        trap undo EXIT
        trap 'exit 1' HUP INT TERM
        bring_packages
        make_user
        make_release
        use_release
        trap - EXIT HUP INT TERM
    fi
    make_settings
    install_unit
    [ -z "$token_file" ] || join
    start
}

check_machine() {
    machine=$(uname -m)
    case $machine in
        aarch64) torch='torch>=2.7,<2.10' ;;
        x86_64) torch='torch>=2.6,<2.14' ;;
        *) fail NoSuchMachine "PyTorch has no build for $machine" "use a 64-bit system" ;;
    esac
    # A 64-bit kernel may run a 32-bit system, as on older Raspberry Pi OS.
    case $(dpkg --print-architecture 2>/dev/null || true) in
        arm64 | amd64) ;;
        '') fail NoSuchSystem "this is no Debian, Ubuntu or Raspberry Pi OS" "see docs/install.md" ;;
        *) fail NoSuchMachine "the system is not a 64-bit one" "install its 64-bit edition" ;;
    esac
    for file in pyproject.toml constraints.txt client/cli.py deploy/systemd/$UNIT \
        deploy/requirements.txt deploy/torch.txt; do
        [ -f "$source/$file" ] ||
            fail NoSource "$source has no $file" "run this script from a whole checkout"
    done
}

# The same for the same files, whatever their dates.
fingerprint_of() {
    (
        cd "$1"
        # shellcheck disable=SC2046 # the names are our own, without spaces
        sha256sum $(find headwater/__init__.py common client server aggregator simulation examples -name '*.py' -o -name '*.json' | LC_ALL=C sort) \
            pyproject.toml constraints.txt deploy/requirements.txt deploy/torch.txt | sha256sum | cut -d ' ' -f 1
    )
}

bring_packages() {
    missing=''
    for package in python3 python3-venv ca-certificates; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' ||
            missing="$missing $package"
    done
    if [ -n "$missing" ]; then
        say "Debian's packages:$missing"
        # shellcheck disable=SC2086 # a list
        { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y \
            --no-install-recommends $missing >/dev/null; } ||
            fail NoPackages "apt-get could not install$missing" "run apt-get update, and look there"
    fi
    system_python -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
        fail OldPython "Python 3.11 is needed, this is $(system_python -V)" \
            "upgrade the system: Debian 12, Ubuntu 24.04 or newer"
}

make_user() {
    getent passwd "$DEVICE_USER" >/dev/null && return
    useradd --system --home-dir "$STATE" --no-create-home --shell /usr/sbin/nologin "$DEVICE_USER" ||
        fail NoUser "the user $DEVICE_USER could not be made" "see useradd's message above"
    made_user=yes
}

# Everything is downloaded and weighed before anything is unpacked.
make_release() {
    [ -d "$PREFIX" ] || made_prefix=yes
    mkdir -p "$PREFIX/releases"
    free=$(df -Pm "$PREFIX" | awk 'NR == 2 { print $4 }')
    [ "$free" -ge "$NEEDED_MB" ] ||
        fail NoSpace "$PREFIX has $free MB free, $NEEDED_MB are needed" "free some space"
    release=$(mktemp -d "$PREFIX/releases/$(date -u +%Y%m%d-%H%M%S)-XXXX")
    chmod 755 "$release"
    mkdir "$release/wheels" "$release/tmp" "$release/app"
    # /tmp may be memory, and small.
    TMPDIR=$release/tmp PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
    export TMPDIR PIP_NO_CACHE_DIR PIP_DISABLE_PIP_VERSION_CHECK
    for part in headwater common client server aggregator simulation examples pyproject.toml constraints.txt README.md LICENSE; do
        cp -RP "$source/$part" "$release/app/"
    done
    find "$release/app" -name __pycache__ -prune -exec rm -rf {} +
    system_python -m venv "$release/venv" ||
        fail NoVenv "python3 -m venv failed" "see its message above"
    download
    say "unpacking"
    pip install --no-index --find-links "$release/wheels" headwater ||
        fail NoRoom "the wheels could not be unpacked" "see pip's message above"
    check_release
    rm -rf "$release/wheels" "$release/tmp"
    unset TMPDIR
    printf '%s\n' "$fingerprint" >"$release/fingerprint"
}

# Each wheel is held against its SHA-256 in deploy/, whatever place it comes from.
download() {
    wheels=$release/wheels
    download_torch
    pip download --dest "$wheels" --require-hashes --no-deps --only-binary :all: \
        --requirement "$source/deploy/requirements.txt" ||
        fail NoDownload "a package could not be had, or is not the one that was tried" \
            "see pip's message above, and the network"
    # The project itself is built apart, by a setuptools that was held against its hash too: what it
    # is built with does not stay, and nothing is downloaded for it.
    system_python -m venv "$release/tmp/build" ||
        fail NoVenv "python3 -m venv failed" "see its message above"
    "$release/tmp/build/bin/python" -I -m pip --quiet --no-input install --no-index \
        --upgrade --find-links "$wheels" setuptools &&
        "$release/tmp/build/bin/python" -I -m pip --quiet --no-input wheel --no-index --no-deps \
            --no-build-isolation --wheel-dir "$wheels" "$release/app" ||
        fail NoBuild "the project could not be built" "see pip's message above"
    rm -rf "$release/app/build" "$release/app/headwater.egg-info"
    megabytes=$(du -sm "$wheels" | cut -f 1)
    say "downloaded $megabytes MB"
    [ "$machine" != aarch64 ] || [ "$megabytes" -le "$MAX_DOWNLOAD_MB" ] ||
        fail TooLarge "$megabytes MB are more than the $MAX_DOWNLOAD_MB of a device" \
            "report it: a package has grown"
}

# First what pip has at hand on this machine (PIP_FIND_LINKS, pip.conf). Then, on arm64, the
# registry, where such a torch is for CPUs; on amd64 PyTorch's own index, as the registry's has CUDA.
download_torch() {
    say "torch"
    if [ "$wants_any_torch" = yes ]; then
        set -- "$torch"
    else
        set -- --require-hashes --requirement "$source/deploy/torch.txt"
    fi
    pip download --no-index --no-deps --dest "$wheels" "$@" 2>/dev/null ||
        if [ "$machine" = aarch64 ]; then
            pip download --no-deps --only-binary :all: --dest "$wheels" "$@"
        else
            pip download --no-deps --only-binary :all: --index-url "$TORCH_INDEX" --dest "$wheels" "$@"
        fi ||
        fail NoTorch "no torch could be had whose SHA-256 is in deploy/torch.txt" \
            "see pip's message above. TORCH_INDEX=URL names another index of CPU builds; \`make hashes\` writes the hashes of this Python's build; --any-torch takes $torch unchecked"
    release_python - "$wheels" <<'PYTHON' ||
import pathlib, sys, zipfile
from email.parser import Parser
from pip._vendor.packaging.requirements import Requirement

(wheel,) = pathlib.Path(sys.argv[1]).glob("torch-*.whl")
with zipfile.ZipFile(wheel) as file:
    name = next(name for name in file.namelist() if name.endswith(".dist-info/METADATA"))
    told = Parser().parsestr(file.read(name).decode())
needed = [Requirement(line) for line in told.get_all("Requires-Dist", [])]
found = {one.name for one in needed if one.marker is None or one.marker.evaluate({"extra": ""})}
sys.exit(any(name.startswith(("nvidia", "cuda", "triton")) for name in found))
PYTHON
        fail CudaBuild "the torch that was found brings CUDA, gigabytes of it" \
            "name an index of CPU builds: TORCH_INDEX=URL"
}

check_release() {
    release_python -m pip check >/dev/null ||
        fail BadRelease "the packages do not fit together" "report it, with pip's message above"
    status=0
    release_python - <<'PYTHON' || status=$?
import cryptography, flwr.clientapp, grpc, torch

# Two threads, as some builds have instructions that only their threaded matrix product uses.
torch.set_num_threads(2)
net = torch.nn.Sequential(
    torch.nn.Conv2d(1, 8, 3), torch.nn.ReLU(), torch.nn.Flatten(), torch.nn.Linear(7200, 256)
)
net(torch.randn(64, 1, 32, 32)).square().mean().backward()
PYTHON
    [ "$status" -eq 0 ] || explain_status "$status"
    "$release/venv/bin/headwater-client" --help >/dev/null ||
        fail BadRelease "headwater-client does not start" "report it, with the message above"
}

# explain_status STATUS: 128 and a number stand for a signal that ended the test.
explain_status() {
    case $1 in
        132)
            reason="this processor lacks an instruction that torch uses (SIGILL, exit 132)"
            if [ "$wants_any_torch" = yes ]; then
                fail BadProcessor "$reason" "leave --any-torch out: deploy/torch.txt has the torch that was tried"
            fi
            fail BadProcessor "$reason" "docs/install.md lists the boards that were tried; report yours, with what lscpu prints"
            ;;
        137)
            fail NoMemory "the kernel ended the test, most likely for want of memory (SIGKILL, exit 137)" \
                "stop other programs or add swap; the test needs about 500 MB"
            ;;
    esac
    fail BadRelease "the packages do not run on this machine (exit $1)" "report it, with the message above"
}

use_release() {
    before=$(readlink "$PREFIX/current" || true)
    ln -sfn "releases/$(basename "$release")" "$PREFIX/current.new"
    mv -T "$PREFIX/current.new" "$PREFIX/current"
    in_use=yes
    ln -sfn current/venv "$PREFIX/venv"
    ln -sfn current/app "$PREFIX/app"
    say "installed in $PREFIX: $(du -sm "$release" | cut -f 1) MB"
    # What runs still needs the release before; it goes when the service was restarted.
    [ -z "$before" ] || old_release=$PREFIX/$before
}

undo() {
    status=$?
    trap - EXIT HUP INT TERM
    [ "${in_use:-no}" = no ] || exit "$status" # too late: call it again
    [ -z "${release:-}" ] || rm -rf "$release"
    rm -f "$PREFIX/current.new"
    [ "${made_prefix:-no}" = no ] || rm -rf "$PREFIX"
    [ "${made_user:-no}" = no ] || userdel "$DEVICE_USER"
    say "nothing was changed, but for Debian's packages" >&2
    exit "$status"
}

make_settings() {
    install -d -o root -g "$DEVICE_USER" -m 750 "$SETTINGS"
    install -d -o "$DEVICE_USER" -g "$DEVICE_USER" -m 700 "$STATE"
    [ -e "$SETTINGS/client.toml" ] || install -o root -g "$DEVICE_USER" -m 640 \
        "$source/deploy/client.toml" "$SETTINGS/client.toml"
}

install_unit() {
    install -m 644 "$source/deploy/systemd/$UNIT" "$UNITS/$UNIT"
    if [ -n "$data" ]; then
        mkdir -p "$UNITS/$UNIT.d"
        printf '[Service]\nBindReadOnlyPaths=%s\n' "$data" >"$UNITS/$UNIT.d/data.conf"
        printf '[client]\ndata = "%s"\n' "$data" | merge_settings
        runuser -u "$DEVICE_USER" -- sh -c 'test -r "$1" && test -x "$1"' sh "$data" ||
            say "the user $DEVICE_USER cannot read $data yet: setfacl -R -m u:$DEVICE_USER:rX $data, and :x for the folders above it" >&2
    fi
}

# The TOML on the standard input, over what stands in the settings.
merge_settings() {
    told=$(cat)
    "$PREFIX/venv/bin/python" -I - "$told" "$SETTINGS/client.toml" <<'PYTHON' ||
import pathlib, sys, tomllib
import tomli_w

told, path = sys.argv[1], pathlib.Path(sys.argv[2])
settings = tomllib.loads(path.read_text())
for branch, values in tomllib.loads(told).items():
    settings[branch] = {**settings.get(branch, {}), **values}
fresh = path.with_suffix(".new")
fresh.write_text("# docs/settings.md lists all settings.\n" + tomli_w.dumps(settings))
fresh.chmod(0o640)
fresh.replace(path)
PYTHON
        fail BadSettings "$SETTINGS/client.toml could not be changed" "see the message above"
    chgrp "$DEVICE_USER" "$SETTINGS/client.toml"
}

join() {
    # As the user of the service: the key is made where it stays, and readable by nobody else. That
    # user may not be able to read the token's file: root does.
    joined=$(
        if [ "$token_file" = - ]; then cat; else cat "$token_file"; fi |
            runuser -u "$DEVICE_USER" -- env HOME="$STATE" \
                "$PREFIX/venv/bin/headwater-client" join --folder "$STATE/enrolment"
    ) ||
        fail NotEnrolled "the client is installed, and not enrolled" \
            "ask for a new token, and call this again with --token-file FILE"
    # It ends with how to start a client by hand; here the service is started.
    printf '%s\n' "$joined" | sed '/^Start it with/,$d'
    # Address, name and the files' places.
    merge_settings <"$STATE/enrolment/client.toml"
}

start() {
    if [ ! -d /run/systemd/system ]; then
        say "systemd does not run here: the unit is installed, and not started"
    elif [ "$wants_start" = no ]; then
        systemctl daemon-reload
        say "installed; start it with: sudo systemctl enable --now $UNIT"
        return # what runs may still need the release before
    elif ! grep -q '^task *=' "$SETTINGS/client.toml"; then
        systemctl daemon-reload
        systemctl enable --quiet "$UNIT"
        say "set task = \"/path/to/my_task.py:MyTask\" at the top of $SETTINGS/client.toml, then: sudo systemctl start $UNIT"
    else
        systemctl daemon-reload
        systemctl enable --quiet "$UNIT"
        systemctl restart "$UNIT" || go_back
        say "started; follow it with: sudo journalctl -fu $UNIT"
    fi
    sweep
}

# Nothing runs from the other releases any more.
sweep() {
    for other in "$PREFIX"/releases/*; do
        [ "$other" = "$PREFIX/$(readlink "$PREFIX/current")" ] || rm -rf "$other"
    done
}

go_back() {
    if [ -n "${old_release:-}" ]; then
        ln -sfn "releases/$(basename "$old_release")" "$PREFIX/current"
        rm -rf "$release"
        systemctl restart "$UNIT" || true
        say "the version before is back" >&2
    fi
    fail NotStarted "the service does not start" \
        "see: sudo journalctl -u $UNIT; and run: sudo -u $DEVICE_USER $PREFIX/venv/bin/headwater-client doctor --config $SETTINGS/client.toml --state $STATE"
}

# Removing.

uninstall() {
    if [ -d /run/systemd/system ] && [ -e "$UNITS/$UNIT" ]; then
        systemctl disable --now --quiet "$UNIT" ||
            fail NotStopped "the service does not stop" "see: sudo systemctl status $UNIT"
    fi
    rm -rf "${UNITS:?}/$UNIT" "${UNITS:?}/$UNIT.d" "$PREFIX"
    [ ! -d /run/systemd/system ] || systemctl daemon-reload
    if [ "$wants_purge" = yes ]; then
        rm -rf "$SETTINGS" "$STATE"
        ! getent passwd "$DEVICE_USER" >/dev/null || userdel "$DEVICE_USER"
        say "removed, with settings, certificates and state; Debian's packages stay"
    else
        say "removed; $SETTINGS and $STATE stay: --uninstall --purge removes them"
    fi
}

main "$@"
