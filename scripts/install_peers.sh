#!/usr/bin/env bash
# Makes .venv-peers with torch and the libraries of requirements-peers.txt. A second run ends at once. Needs .venv, which
# scripts/setup.sh makes.
set -euo pipefail
cd "$(dirname "$0")/.."

torch_version=${TORCH_VERSION:-2.13.0}
stamp=.venv-peers/install-done
wanted="torch $torch_version $(cat requirements-peers.txt scripts/install_peers.sh | sha256sum)"
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then exit 0; fi

if ! .venv/bin/python -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "install_peers: .venv has no Python 3.11 or newer. Fix: PYTHON3=/path/to/python3.11 scripts/setup.sh" >&2
  exit 1
fi
rm -rf .venv-peers
.venv/bin/python -m venv .venv-peers
pip=(.venv-peers/bin/python -m pip --disable-pip-version-check install -qq)
index=()
if [ -n "${TORCH_INDEX_URL:-}" ]; then index=(--extra-index-url "$TORCH_INDEX_URL"); fi
echo "install_peers: torch $torch_version and the libraries into .venv-peers (once; some minutes on a slow network)"
"${pip[@]}" "${index[@]}" "torch==$torch_version"
"${pip[@]}" setuptools wheel setuptools_scm # two of the libraries come as sources
DS_BUILD_OPS=0 "${pip[@]}" --no-deps --no-build-isolation -r requirements-peers.txt
printf '%s' "$wanted" >"$stamp"
