# What the cases need: Debian's packages, and virtual environments of PyPI's. Sourced by `check`.

venvs=${TANDEM_CI_CACHE:-/var/tmp/tandem-ci}

# Debian's packages, only if one is missing. No daemon is started: Debian's own would need a configuration.
install_packages() {
    # libpmix-dev, for Slurm's plug-in looks for libpmix.so without a number.
    local packages=(slurmctld slurmd slurm-client munge libpmix-dev openmpi-bin iproute2 python3-venv)
    local missing=()
    for package in "${packages[@]}"; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing+=("$package")
    done
    [ ${#missing[@]} -gt 0 ] || return 0
    echo "installing ${missing[*]}"
    apt-get update -qq || true
    # It keeps packages from starting their daemons.
    if [ ! -e /usr/sbin/policy-rc.d ]; then
        made_policy=1
        printf '#!/bin/sh\nexit 101\n' >/usr/sbin/policy-rc.d
        chmod +x /usr/sbin/policy-rc.d
    fi
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null || true
    if [ -n "$made_policy" ]; then rm -f /usr/sbin/policy-rc.d; fi
    made_policy=''
}

# venv NAME SECONDS PACKAGE...: prints the folder of a virtual environment, which is made where it is missing.
venv() {
    local folder=$venvs/$1 seconds=$2
    shift 2
    if [ ! -e "$folder/complete" ]; then
        [ -z "$apt_only" ] || skip "without PyPI's $*"
        mkdir -p "$venvs"
        if ! { python3 -m venv --clear "$folder" && timeout "$seconds" "$folder/bin/pip" install -q --no-cache-dir "$@"; } >&2; then
            rm -rf "$folder"
            skip "PyPI's $* cannot be had in $seconds s"
        fi
        touch "$folder/complete"
    fi
    printf '%s\n' "$folder"
}

# mpi_prefix PACKAGE: prints the folder of MPICH or Intel MPI, which a variable may name, as for the tests.
mpi_prefix() {
    case $1 in
        mpich) [ -z "${TANDEM_TEST_MPICH:-}" ] || { printf '%s\n' "$TANDEM_TEST_MPICH"; return 0; } ;;
        impi-rt) [ -z "${TANDEM_TEST_INTEL_MPI:-}" ] || { printf '%s\n' "$TANDEM_TEST_INTEL_MPI"; return 0; } ;;
    esac
    venv "$1" 240 "$1"
}

# Version of one of Debian's packages, or of a package in a virtual environment.
debian_version() { dpkg-query -W -f '${Version}' "$1" 2>/dev/null || echo "not installed"; }
pypi_version() {
    local version
    version=$("$1/bin/python" -c 'import importlib.metadata, sys; print(importlib.metadata.version(sys.argv[1]))' "$2" 2>/dev/null)
    echo "${version:-not installed}"
}
