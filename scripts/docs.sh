#!/usr/bin/env bash
# Sets up if needed, then builds the documentation, guides and API reference, as a site: build/docs/index.html.
# A warning is an error.  Nothing is fetched and nothing of PipeFill is imported: docstrings are read.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
case ${1:-} in
    "") ;;
    -h | --help) sed -n '2,3s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "docs.sh: unknown argument $1 (see --help)" >&2; exit 2 ;;
esac
scripts/setup.sh

# Copies, so that the links between pages are those of the repository.
rm -rf build/docs build/docs-pages build/docs-code
mkdir -p build/docs-pages build/docs-code/megatron
cp -R docs README.md CONTRIBUTING.md CHANGELOG.md SECURITY.md LICENSE NOTICE build/docs-pages/
# A package, and not the namespace that is shared with megatron-core: else all of that is read as well.
touch build/docs-code/megatron/__init__.py
ln -s "$PWD/megatron/fill" build/docs-code/megatron/fill

log=build/docs.log
if ! .venv/bin/zensical build --clean --strict >"$log" 2>&1; then
    sed 's/\x1b\[[0-9;]*m//g' "$log" >&2 # its colours, of each letter
    exit 1
fi
if grep 'griffe: ' "$log" >&2; then # what is wrong with a docstring: --strict lets it pass
    echo "docs.sh: docstrings as above; expected Google's style, with the parameters of the signature" >&2
    exit 1
fi
echo "build/docs/index.html"
