#!/usr/bin/env bash
# Makes .venv-LIBRARY-VERSION: that version of diffusers or transformers and what it needs other versions of; everything
# else, torch above all, is that of .venv. Usage: install_framework.sh LIBRARY VERSION. A second run ends at once.
set -euo pipefail
cd "$(dirname "$0")/.."

library=$1 version=$2
venv=.venv-$library-$version
wanted="$library $version $(cat requirements-dev.txt scripts/install_framework.sh | sha256sum)"
if [ -f "$venv/install-done" ] && [ "$(cat "$venv/install-done")" = "$wanted" ]; then exit 0; fi

shared=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
rm -rf "$venv"
.venv/bin/python -m venv "$venv"
# A line of a .pth comes after the environment's own packages, so that those count first.
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$shared" >"$site/shared.pth"
echo "install_framework: $library $version into $venv"
"$venv/bin/python" -m pip --disable-pip-version-check install -qq "$library==$version"
printf '%s' "$wanted" >"$venv/install-done"
