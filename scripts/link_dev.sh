#!/usr/bin/env bash
# Makes .venv import the package of a build tree and gives it the `ulysses` command. Usage: link_dev.sh <build>/python
set -euo pipefail
cd "$(dirname "$0")/.."
tree=$(cd "$1" && pwd)
bin=$PWD/.venv/bin
site=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf '%s\n' "$tree" >"$site/ulysses_attention_dev.pth"
cat >"$bin/ulysses" <<SCRIPT
#!$bin/python
import sys

from ulysses_attention.cli import main

if __name__ == "__main__":  # rank processes import this file again
    sys.exit(main())
SCRIPT
chmod +x "$bin/ulysses"
