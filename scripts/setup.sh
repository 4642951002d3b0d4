#!/usr/bin/env bash
# Makes .venv with torch and the pinned tools, and installs what the system lacks. A second run ends at once.
# Usage: setup.sh [PACKAGE...]; further Debian packages, each with a command of its own name.
set -euo pipefail
cd "$(dirname "$0")/.."

torch_version=${TORCH_VERSION:-2.13.0}
stamp=.venv/setup-done
wanted="torch $torch_version $(cat requirements-dev.txt scripts/setup.sh | sha256sum)"
is_set_up() { [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; }
missing_extras() { local each; for each in "$@"; do command -v "$each" >/dev/null || echo "$each"; done; }
if is_set_up && [ -z "$(missing_extras "$@")" ]; then exit 0; fi

find_python() {
  local candidate
  for candidate in ${PYTHON3:-python3 python3.13 python3.12 python3.11 python3.10}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      command -v "$candidate"
      return
    fi
  done
  echo "setup: no Python 3.10 or newer found. Fix: install one, or set PYTHON3=/path/to/python3." >&2
  exit 1
}

# Debian packages of what is missing; names the first reason why each is needed.
missing_packages() {
  local header='#include <CLI/CLI.hpp>'
  command -v c++ >/dev/null || echo g++
  "$python" -c 'import ensurepip' 2>/dev/null || echo python3-venv
  "$python" -c 'import os, sys, sysconfig; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' ||
    echo python3-dev
  echo '#include <gtest/gtest.h>' | c++ -std=c++20 -fsyntax-only -x c++ - 2>/dev/null || echo libgtest-dev
  echo "$header" | c++ -std=c++20 -fsyntax-only -x c++ - 2>/dev/null || echo libcli11-dev
  command -v clang-tidy >/dev/null || echo clang-tidy
  command -v ccache >/dev/null || echo ccache
  missing_extras "$@"
}

install_packages() {
  local as_root=()
  if [ "$(id -u)" != 0 ]; then
    if ! sudo -n true 2>/dev/null && ! { [ -t 0 ] && command -v sudo >/dev/null; }; then as_root=(false); else as_root=(sudo); fi
  fi
  if [ "${as_root[0]:-}" = false ] || ! command -v apt-get >/dev/null; then
    echo "setup: these system packages are missing and cannot be installed from here (Debian names):" >&2
    echo "  $*" >&2
    echo "Fix: install them as root, on Debian or Ubuntu: apt-get install -y $*" >&2
    exit 1
  fi
  echo "setup: installing $*"
  retry "${as_root[@]}" apt-get update -qq
  retry "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "$@" >/dev/null
}

# A network that fails once is tried again.
retry() {
  local attempt
  for attempt in 1 2 3; do
    "$@" && return 0
    echo "setup: '$*' failed (attempt $attempt of 3)" >&2
    sleep $((attempt * 5))
  done
  return 1
}

python=$(find_python)
packages=$(missing_packages "$@")
# ccache only saves time: never a reason to stop.
# shellcheck disable=SC2086
if [ "$packages" = ccache ]; then
  (install_packages ccache) || echo "setup: going on without ccache" >&2
elif [ -n "$packages" ]; then
  install_packages $packages
fi

if is_set_up; then exit 0; fi
rm -f "$stamp"
if [ ! -x .venv/bin/python ] || ! .venv/bin/python -c '' 2>/dev/null; then
  rm -rf .venv
  "$python" -m venv .venv
fi
pip=(.venv/bin/python -m pip --disable-pip-version-check install -qq)
echo "setup: torch $torch_version and the pinned tools into .venv (once; some minutes on a slow network)"
index=()
if [ -n "${TORCH_INDEX_URL:-}" ]; then index=(--extra-index-url "$TORCH_INDEX_URL"); fi
retry "${pip[@]}" "${index[@]}" "torch==$torch_version"
retry "${pip[@]}" -r requirements-dev.txt
printf '%s' "$wanted" >"$stamp"
